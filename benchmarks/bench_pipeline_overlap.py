"""A whole pipeline on a slow link between experts, its pairs run at once or not.

Four Gloo ranks: two pipeline ranks times two that share experts, each holding two stages. As in
`benchmarks/bench_overlap.py`, an exchange of tokens takes `--latency` seconds
longer and attention and experts take `--compute` seconds in each direction, without using a core.
`none` is the time without any delay, so `removed` is the share of the cost of all exchanges that
overlap takes away, those of forwards and backwards that no pair has included. Gradients must have
equal bits.

    python benchmarks/bench_pipeline_overlap.py --microbatches 8 16
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_overlap import CommComputeOverlap
from hp_platform import all_to_all_lazy, new_group
from hp_platform.testing import run_distributed, slow_group
from hp_schedule.runtime import (
    PipelineSchedule,
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    TensorSpec,
)
from hp_train.overlap import overlap_pairs

STAGES, ROWS, WIDTH = 4, 16, 32
SCHEDULES: dict[str, Callable[..., PipelineSchedule]] = {
    "interleaved 1F1B": partial(ScheduleInterleaved1F1B, overlap_b_f=True),
    "DualPipeV": ScheduleDualPipeV,
}


@dataclass(frozen=True)
class Settings:
    """What to measure; times are in seconds."""

    layers: int
    compute: float
    latency: float
    microbatches: tuple[int, ...]
    repeats: int


class Busy(torch.autograd.Function):
    """Takes time in both directions, as compute on a device does: the host's threads go on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Return `x`, later."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return x * 1.01

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        """Return the gradient, later."""
        time.sleep(ctx.seconds)
        gradient: Tensor = grads[0] * 1.01
        return gradient, None


class Stage(nn.Module):
    """Layers of attention and experts of which nothing is left but the time."""

    def __init__(
        self, index: int, settings: Settings, group: ProcessGroup, overlap: CommComputeOverlap
    ) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2 * settings.layers)
        )
        self.seconds = settings.compute
        self.dispatch = overlap.wrap_dispatch(lambda x: all_to_all_lazy(x, group=group))
        self.combine = overlap.wrap_combine(lambda x: all_to_all_lazy(x, group=group))

    def forward(self, x: Tensor) -> Tensor:
        """[ROWS, WIDTH] to the same."""
        busy: Any = Busy
        for attention, expert in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = x + busy.apply(attention(x), self.seconds)
            x = x + self.combine(busy.apply(expert(self.dispatch(x)), self.seconds))
        return x + 0  # what is sent on is there


def run(
    name: str, settings: Settings, num_microbatches: int, group: ProcessGroup, *, overlapped: bool
) -> tuple[list[float], list[Tensor]]:
    """Time some runs of a schedule; return this rank's gradients too."""
    place = dist.get_rank() // 2
    mine = [place, STAGES - 1 - place] if name == "DualPipeV" else [place, place + 2]
    overlap = CommComputeOverlap(strict=True)
    modules = {index: Stage(index, settings, group, overlap) for index in mine}
    stages = [
        PipelineStage(
            module,
            stage_index=index,
            num_stages=STAGES,
            device=torch.device("cpu"),
            input_spec=TensorSpec((ROWS, WIDTH)) if index else None,
        )
        for index, module in modules.items()
    ]
    runtime = SCHEDULES[name](
        stages, num_microbatches, pipelines=[[0, 2], [1, 3]], loss_fn=nn.functional.mse_loss
    )
    if overlapped:
        overlap_pairs(runtime, overlap)
    torch.manual_seed(dist.get_rank() % 2)
    x, target = torch.randn(2, num_microbatches * ROWS, WIDTH)
    times = []
    for _ in range(settings.repeats):
        dist.barrier()
        start = time.perf_counter()
        runtime.run(*((x,) if 0 in mine else ()), target=target, record=False)
        dist.barrier()
        times.append(time.perf_counter() - start)
    grads = [p.grad for m in modules.values() for p in m.parameters() if p.grad is not None]
    return times, grads


def measure(settings: Settings) -> list[str]:
    """Return a printed row for each schedule and number of microbatches."""
    fast, link = (new_group([[0, 1], [2, 3]], name=name) for name in ("fast", "link"))
    if fast is None or link is None:
        raise RuntimeError("every rank must be in a group")
    slow = slow_group(link, latency=settings.latency)
    rows = []
    for name in SCHEDULES:
        for num_microbatches in settings.microbatches:
            timed = partial(run, name, settings, num_microbatches)
            none, _ = timed(fast, overlapped=False)
            off, expected = timed(slow, overlapped=False)
            on, actual = timed(slow, overlapped=True)
            equal = all(map(torch.equal, expected, actual))
            removed = (min(off) - min(on)) / (min(off) - min(none))
            rows.append(
                f"{name:<16} {num_microbatches:12d} {1e3 * min(none):8.0f} ms"
                f" {1e3 * min(off):7.0f} ms {1e3 * min(on):7.0f} ms {min(on) / min(off):6.2f}"
                f" {removed:8.0%}  {'equal' if equal else 'DIFFER'}"
            )
    return rows


def main() -> None:
    """Print one row for each schedule and number of microbatches, as rank 0 measured it."""
    parser = argparse.ArgumentParser(description="a pipeline with and without overlap")
    parser.add_argument("--layers", type=int, default=2, help="of each stage")
    parser.add_argument("--compute", type=float, default=0.01, help="seconds of a section")
    parser.add_argument("--latency", type=float, default=0.01, help="seconds of an exchange")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8])
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    settings = Settings(
        given.layers, given.compute, given.latency, tuple(given.microbatches), given.repeats
    )
    print("schedule         microbatches        none        off         on  ratio  removed  bits")
    for row in run_distributed(measure, settings, world_size=4, timeout=600)[0]:
        print(row)


if __name__ == "__main__":
    main()
