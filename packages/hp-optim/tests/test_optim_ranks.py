"""Muon over ranks: in float64 every layout is one process, each matrix orthogonalised once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import hp_optim.exchange
import hp_optim.muon
from hp_optim import Layout, Muon, Split, muon_groups, orthogonalize
from hp_platform import Pending, launch_all_to_all
from hp_platform.testing import (
    CountedClock,
    RankError,
    record_exchanges,
    run_distributed,
    slow_group,
)

STEPS = 3
SPLITS = {"qkv": Split((4, 2, 2), repeats=2), "gate_up": (9, 9), "w13": Split((1, 1), 1, 5)}
SHAPES = {
    "qkv": (16, 10),
    "out": (10, 16),
    "gate_up": (18, 10),
    "down": (10, 9),
    "thin": (2, 5),
    "w13": (6, 8, 10),
    "w2": (6, 5, 8),
    "norm": (10,),
}
NUM_MATRICES = 3 + 1 + 2 + 1 + 1 + 6 * 2 + 6


class Case(NamedTuple):
    """Mesh of the ranks, and placements of matrices and of stacks."""

    sizes: tuple[int, ...]
    dense: tuple[Placement, ...]
    stacks: tuple[Placement, ...]
    dtype: torch.dtype = torch.float64


CASES = {
    "fsdp2": Case((2,), (Shard(0),), (Shard(0),)),
    "fsdp4-uneven": Case((4,), (Shard(0),), (Shard(0),)),
    "rows": Case((4,), (Shard(1),), (Shard(1),)),
    "copies": Case((4,), (Replicate(),), (Replicate(),)),
    "hsdp": Case((2, 2), (Replicate(), Shard(0)), (Replicate(), Shard(0))),
    "fsdp-tp": Case((2, 2), (Shard(0), Shard(1)), (Shard(0), Shard(1))),
    "fsdp-fsdp": Case((2, 2), (Shard(0), Shard(0)), (Shard(0), Shard(0))),
    "ep-efsdp": Case((2, 2), (Shard(0), Replicate()), (Shard(0), Shard(2))),
}


def whole(name: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + [*SHAPES].index(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def groups(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, object]]:
    norm = {"params": [("norm", parameters["norm"])], "algorithm": "adamw", "lr": 0.01}
    return [{"params": [(n, p) for n, p in parameters.items() if n != "norm"]}, norm]


def optimizer_of(
    parameters: Mapping[str, nn.Parameter], dtype: torch.dtype, **more: object
) -> Muon:
    options: dict[str, object] = {"lr": 0.05, "split": SPLITS, "dtype": dtype, **more}
    return Muon(groups(parameters), **options)  # type: ignore[arg-type]


def train(
    make: Callable[[str, Tensor], Tensor], dtype: torch.dtype, **more: object
) -> dict[str, nn.Parameter]:
    """Train parameters that `make` cuts, as it does their gradients."""
    parameters = {name: nn.Parameter(make(name, whole(name, 0))) for name in SHAPES}
    optimizer = optimizer_of(parameters, dtype, **more)
    for step in range(1, STEPS + 1):
        for name, parameter in parameters.items():
            parameter.grad = make(name, whole(name, step))
        optimizer.step()
    return parameters


def alone(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    return train(lambda _, x: x.clone(), dtype)


def cut(case: Case) -> Callable[[str, Tensor], Tensor]:
    mesh = init_device_mesh("cpu", case.sizes)

    def make(name: str, x: Tensor) -> Tensor:
        if name == "norm":
            return x.clone()
        return distribute_tensor(x, mesh, case.stacks if x.ndim == 3 else case.dense)

    return make


def together(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def errors(case: Case, more: Mapping[str, object]) -> tuple[dict[str, float], int]:
    """Return the largest error of each parameter, and the number of factors on this rank."""
    expected = alone(case.dtype)
    with patch.object(hp_optim.muon, "orthogonalize", wraps=orthogonalize) as called:
        found = train(cut(case), case.dtype, **more)
    largest = {n: (together(p) - expected[n]).abs().max().item() for n, p in found.items()}
    return largest, called.call_count


@pytest.mark.sample(
    "fsdp2-1", "fsdp4-uneven-256", "hsdp-1", "fsdp-tp-256", "fsdp-fsdp-33554432", "ep-efsdp-256"
)
@pytest.mark.parametrize("bucket_bytes", [1, 256, 1 << 25])
@pytest.mark.parametrize("case", CASES)
def test_every_layout_is_one_process_and_each_matrix_orthogonalised_once(
    case: str, bucket_bytes: int
) -> None:
    world = torch.Size(CASES[case].sizes).numel()
    results = run_distributed(errors, CASES[case], {"bucket_bytes": bucket_bytes}, world_size=world)
    for largest, _ in results:
        assert max(largest.values()) <= 1e-12, largest
    assert sum(calls for _, calls in results) == STEPS * NUM_MATRICES


def test_in_bfloat16_layouts_differ_by_no_more_than_its_rounding() -> None:
    case = CASES["fsdp-tp"]._replace(dtype=torch.bfloat16)
    for largest, _ in run_distributed(errors, case, {}, world_size=4):
        # Three steps of rate 0.05 on factors with elements of up to 1.
        assert max(largest.values()) <= 3 * 0.05 * 2**-6, largest


def per_shard() -> float:
    """Orthogonalise each rank's rows of one matrix by themselves; return the error."""
    mesh = init_device_mesh("cpu", (2,))
    results = []
    for layouts in ({}, {"w": Layout.whole((6, 8), [dist.get_rank()])}):
        parameter = nn.Parameter(
            distribute_tensor(whole("out", 0)[:, :8].new_zeros(12, 8), mesh, [Shard(0)])
        )
        optimizer = Muon([("w", parameter)], lr=1.0, dtype=torch.float64, layouts=layouts)
        parameter.grad = distribute_tensor(
            torch.arange(96.0).double().sin().view(12, 8), mesh, [Shard(0)]
        )
        optimizer.step()
        results.append(together(parameter))
    return float((results[0] - results[1]).abs().max())


def test_a_matrix_that_is_orthogonalised_per_shard_is_found() -> None:
    assert min(run_distributed(per_shard, world_size=2)) > 0.01


def experts_stay() -> list[tuple[str, int]]:
    mesh = init_device_mesh("cpu", (4,))
    parameter = nn.Parameter(distribute_tensor(torch.randn(8, 4, 4), mesh, [Shard(0)]))
    optimizer = Muon([parameter])
    parameter.grad = distribute_tensor(torch.randn(8, 4, 4), mesh, [Shard(0)])
    with record_exchanges() as exchanges:
        optimizer.step()
    return [(exchange.kind, exchange.num_bytes) for exchange in exchanges]


def test_experts_cut_over_ranks_are_not_sent() -> None:
    assert run_distributed(experts_stay, world_size=4) == [[]] * 4


def bytes_of_a_step(rows: int, cols: int, count: int) -> list[tuple[str, int]]:
    mesh = init_device_mesh("cpu", (4,))
    parameters = [
        nn.Parameter(distribute_tensor(torch.randn(rows, cols), mesh, [Shard(0)]))
        for _ in range(count)
    ]
    optimizer = Muon(parameters, bucket_bytes=1)
    for parameter in parameters:
        parameter.grad = distribute_tensor(torch.randn(rows, cols), mesh, [Shard(0)])
    with record_exchanges() as exchanges:
        optimizer.step()
    return [(exchange.kind, exchange.num_bytes) for exchange in exchanges]


def test_a_rank_sends_its_share_once_to_owners_and_updates_once_back() -> None:
    """In bfloat16, of 8 matrices over 4 ranks: 3 / 4 of a quarter of them, there and back."""
    for exchanges in run_distributed(bytes_of_a_step, 16, 8, 8, world_size=4):
        assert {kind for kind, _ in exchanges} == {"all_to_all"}
        assert sum(sent for _, sent in exchanges) == 2 * 2 * 8 * 16 * 8 // 4 * 3 // 4


class Block(nn.Module):
    """Fused attention and gated units, whose sizes no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 10)
        self.qkv, self.out = nn.Linear(10, 21, bias=False), nn.Linear(7, 10)
        self.up, self.down = nn.Linear(10, 14), nn.Linear(14, 10, bias=False)
        self.norm, self.lm_head = nn.LayerNorm(10), nn.Linear(10, 11, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)
        x = x + self.down(self.up(self.norm(x)).relu())
        y: Tensor = self.lm_head(x)
        return y


def model() -> Block:
    torch.manual_seed(7)
    return Block().double()


def fit(block: nn.Module) -> dict[str, Tensor]:
    optimizer = Muon(
        muon_groups(block, options={"lr": 0.01}),
        lr=0.05,
        split={"qkv.weight": (7, 7, 7)},
        dtype=torch.float64,
    )
    for step in range(STEPS):
        tokens = (torch.arange(12).view(2, 6) * (step + 2)) % 11
        optimizer.zero_grad()
        block(tokens).square().mean().backward()
        optimizer.step()
    return {name: together(p) for name, p in block.named_parameters()}


def shard(block: nn.Module, mesh: DeviceMesh) -> None:
    for child in block.children():
        if isinstance(child, nn.Linear):
            fully_shard(child, mesh=mesh)
    fully_shard(block, mesh=mesh)


def by_fsdp() -> dict[str, Tensor]:
    block = model()
    shard(block, init_device_mesh("cpu", (dist.get_world_size(),)))
    return fit(block)


def by_hsdp() -> dict[str, Tensor]:
    block = model()
    shard(block, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return fit(block)


def by_fsdp_and_tp() -> dict[str, Tensor]:
    block = model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(block, mesh["tp"], plan)
    shard(block, mesh["fsdp"])
    return fit(block)


def by_tp() -> dict[str, Tensor]:
    block = model()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fit(block)


@pytest.mark.sample("by_fsdp-4", "by_hsdp-4", "by_tp-2", "by_fsdp_and_tp-4")
@pytest.mark.parametrize(
    ("way", "world"), [(by_fsdp, 2), (by_fsdp, 4), (by_hsdp, 4), (by_tp, 2), (by_fsdp_and_tp, 4)]
)
def test_models_cut_by_torch_train_as_one_process(
    way: Callable[[], dict[str, Tensor]], world: int
) -> None:
    expected = fit(model())
    for found in run_distributed(way, world_size=world):
        for name, parameter in found.items():
            assert (parameter - expected[name]).abs().max() <= 1e-12, name


def told_by_layouts() -> tuple[float, int]:
    """Cut rows by hand, without DTensor, over ranks 0 and 1 of the world."""
    rows = (range(4), range(4, 10))[dist.get_rank()]
    full, gradient = whole("out", 0)[:, :9], whole("out", 1)[:, :9]
    parameter = nn.Parameter(full[rows.start : rows.stop].clone())
    layout = Layout((10, 9), (0, 1), ((range(4), range(9)), (range(4, 10), range(9))))
    optimizer = Muon([("w", parameter)], lr=1.0, dtype=torch.float64, layouts={"w": layout})
    parameter.grad = gradient[rows.start : rows.stop].clone()
    optimizer.step()
    one = nn.Parameter(full.clone())
    one.grad = gradient.clone()
    Muon([one], lr=1.0, dtype=torch.float64).step()
    return (parameter - one[rows.start : rows.stop]).abs().max().item(), len(optimizer.state)


def test_plain_tensors_are_cut_as_their_layouts_say() -> None:
    for error, kept in run_distributed(told_by_layouts, world_size=2):
        assert error <= 1e-12
        assert kept == 1


def without_gradients() -> list[bool]:
    mesh = init_device_mesh("cpu", (2,))
    parameters = [
        nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])) for _ in range(2)
    ]
    optimizer = Muon(parameters)
    parameters[0].grad = distribute_tensor(torch.eye(4), mesh, [Shard(0)])
    optimizer.step()
    return [torch.equal(p.to_local(), torch.ones(2, 4)) for p in map(asserted, parameters)]


def asserted(parameter: nn.Parameter) -> DTensor:
    data = parameter.data
    assert isinstance(data, DTensor)
    return data


def test_parameters_without_gradients_stay() -> None:
    assert run_distributed(without_gradients, world_size=2) == [[False, True]] * 2


def other_placements() -> float:
    """Give gradients as sums of parts and as copies; return the largest error."""
    mesh = init_device_mesh("cpu", (2,))
    weight, gradient = whole("gate_up", 0), whole("gate_up", 1)
    expected = nn.Parameter(weight.clone())
    expected.grad = gradient
    Muon([expected], dtype=torch.float64).step()
    largest = 0.0
    for placement, part in ((Partial(), gradient / 2), (Replicate(), gradient)):
        parameter = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
        optimizer = Muon([parameter], dtype=torch.float64)
        parameter.grad = DTensor.from_local(part, mesh, [placement])
        optimizer.step()
        largest = max(largest, float((together(parameter) - expected).abs().max()))
    return largest


def test_gradients_with_other_placements_are_cut_as_their_parameters() -> None:
    assert max(run_distributed(other_placements, world_size=2)) <= 1e-12


def other_plans() -> None:
    mesh = init_device_mesh("cpu", (2,))
    size = 1 if dist.get_rank() else 1 << 20
    parameters = [
        nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])) for _ in range(3)
    ]
    Muon(parameters, bucket_bytes=size)


def test_ranks_with_other_plans_are_refused() -> None:
    with pytest.raises(RankError, match="must equal that of rank 0") as caught:
        run_distributed(other_plans, world_size=2)
    assert caught.value.rank == 1


def timed(compute: float) -> tuple[list[str], float]:
    """Step on a slow link with a counted clock; return the order of events, and the end."""
    clock, events = CountedClock(), list[str]()
    world = dist.group.WORLD
    assert world is not None
    slow = slow_group(world, latency=1.0, clock=clock)
    mesh = init_device_mesh("cpu", (2,))
    parameters = [
        nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])) for _ in range(8)
    ]
    with patch.object(hp_optim.muon, "new_group_of_members", return_value=slow):
        optimizer = Muon(parameters, bucket_bytes=32)  # two matrices each, one for each rank
    for parameter in parameters:
        parameter.grad = distribute_tensor(torch.eye(4), mesh, [Shard(0)])

    def factor(matrix: Tensor, _settings: object) -> Tensor:
        events.append("compute")
        clock.spend(compute)
        return matrix

    def launch(x: Tensor, **options: Any) -> Pending[Tensor]:
        events.append("send")
        return launch_all_to_all(x, **options)

    with (
        patch.object(hp_optim.muon, "orthogonalize", factor),
        patch.object(hp_optim.exchange, "launch_all_to_all", launch),
    ):
        optimizer.step()
    return events, clock.now


def test_a_bucket_travels_while_another_is_orthogonalised() -> None:
    """Of four buckets, each a second there, two of compute, one back: 10 seconds and not 16."""
    for events, seconds in run_distributed(timed, 2.0, world_size=2):
        assert " ".join(events) == (
            "send send compute send send compute send send compute send compute send"
        )
        assert seconds == 10.0
