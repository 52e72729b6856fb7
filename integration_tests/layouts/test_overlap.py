"""Pairs of a pipeline schedule run at once, with the exchanges of experts hidden behind them."""

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_expert import (
    AllToAllDispatcher,
    DispatchState,
    ExpertParallel,
    GroupedExperts,
    MoE,
    TopKRouter,
)
from hp_overlap import CommComputeOverlap, HookCoordinator, TraceEntry
from hp_platform import new_group
from hp_platform.testing import compare, run_distributed
from hp_schedule.runtime import (
    PipelineSchedule,
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    TensorSpec,
    TorchTransport,
)
from hp_trainer.overlap import overlap_experts, overlap_pairs
from integration_tests.runs import BASE, config_of, train_in

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DIM, TOKENS, NUM_STAGES, NUM_MICROBATCHES = 16, 12, 4, 6


LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "interleaved": {
        "mesh": {"pp": 2, "dp_replicate": 2, "ep": 2},
        "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
    },
    "sharded, recomputed, dualpipe_v": {
        "mesh": {"pp": 2, "dp_shard": 2, "ep": 2},
        "pipeline": {"schedule": "dualpipe_v", "stages_per_rank": 2},
        "train": {"recompute": "full"},
    },
    "tensor parallel on the second of two stages": {
        "mesh": {"pp": 2, "stage_tp": [1, 2], "stage_ep": [1, 2]},
        "pipeline": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
    },
}


@pytest.mark.sample(
    "sharded, recomputed, dualpipe_v",
    "tensor parallel on the second of two stages",
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_with_overlap_is_bitwise_the_same(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    train = {**layout.get("train", {}), "steps": 1}
    off, on = (
        train_in(
            config_of(
                mesh=layout["mesh"],
                pipeline={**layout["pipeline"], "overlap": overlap},
                train={**BASE["train"], **train},
            ),
            tmp_path / str(overlap),
        )
        for overlap in (False, True)
    )
    assert on.losses == off.losses
    assert on.norms == off.norms
    assert on.eval_loss == off.eval_loss
    for actual, expected in (
        (on.first_gradients, off.first_gradients),
        (on.parameters, off.parameters),
    ):
        comparison = compare(actual, expected)
        assert comparison.ok, comparison


class Stage(nn.Module):
    """Layers of a dense residual and a mixture of experts."""

    def __init__(self, index: int, num_layers: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.dropout = dropout
        self.dense = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num_layers))
        self.moe = nn.ModuleList(
            MoE(TopKRouter(DIM, 4, 2), GroupedExperts(4, DIM, 8), shared=nn.Linear(DIM, DIM))
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for dense, moe in zip(self.dense, self.moe, strict=True):
            x = x + F.dropout(torch.tanh(dense(x)), self.dropout)
            x = x + moe(x)[0]
        return x


def make_stage(index: int, ep: ProcessGroup, *, num_layers: int) -> Stage:
    stage = Stage(index, num_layers).double()
    ExpertParallel().apply(stage, ep)
    return stage


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


SCHEDULES: dict[str, Callable[..., PipelineSchedule]] = {
    "interleaved": partial(ScheduleInterleaved1F1B, overlap_b_f=True),
    "dualpipe_v": ScheduleDualPipeV,
}


@dataclass(frozen=True)
class Run:
    """What a schedule gave on one rank."""

    grads: dict[str, Tensor]
    losses: list[Tensor]
    traces: list[list[TraceEntry]]


class Watched(CommComputeOverlap):
    """Keeps the trace of every pair."""

    def __init__(self) -> None:
        super().__init__(HookCoordinator(timeout=40), strict=True)
        self.traces: list[list[TraceEntry]] = []

    def run(self, fwd_fn: Callable[[], object], bwd_fn: Callable[[], object]) -> None:
        super().run(fwd_fn, bwd_fn)
        self.traces.append(self.trace)


def run_schedule(name: str, *, overlapped: bool) -> Run:
    """Two pipelines of two ranks; the ranks with the same stages share the experts."""
    rank = dist.get_rank()
    ep = new_group([[0, 1], [2, 3]], name="ep")
    assert ep is not None
    place = rank // 2
    mine = [place, place + 2] if name == "interleaved" else [place, NUM_STAGES - 1 - place]
    # Stages of unequal depth: the halves of most pairs have not as many layers as each other.
    modules = {index: make_stage(index, ep, num_layers=1 + index % 3) for index in mine}
    overlap = Watched()
    if overlapped:
        for module in modules.values():
            overlap_experts(module, overlap)
    stages = [
        PipelineStage(
            module,
            stage_index=index,
            num_stages=NUM_STAGES,
            device=torch.device("cpu"),
            input_spec=TensorSpec((TOKENS, DIM), torch.float64) if index else None,
        )
        for index, module in modules.items()
    ]
    runtime = SCHEDULES[name](stages, NUM_MICROBATCHES, pipelines=[[0, 2], [1, 3]], loss_fn=loss_fn)
    if overlapped:
        overlap_pairs(runtime, overlap)
    torch.manual_seed(100 + rank % 2)
    batch = torch.randn(2, NUM_MICROBATCHES * TOKENS, DIM, dtype=torch.float64)
    args = (batch[0],) if 0 in mine else ()
    result = runtime.run(*args, target=batch[1])
    grads = {
        f"{index}.{key}": parameter.grad
        for index, module in modules.items()
        for key, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    return Run(grads, list(result.losses), overlap.traces)


def both_ways(name: str) -> tuple[Run, Run, list[str]]:
    """Run without and with overlap; note every message that is waited for or sent in a pair."""
    off = run_schedule(name, overlapped=False)
    inside: list[str] = []
    run_pair = CommComputeOverlap.run
    active: list[bool] = []

    def watched_run(self: CommComputeOverlap, *halves: Callable[[], object]) -> None:
        active.append(True)
        run_pair(self, *halves)
        active.pop()

    def watch(method: str) -> None:
        original = getattr(TorchTransport, method)

        def watched(self: TorchTransport, *arguments: object) -> object:
            if active:
                inside.append(f"{method} {arguments[0]}")
            return original(self, *arguments)

        setattr(TorchTransport, method, watched)

    CommComputeOverlap.run = watched_run  # type: ignore[method-assign,assignment]
    for method in ("wait_receive", "send"):
        watch(method)
    return off, run_schedule(name, overlapped=True), inside


@pytest.mark.parametrize("name", SCHEDULES)
def test_pipelines_with_overlap_are_bitwise_the_same(name: str) -> None:
    ranks = run_distributed(both_ways, name, world_size=4, timeout=100)
    for off, on, inside in ranks:
        comparison = compare(on.grads, off.grads)
        assert comparison.ok, comparison
        assert len(on.grads) >= 16
        assert all(map(torch.equal, on.losses, off.losses))
        assert len(on.losses) == len(off.losses)
        assert len(on.traces) >= 4
        assert inside == []
    traces = [on.traces for _, on, _ in ranks]
    assert traces[0] == traces[1]
    assert traces[2] == traces[3]
    sides = {entry.side for trace in traces[0] for entry in trace}
    assert sides == {"forward", "backward"}


def benchmark(name: str) -> dict[str, Any]:
    """What a benchmark defines; it imports from the folder that it lies in."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return runpy.run_path(str(BENCHMARKS / f"{name}.py"))
    finally:
        sys.path.remove(str(BENCHMARKS))


def timed_pipeline() -> tuple[list[float], list[float]]:
    """Times of a pipeline without and with overlap, on a slow link between experts."""
    bench = benchmark("bench_pipeline_overlap")
    settings = bench["Settings"](1, 0.02, 0.02, (), 2)
    timed = partial(bench["run"], "interleaved 1F1B", settings, 6, bench["exchanges"](0.02))
    (off, _), (on, _) = (timed(overlapped=overlapped) for overlapped in (False, True))
    return off, on


@pytest.mark.sample
def test_a_pipeline_on_a_slow_link_takes_less_time_with_overlap() -> None:
    for off, on in run_distributed(timed_pipeline, world_size=4, timeout=100):
        assert min(on) < 0.95 * min(off)


def counted_pairs() -> list[Any]:
    bench = benchmark("bench_overlap")
    settings = bench["Settings"](6, 0.04, (0.01, 0.04), (2, 4), 0, "")
    return [(row.latency, row.clock, row.bound, row.equal) for row in bench["measure"](settings)]


def test_a_pair_of_real_layers_takes_065_of_the_time_where_exchanges_take_that_of_compute() -> None:
    """By a clock: no machine is so busy that it changes what is counted."""
    for rows in run_distributed(counted_pairs, world_size=2, timeout=100):
        assert len(rows) == 4
        for latency, (sequential, overlapped, alone, one_group), bound, equal in rows:
            assert equal
            assert bound <= overlapped <= 1.02 * bound
            if latency == 0.04:
                assert overlapped <= 0.65 * sequential
                assert one_group / alone > overlapped / sequential
            else:  # what exchanges take is hidden, but that of the first
                assert overlapped <= 6 * 4 * 0.04 + latency + 1e-9


def fits_without_adapters() -> bool:
    """Wrap the launches of a dispatcher as they are, and run a pair of one layer each."""
    group = dist.group.WORLD
    assert group is not None
    overlap = CommComputeOverlap(HookCoordinator(timeout=30), strict=True)
    dispatcher = AllToAllDispatcher(group, 4)
    launch_dispatch = overlap.wrap_dispatch(dispatcher.launch_dispatch)
    launch_combine = overlap.wrap_combine(dispatcher.launch_combine)
    experts = GroupedExperts(4, DIM, 8).double()
    ExpertParallel().apply(experts, group)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    chosen, weights = torch.randint(4, (TOKENS, 2)), torch.rand(TOKENS, 2, dtype=torch.float64)

    def layer(x: Tensor) -> Tensor:
        state: DispatchState
        rows, state = dispatcher.prepare(x, chosen, weights)
        rows, state = launch_dispatch(rows, state)
        y = experts(dispatcher.finish_dispatch(rows, state))
        return dispatcher.finish_combine(launch_combine(y, state), state)

    outputs: list[Tensor] = []
    loss = layer(x[0]).square().sum()
    overlap.run(lambda: outputs.append(layer(x[1])), loss.backward)
    overlapped = [outputs[0].detach(), x.grad, *(p.grad for p in experts.parameters())]
    assert [entry.hook for entry in overlap.trace] == list("DACBBCAD")
    experts.zero_grad()
    x.grad = None
    layer(x[0]).square().sum().backward()
    expected = [layer(x[1]).detach(), x.grad, *(p.grad for p in experts.parameters())]
    return all(
        a is not None and b is not None and torch.equal(a, b)
        for a, b in zip(overlapped, expected, strict=True)
    )


def test_launches_of_hp_expert_fit_without_adapters() -> None:
    assert run_distributed(fits_without_adapters, world_size=2) == [True, True]


class Waits:
    """A dispatcher that waits for what it has launched."""

    def __init__(self, group: ProcessGroup, num_experts: int) -> None:
        self._inner = AllToAllDispatcher(group, num_experts)
        self.prepare, self.finish_dispatch = self._inner.prepare, self._inner.finish_dispatch
        self.launch_combine, self.finish_combine = (
            self._inner.launch_combine,
            self._inner.finish_combine,
        )

    def launch_dispatch(self, rows: Tensor, state: DispatchState) -> tuple[Tensor, DispatchState]:
        rows, state = self._inner.launch_dispatch(rows, state)
        return rows + 0, state


def a_dispatcher_that_waits() -> None:
    group = dist.group.WORLD
    assert group is not None
    stage = Stage(0, 1).double()
    ExpertParallel(dispatcher=Waits).apply(stage, group)
    overlap = Watched()
    overlap_experts(stage, overlap)
    x = torch.randn(TOKENS, DIM, dtype=torch.float64)
    stage(x)
    with pytest.raises(ValueError, match=r"result of Waits\.launch_dispatch .* must be unwaited"):
        overlap.run(lambda: stage(x), lambda: None)


def test_a_dispatcher_that_waits_is_refused() -> None:
    run_distributed(a_dispatcher_that_waits, world_size=2)
