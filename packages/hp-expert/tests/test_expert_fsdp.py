"""Experts beside data parallelism that averages: FSDP2 and DistributedDataParallel.

Each rank's loss is a mean over its own tokens; one process takes the mean of these losses.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hp_expert import (
    BaseExpertParallel,
    ExpertParallel,
    ExpertTensorParallel,
    GroupedExperts,
    MoE,
    TopKRouter,
    clip_grad_norm_,
    expert_parameter_names,
    fully_shard_experts,
    reduce_expert_gradients,
)
from hp_platform import set_fsdp_gather_dtype
from hp_platform.testing import compare, run_distributed

EXPERTS, DIM, HIDDEN = 8, 8, 8


class Block(nn.Module):
    """A layer with experts among other parameters."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.moe = MoE(TopKRouter(DIM, EXPERTS, 2), GroupedExperts(EXPERTS, DIM, HIDDEN, bias=True))
        self.to(dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.moe(self.norm(x))[0]
        return y


def tokens(rank: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(3 + rank, DIM, generator=generator, dtype=dtype)


def one_process(num_ranks: int, dtype: torch.dtype = torch.float64) -> Block:
    block = Block(dtype)
    for rank in range(num_ranks):
        (block(tokens(rank, dtype)).square().mean() / num_ranks).backward()
    return block


def whole(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x


def gradients(block: nn.Module) -> dict[str, Tensor]:
    return {n.removeprefix("module."): whole(p.grad) for n, p in block.named_parameters()}


def under_fsdp(efsdp: int, ep: int, tp: int, dtype: torch.dtype, steps: int) -> list[str]:
    names = ("efsdp", "ep", "tp") if tp > 1 else ("efsdp", "ep")
    mesh = init_device_mesh("cpu", (efsdp, ep, tp)[: len(names)], mesh_dim_names=names)
    num_ranks = efsdp * ep
    block, style = Block(dtype), style_of(tp)
    style.apply(block, mesh["ep", "tp"] if tp > 1 else mesh["ep"])
    fully_shard_experts(block, mesh["efsdp"], divide_gradients_by=num_ranks)
    fully_shard(block, mesh=dp_mesh(num_ranks, tp))
    x = tokens(dist.get_rank() // tp, dtype)
    for _ in range(steps):
        block(x).square().mean().backward()
    expected = one_process(num_ranks, dtype)
    for parameter in expected.parameters():
        assert parameter.grad is not None
        parameter.grad *= steps
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    found = [compare(gradients(block), gradients(expected), bound=bound)]
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
    actual = clip_grad_norm_(block, 0.01)
    found.append(compare({"norm": actual}, {"norm": norm.double()}, bound=bound))
    found.append(compare(gradients(block), gradients(expected), bound=bound))
    return [str(comparison) for comparison in found if not comparison.ok]


def style_of(tp: int) -> BaseExpertParallel:
    return ExpertTensorParallel() if tp > 1 else ExpertParallel()


def dp_mesh(num_ranks: int, tp: int) -> DeviceMesh:
    """All ranks with tokens of their own, beside those with the same."""
    return init_device_mesh("cpu", (num_ranks, tp), mesh_dim_names=("dp", "tp"))["dp"]


@pytest.mark.sample("2-2-2-dtype0", "1-2-2-dtype1", "2-1-1-dtype1")
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on gathers of two axes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("efsdp", "ep", "tp"), [(2, 2, 1), (1, 2, 1), (2, 1, 1), (4, 2, 1), (2, 2, 2), (1, 2, 2)]
)
def test_gradients_under_fsdp_are_the_mean_over_data_parallel_ranks(
    efsdp: int, ep: int, tp: int, dtype: torch.dtype
) -> None:
    for wrong in run_distributed(under_fsdp, efsdp, ep, tp, dtype, 2, world_size=efsdp * ep * tp):
        assert not wrong, "\n".join(wrong)


def with_copies(copies: int, shards: int, dtype: torch.dtype) -> str:
    """Experts of a rank each: sharded over some ranks, of which others keep copies (HSDP)."""
    mesh = init_device_mesh("cpu", (copies, shards, 1), mesh_dim_names=("copies", "efsdp", "ep"))
    num_ranks, block = copies * shards, Block(dtype)
    ExpertParallel().apply(block, mesh["ep"])
    with pytest.raises(ValueError, match="mesh must have one or two axes"):
        fully_shard_experts(block, mesh, divide_gradients_by=num_ranks)
    fully_shard_experts(block, mesh["copies", "efsdp"], divide_gradients_by=num_ranks)
    fully_shard(block, mesh=dp_mesh(num_ranks, 1))
    block(tokens(dist.get_rank(), dtype)).square().mean().backward()
    bound = 1e-12 if dtype == torch.float64 else 1e-5
    found = compare(gradients(block), gradients(one_process(num_ranks, dtype)), bound=bound)
    return "" if found.ok else str(found)


@pytest.mark.sample("2-2-dtype0", "2-1-dtype0", "2-1-dtype1")
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, on gathers of two axes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("copies", "shards"), [(2, 2), (2, 1), (1, 2), (1, 1)])
def test_experts_may_have_copies_beside_shards(
    copies: int, shards: int, dtype: torch.dtype
) -> None:
    size = copies * shards
    assert run_distributed(with_copies, copies, shards, dtype, world_size=size) == [""] * size


def experts_inside(efsdp: int) -> set[int]:
    """Dims that FSDP2 cuts the weights of four local experts along."""
    mesh = init_device_mesh("cpu", (efsdp, 1), mesh_dim_names=("efsdp", "ep"))
    experts = GroupedExperts(4, DIM, HIDDEN, bias=True)
    ExpertParallel().apply(experts, mesh["ep"])
    fully_shard_experts(experts, mesh["efsdp"], divide_gradients_by=1)
    placements: list[Any] = [
        p.placements[0] for p in experts.parameters() if isinstance(p, DTensor)
    ]
    assert experts.num_local_experts == 4  # it has them all in forward
    assert "(here 0..3)" in repr(experts)
    return {placement.dim for placement in placements}


def test_fsdp_cuts_inside_experts_where_there_are_too_few() -> None:
    assert run_distributed(experts_inside, 4, world_size=4) == [{0}] * 4
    assert run_distributed(experts_inside, 8, world_size=8) == [{1}] * 8


def narrow_parts(num_shards: int) -> dict[str, int]:
    """Return the dims that FSDP2 shards of two experts, half of whose hidden dim (4) is local."""
    mesh = init_device_mesh("cpu", (num_shards, 1, 2), mesh_dim_names=("efsdp", "ep", "tp"))
    experts = GroupedExperts(2, DIM, 4, bias=True)
    ExpertTensorParallel().apply(experts, mesh["ep", "tp"])
    fully_shard_experts(experts, mesh["efsdp"], divide_gradients_by=1)
    placements: dict[str, Any] = {
        n: p.placements[0] for n, p in experts.named_parameters() if isinstance(p, DTensor)
    }
    return {name: placement.dim for name, placement in placements.items()}


def test_fsdp_cuts_what_tensor_parallelism_leaves_of_an_expert() -> None:
    found = run_distributed(narrow_parts, 4, world_size=8)
    assert found == [{"w1": 0, "w2": 1, "w3": 0, "b1": 0, "b2": 1, "b3": 0}] * 8


def without_rows(narrow: bool) -> dict[str, Tensor]:
    """Gradients of experts that are sharded over two ranks, one of which has no rows for them."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    experts: Any = fully_shard(GroupedExperts(4, DIM, HIDDEN, bias=True), mesh=mesh)
    if narrow:
        set_fsdp_gather_dtype(experts.parameters(), torch.bfloat16)
    counts = torch.tensor([3, 0, 4, 2]) * (dist.get_rank() == 0)
    rows = torch.linspace(-1, 1, int(counts.sum()) * DIM).view(-1, DIM).bfloat16().requires_grad_()
    experts(rows, counts).float().square().sum().backward()
    return gradients(experts)


def test_experts_without_rows_get_zeros_whatever_they_are_gathered_in() -> None:
    wide, narrow = (run_distributed(without_rows, cast, world_size=2) for cast in (False, True))
    assert wide[0].keys() == {"w1", "w2", "w3", "b1", "b2", "b3"}
    for name, gradient in wide[0].items():
        assert torch.equal(gradient, narrow[0][name]), name
        assert gradient.any()


def under_ddp(summed: bool) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ep"))
    block, ep = Block(), mesh["ep"].get_group()
    ExpertParallel().apply(block, ep)
    names = expert_parameter_names(block)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(block, names)
    model = DistributedDataParallel(block)
    x = tokens(dist.get_rank())
    loss = model(x).square()
    # DDP divides by 4 whatever the loss is; a loss that is a share of the global one takes it back.
    loss = (
        loss.sum() / sum(tokens(rank).numel() for rank in range(4)) * 4 if summed else loss.mean()
    )
    loss.backward()
    reduce_expert_gradients(block, replicas=mesh["replicas"], divide_by=4)
    expected = one_process(4)
    if summed:
        expected.zero_grad()
        expected(torch.cat([tokens(rank) for rank in range(4)])).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
    actual = clip_grad_norm_(block, 0.01)
    mine = {n: g.chunk(2)[ep.rank()] if n in names else g for n, g in gradients(expected).items()}
    found = [compare({"norm": actual}, {"norm": norm}, bound=1e-12)]
    found.append(compare(gradients(block), mine, bound=1e-12))
    return [str(comparison) for comparison in found if not comparison.ok]


@pytest.mark.parametrize("summed", [False, True])
def test_gradients_beside_ddp_are_those_of_one_process(summed: bool) -> None:
    for wrong in run_distributed(under_ddp, summed, world_size=4):
        assert not wrong, "\n".join(wrong)
