"""Every schedule that has a name, on four ranks in one go, against one process."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_platform import linear
from hp_platform.testing import run_distributed
from hp_schedule import Schedule, interleaved_1f1b, u_shape
from hp_schedule.runtime import (
    PipelineSchedule,
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleZBV,
    ScheduleZeroBubble,
    TensorSpec,
    from_schedule,
)

NUM_RANKS, WIDTH, ROWS = 4, 4, 2

Make = Callable[..., PipelineSchedule]


class Block(nn.Module):
    """A residual layer whose weight gradient can be put off, and a scale whose cannot."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator).double())
        self.scale = nn.Parameter(torch.rand(WIDTH, generator=generator).double())

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(linear(x, self.weight)) * self.scale


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def given(schedule: Schedule, stages: list[PipelineStage], _num: int, **options: Any) -> Any:
    return from_schedule(schedule, stages, **options)


def loop(stage: int) -> int:
    return stage % NUM_RANKS


def fold(stage: int) -> int:
    return min(stage % (2 * NUM_RANKS), 2 * NUM_RANKS - 1 - stage % (2 * NUM_RANKS))


U_SHAPE = u_shape(4, num_microbatches=5)

# What makes it, number of stages, number of microbatches, where stages live.
SCHEDULES: Mapping[str, tuple[Make, int, int, Callable[[int], int]]] = {
    "GPipe": (ScheduleGPipe, 4, 5, loop),
    "1F1B": (Schedule1F1B, 4, 6, loop),
    "1F1B, sends waited for": (partial(Schedule1F1B, overlap_p2p=False), 4, 6, loop),
    "1F1B, fewer microbatches than ranks": (Schedule1F1B, 4, 2, loop),
    "interleaved 1F1B": (ScheduleInterleaved1F1B, 8, 8, loop),
    "interleaved 1F1B, 7 microbatches": (ScheduleInterleaved1F1B, 8, 7, loop),
    "interleaved 1F1B, overlapping": (
        partial(ScheduleInterleaved1F1B, overlap_b_f=True),
        8,
        7,
        loop,
    ),
    "looped BFS": (ScheduleLoopedBFS, 8, 3, loop),
    "zero bubble": (ScheduleZeroBubble, 4, 7, loop),
    "zero bubble, 1.5p": (partial(ScheduleZeroBubble, max_in_flight="1.5p"), 4, 7, loop),
    "zero bubble, 2p": (partial(ScheduleZeroBubble, max_in_flight="2p"), 4, 8, loop),
    "zero bubble, fewer microbatches than ranks": (ScheduleZeroBubble, 4, 2, loop),
    "interleaved zero bubble": (ScheduleInterleavedZeroBubble, 8, 6, loop),
    "interleaved zero bubble, three stages": (ScheduleInterleavedZeroBubble, 12, 4, loop),
    "ZBV": (ScheduleZBV, 8, 6, fold),
    "ZBV, fewer microbatches than ranks": (ScheduleZBV, 8, 3, fold),
    "V-half": (ScheduleVHalf, 8, 6, fold),
    "V-min": (ScheduleVMin, 8, 5, fold),
    "DualPipeV": (ScheduleDualPipeV, 8, 9, fold),
    "U-shape": (
        partial(given, U_SHAPE),
        U_SHAPE.num_stages,
        5,
        U_SHAPE.stage_to_rank.__getitem__,
    ),
    "given": (
        partial(given, interleaved_1f1b(4, num_microbatches=3, num_stages_per_rank=3)),
        12,
        3,
        loop,
    ),
}


def inputs(num: int) -> Tensor:
    generator = torch.Generator().manual_seed(num)
    return torch.randn(num * ROWS, WIDTH, generator=generator).double()


def run(name: str) -> dict[str, Any]:
    make, num_stages, num, place = SCHEDULES[name]
    mine = [stage for stage in range(num_stages) if place(stage) == dist.get_rank()]
    modules = {stage: Block(stage) for stage in mine}
    stages = [
        PipelineStage(
            module,
            stage_index=stage,
            num_stages=num_stages,
            device=torch.device("cpu"),
            input_spec=TensorSpec((ROWS, WIDTH), torch.float64) if stage else None,
        )
        for stage, module in modules.items()
    ]
    runtime = make(stages, num, loss_fn=loss_fn)
    x = inputs(num)
    losses = [runtime.run(x, target=x + 1).losses for _ in range(2)]
    return {
        "losses": losses,
        "grads": {
            f"{stage}.{parameter}": value.grad
            for stage, module in modules.items()
            for parameter, value in module.named_parameters()
        },
    }


def run_all() -> dict[str, dict[str, Any]]:
    return {name: run(name) for name in SCHEDULES}


@cache
def runs() -> list[dict[str, dict[str, Any]]]:
    return run_distributed(run_all, world_size=NUM_RANKS, timeout=90)


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_steps_of_a_schedule_equal_two_of_one_process(name: str) -> None:
    _, num_stages, num, place = SCHEDULES[name]
    blocks = [Block(stage) for stage in range(num_stages)]
    losses = []
    for _ in range(2):
        for x in inputs(num).chunk(num):
            output = x
            for block in blocks:
                output = block(output)
            loss = loss_fn(output, x + 1)
            torch.autograd.backward(loss)
            losses.append(loss.detach())
    expected = {
        f"{stage}.{parameter}": value.grad
        for stage, block in enumerate(blocks)
        for parameter, value in block.named_parameters()
    }
    found = {key: grad for rank in runs() for key, grad in rank[name]["grads"].items()}
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    last = runs()[place(num_stages - 1)][name]["losses"]
    torch.testing.assert_close([*last[0], *last[1]], losses, rtol=1e-12, atol=0)
