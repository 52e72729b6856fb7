"""Attention over a split sequence equals attention in one process: outputs and gradients."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from hp_context import (
    Attention,
    Causal,
    ContextParallel,
    Documents,
    Full,
    Mask,
    SlidingWindow,
    masked_attention,
    shard_sequence,
    unshard_sequence,
)
from hp_platform.testing import RankError, run_distributed

pytestmark = pytest.mark.usefixtures("one_thread")

SEQ, HEADS, SIZE = 24, 4, 8
EVERYTHING = Full()
BSHD, BNSD = (1, 2), (2, 1)


@dataclass(frozen=True)
class Case:
    mask: Mask = EVERYTHING
    dims: tuple[int, int] = BSHD
    heads: int = HEADS
    kv_heads: int = HEADS
    dtype: torch.dtype = torch.float64
    batch: int = 2
    value_size: int = SIZE


def inputs(case: Case, seed: int = 0) -> list[Tensor]:
    """Whole q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for heads, size in (
        (case.heads, SIZE),
        (case.kv_heads, SIZE),
        (case.kv_heads, case.value_size),
        (case.heads, case.value_size),
    ):
        shape = [case.batch, 0, 0, size]
        shape[case.dims[0]], shape[case.dims[1]] = SEQ, heads
        result.append(torch.randn(shape, dtype=case.dtype, generator=generator))
    return result


def backward(out: Tensor, grad: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def alone(case: Case) -> list[Tensor]:
    q, k, v, grad = inputs(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seq_dim, head_dim = case.dims
    out = masked_attention(q, k, v, mask=case.mask, seq_dim=seq_dim, head_dim=head_dim)
    return backward(out, grad, leaves)


def split(
    case: Case,
    attend: Callable[[ContextParallel, dist.ProcessGroup, list[Tensor]], Tensor],
) -> list[Tensor]:
    """Shard, attend by `attend`, and put output and gradients together again."""
    group = dist.group.WORLD
    assert group is not None
    seq_dim, head_dim = case.dims
    q, k, v, grad = (shard_sequence(x, group, seq_dim=seq_dim) for x in inputs(case))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    parallel = ContextParallel(seq_dim=seq_dim, head_dim=head_dim)
    mine = backward(attend(parallel, group, leaves), grad, leaves)
    return [unshard_sequence(x, group, seq_dim=seq_dim) for x in mine]


def errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    pairs = zip(actual, expected, strict=True)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def by_module(case: Case) -> list[Tensor]:
    def attend(parallel: ContextParallel, group: dist.ProcessGroup, qkv: list[Tensor]) -> Tensor:
        seq_dim, head_dim = case.dims
        core = parallel.apply(Attention(case.mask, seq_dim=seq_dim, head_dim=head_dim), group)
        out: Tensor = core(*qkv)
        return out

    return split(case, attend)


MASKS = [Full(), Causal(), SlidingWindow(5), Causal() & Documents((1, 7, 3, 13))]


@pytest.mark.sample(*(f"2-{dims}-{mask}" for dims in ("BSHD", "BNSD") for mask in MASKS))
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("dims", [BSHD, BNSD], ids=["BSHD", "BNSD"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients_equal_one_process(
    ranks: int, dims: tuple[int, int], mask: Mask
) -> None:
    case = Case(mask, dims)
    for whole in run_distributed(by_module, case, world_size=ranks):
        assert max(errors(whole, alone(case))) <= 1e-12


@pytest.mark.sample("BSHD-2-8-4", "BSHD-3-6-2", "BSHD-4-12-3", "BNSD-2-4-1", "BNSD-4-12-6")
@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"),
    [(2, 8, 4), (2, 4, 1), (4, 8, 2), (4, 8, 1), (4, 12, 6), (3, 6, 2), (4, 12, 3)],
)
@pytest.mark.parametrize("dims", [BSHD, BNSD], ids=["BSHD", "BNSD"])
def test_grouped_heads_equal_one_process_where_ranks_must_share_them(
    dims: tuple[int, int], ranks: int, heads: int, kv_heads: int
) -> None:
    case = Case(Causal(), dims, heads=heads, kv_heads=kv_heads)
    for whole in run_distributed(by_module, case, world_size=ranks):
        assert max(errors(whole, alone(case))) <= 1e-12


def test_values_may_have_another_head_size() -> None:
    case = Case(Causal(), value_size=3)
    for whole in run_distributed(by_module, case, world_size=2):
        assert max(errors(whole, alone(case))) <= 1e-12


@pytest.mark.parametrize("ranks", [2, 4])
def test_float32_is_bit_equal_where_no_head_is_replicated(ranks: int) -> None:
    case = Case(Causal(), dtype=torch.float32)
    for whole in run_distributed(by_module, case, world_size=ranks):
        assert errors(whole, alone(case)) == [0.0] * 4


def test_reruns_are_bit_equal_with_replicated_heads() -> None:
    case = Case(Causal(), heads=12, kv_heads=3, dtype=torch.float32)
    first, second = (run_distributed(by_module, case, world_size=4)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class Block(nn.Module):
    """Projections, rotary-like scaling by position, core attention by keyword."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(5)
        width = HEADS * SIZE
        self.projections = nn.ModuleList(
            nn.Linear(width, width, bias=False, dtype=torch.float64) for _ in "qkv"
        )
        self.core = core

    def forward(self, x: Tensor, *, recompute: str = "") -> Tensor:
        if recompute.startswith("block"):
            out: Tensor = checkpoint(self._attend, x, use_reentrant="non" not in recompute)
            return out
        return self._attend(x, recompute)

    def _attend(self, x: Tensor, recompute: str = "") -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, SIZE)) for p in self.projections)
        if recompute.startswith("core"):
            out: Tensor = checkpoint(self.core, q, k, v, use_reentrant="non" not in recompute)
        else:
            out = self.core(q, k, v)
        return x + out.flatten(-2)


def hidden(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, SEQ, HEADS * SIZE, dtype=torch.float64, generator=generator)


def block_gradients(block: Block, x: Tensor, recompute: str) -> list[Tensor]:
    x = x.requires_grad_()
    out = block(x, recompute=recompute)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad]


def weight_gradients(block: Block) -> list[Tensor]:
    return [p.grad for p in block.parameters() if p.grad is not None]


def block_split(recompute: str) -> list[Tensor]:
    group = dist.group.WORLD
    assert group is not None
    block = Block(ContextParallel().apply(Attention(Causal()), group))
    mine = block_gradients(block, shard_sequence(hidden(0), group), recompute)
    weights = weight_gradients(block)
    for grad in weights:
        dist.all_reduce(grad)
    return [*(unshard_sequence(x, group) for x in mine), *weights]


@pytest.mark.parametrize(
    "recompute",
    ["", "core reentrant", "core non-reentrant", "block reentrant", "block non-reentrant"],
)
def test_recompute_changes_nothing(recompute: str) -> None:
    block = Block(Attention(Causal()))
    expected = block_gradients(block, hidden(0), "") + weight_gradients(block)
    for whole in run_distributed(block_split, recompute, world_size=2):
        assert max(errors(whole, expected)) <= 1e-12


def two_in_flight(order: str) -> list[Tensor]:
    """Two forwards of one module before the backwards, in either order."""
    group = dist.group.WORLD
    assert group is not None
    core = ContextParallel().apply(Attention(Causal()), group)
    batches = [[shard_sequence(x, group) for x in inputs(Case(), seed)] for seed in (0, 1)]
    outs = [core(*(x.requires_grad_() for x in batch[:3])) for batch in batches]
    for i in (0, 1) if order == "fifo" else (1, 0):
        outs[i].backward(batches[i][3])
    grads = [x.grad for batch in batches for x in batch[:3]]
    return [
        unshard_sequence(x, group) for x in (*(o.detach() for o in outs), *grads) if x is not None
    ]


@pytest.mark.parametrize("order", ["fifo", "lifo"])
def test_two_microbatches_in_flight_do_not_meet(order: str) -> None:
    expected: list[list[Tensor]] = []
    for seed in (0, 1):
        q, k, v, grad = inputs(Case(), seed)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        expected.append(backward(masked_attention(q, k, v, mask=Causal()), grad, leaves))
    flat = [expected[0][0], expected[1][0], *expected[0][1:], *expected[1][1:]]
    for whole in run_distributed(two_in_flight, order, world_size=2):
        assert max(errors(whole, flat)) <= 1e-12


class Sdpa(nn.Module):
    """A core attention of somebody else's: heads first, keywords, weights beside the output."""

    def forward(
        self,
        scale: float,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, str]:
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, is_causal=is_causal, scale=scale
        )
        return out, "weights"


def by_keyword(mode: str) -> list[Tensor]:
    case = Case(Causal(), BNSD)
    parallel = ContextParallel(
        seq_dim=2,
        head_dim=1,
        qkv_kwarg_names=("query", "key", "value"),
        mask=Causal() if mode == "mask of the api" else None,
    )

    def attend(_: ContextParallel, group: dist.ProcessGroup, qkv: list[Tensor]) -> Tensor:
        core = parallel.apply(Sdpa(), group)
        named: dict[str, object] = dict(zip(("query", "key", "value"), qkv, strict=True))
        if mode == "mask of the call":
            named["attn_mask"] = Causal()
        elif mode == "mask of the module":
            named["is_causal"] = True
        out, weights = core(SIZE**-0.5, **named)
        assert weights == "weights"
        result: Tensor = out
        return result

    return split(case, attend)


@pytest.mark.parametrize("mode", ["mask of the api", "mask of the call", "mask of the module"])
def test_a_strange_module_gets_q_k_v_by_keyword_and_the_mask(mode: str) -> None:
    for whole in run_distributed(by_keyword, mode, world_size=2):
        assert max(errors(whole, alone(Case(Causal(), BNSD)))) <= 1e-12


class Merged(nn.Module):
    """Takes v, q, k and returns heads merged with the head size."""

    def forward(self, v: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return masked_attention(q, k, v, mask=Causal()).flatten(2)


def reordered() -> list[Tensor]:
    def attend(_: ContextParallel, group: dist.ProcessGroup, qkv: list[Tensor]) -> Tensor:
        core = ContextParallel(qkv_indices=(1, 2, 0)).apply(Merged(), group)
        q, k, v = qkv
        out: Tensor = core(v, q, k).unflatten(2, (HEADS, SIZE))
        return out

    return split(Case(Causal()), attend)


def test_positions_may_be_permuted_and_heads_merged_in_the_output() -> None:
    for whole in run_distributed(reordered, world_size=2):
        assert max(errors(whole, alone(Case(Causal())))) <= 1e-12


def by_mesh() -> list[Tensor]:
    def attend(parallel: ContextParallel, group: dist.ProcessGroup, qkv: list[Tensor]) -> Tensor:
        mesh = init_device_mesh("cpu", (1, group.size()), mesh_dim_names=("dp", "cp"))
        with pytest.raises(ValueError, match="must equal 1"):
            parallel.apply(Attention(Causal()), mesh)
        out: Tensor = parallel.apply(Attention(Causal()), mesh["cp"])(*qkv)
        return out

    return split(Case(Causal()), attend)


def test_one_axis_of_a_mesh_stands_for_its_group() -> None:
    for whole in run_distributed(by_mesh, world_size=2):
        assert max(errors(whole, alone(Case(Causal())))) <= 1e-12


def dies_in_attention() -> None:
    class Dies(Attention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Mask | None = None) -> Tensor:
            if dist.get_rank() == 1:
                os._exit(3)
            return super().forward(q, k, v, attn_mask)

    group = dist.group.WORLD
    assert group is not None
    ContextParallel().apply(Dies(), group)(*(shard_sequence(x, group) for x in inputs(Case())[:3]))


def test_a_rank_that_dies_between_the_exchanges_ends_the_run_naming_it() -> None:
    with pytest.raises(RankError) as caught:
        run_distributed(dies_in_attention, world_size=2, timeout=20)
    assert caught.value.rank == 1


def test_a_group_of_one_changes_nothing() -> None:
    case = Case(Causal())
    (whole,) = run_distributed(by_module, case, world_size=1)
    assert errors(whole, alone(case)) == [0.0] * 4
