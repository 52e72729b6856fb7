"""The plan laid over the run: the simulator at measured costs against the clock.

Stages sleep instead of computing, so that the figures hold on a machine with fewer cores than
ranks; lengths of the naps differ by stage and microbatch.
"""

import time
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_platform import submit_weight_grad
from hp_platform.testing import run_distributed
from hp_schedule import (
    MetaStep,
    Schedule,
    Span,
    Timeline,
    add_send_recv,
    interleaved_1f1b,
    measured_costs,
    one_f_one_b,
    simulate,
)
from hp_schedule.runtime import PipelineStage, TensorSpec, from_schedule

FORWARD, INPUT, WEIGHT = 0.006, 0.007, 0.005
STEPS, ROUNDS = 8, 4


class _Naps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: float) -> Tensor:
        ctx.weight, ctx.scale = weight, scale
        time.sleep(FORWARD * scale)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        time.sleep(INPUT * ctx.scale)
        weight, scale = ctx.weight, ctx.scale

        def weight_grad() -> Tensor:
            time.sleep(WEIGHT * scale)
            return torch.zeros_like(weight)

        return grad * 1.0, submit_weight_grad(weight, weight_grad), None


class Sleeper(nn.Module):
    """Sleeps `scale` times as long as others, and the longer the larger the microbatch's index."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.scale = scale

    def forward(self, x: Tensor, longer: float = 1.0) -> Tensor:
        y: Tensor = _Naps.apply(x, self.weight, self.scale * longer)  # type: ignore[no-untyped-call]
        return y


def split(schedule: Schedule) -> Schedule:
    """Replace every backward by its two parts, one after the other."""
    rows = [
        [
            part
            for step in row
            if step is not None
            for part in (
                [MetaStep.from_str(str(step).replace("B", half)) for half in "IW"]
                if "B" in str(step)
                else [step]
            )
        ]
        for row in schedule.steps
    ]
    return Schedule.from_steps(
        rows, stage_to_rank=schedule.stage_to_rank, num_microbatches=schedule.num_microbatches
    )


SCHEDULES = {
    "2 ranks": add_send_recv(one_f_one_b(2, num_microbatches=6)),
    "4 ranks": add_send_recv(interleaved_1f1b(4, num_microbatches=5)),
    "4 ranks, split": add_send_recv(split(one_f_one_b(4, num_microbatches=6))),
}


def run(schedule: Schedule) -> list[list[Span]]:
    """Run a few steps after a first one; return the spans of each on this rank.

    A schedule of two ranks runs twice, side by side.
    """
    size, world_size = schedule.num_ranks, dist.get_world_size()
    rank = dist.get_rank() % size
    stages = [
        PipelineStage(
            Sleeper(1.0 + 0.3 * (stage % 3)),
            stage_index=stage,
            num_stages=schedule.num_stages,
            device=torch.device("cpu"),
            input_spec=TensorSpec((8, 8)) if stage else None,
        )
        for stage in schedule.stages_of(rank)
    ]
    runtime = from_schedule(
        schedule,
        stages,
        loss_fn=lambda output, _: output.sum(),
        pipelines=[range(first, first + size) for first in range(0, world_size, size)],
    )
    num = schedule.num_microbatches
    x = torch.ones(8, 8, requires_grad=True)
    kwargs = [{"longer": 1.0 + 0.1 * index} for index in range(num)]
    spans = []
    for _ in range(STEPS + 1):
        dist.barrier()
        result = runtime.run_microbatches([(x,)] * num, kwargs, [None] * num)
        spans.append(list(result.timeline))
    return spans[1:]


def run_all() -> dict[str, list[list[Span]]]:
    return {name: run(schedule) for name, schedule in SCHEDULES.items()}


@cache
def runs(round_: int) -> list[dict[str, list[list[Span]]]]:  # noqa: ARG001 - each is another
    return run_distributed(run_all, world_size=4, timeout=60)


def without_first_wait(timeline: Timeline) -> Timeline:
    """Leave out how long ranks waited for their first input, which starts when they come."""
    start = min(span.start for span in timeline if span.step.type.is_compute)
    return Timeline(
        Span(span.rank, span.step, max(start, span.start), span.end) for span in timeline
    )


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_simulator_at_measured_costs_tells_the_step_time(name: str) -> None:
    schedule = SCHEDULES[name]
    ratios: list[float] = []
    # The best of a few steps: others may use the machine at the same time, and then of a few more.
    for round_ in range(ROUNDS):
        for step in range(STEPS):
            ranks = runs(round_)[: schedule.num_ranks]
            measured = without_first_wait(
                Timeline(span for rank in ranks for span in rank[name][step])
            )
            costs = measured_costs(
                measured,
                num_stages=schedule.num_stages,
                num_microbatches=schedule.num_microbatches,
                per_microbatch=True,
            )
            plan = simulate(schedule, costs)
            ratios.append(measured.makespan / plan.makespan)
            assert plan.timeline.num_ranks == measured.num_ranks
        if min(ratios) < 1.10:
            break
    shown = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    print(f"{name}: the run takes {shown} of the plan")  # noqa: T201  # a figure to report
    assert 0.95 < min(ratios) < 1.10


def test_costs_are_the_means_of_the_steps_that_ran() -> None:
    def span(text: str, seconds: float) -> Span:
        return Span(0, MetaStep.from_str(text), 0.0, seconds)

    timeline = Timeline(
        [
            span("0F0", 1.0),
            span("0F1", 3.0),
            span("0I0", 2.0),
            span("0W0", 4.0),
            span("0B1", 7.0),
            span("0RECV_F1", 9.0),
            span("(1F0;1B1)OVERLAP_F_B", 6.0),
        ]
    )
    costs = measured_costs(timeline, num_stages=2, num_microbatches=2)
    assert costs.forward == [2.0, 3.0]
    assert costs.input_grad == [2.0, 3.0]
    assert costs.weight_grad == [4.0, 0.0]
    apart = measured_costs(timeline, num_stages=2, num_microbatches=2, per_microbatch=True)
    assert apart.forward == [[1.0, 3.0], [3.0, 3.0]]
    with pytest.raises(ValueError, match=r"forwards of stage 2 \(0\) must be >= 1"):
        measured_costs(timeline, num_stages=3, num_microbatches=2)
