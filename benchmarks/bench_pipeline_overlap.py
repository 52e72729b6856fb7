"""A whole pipeline on a slow link between experts, its pairs run at once or not.

Four Gloo ranks: two pipeline ranks times two that share experts, each holding two stages of real
layers of hp-expert (`timed_layers.py`). As in `benchmarks/bench_overlap.py`, each exchange takes
`--latency` seconds longer, that of counts included, and attention and experts take `--compute`
seconds in each direction, without using a core.
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

import torch
import torch.distributed as dist
from timed_layers import WIDTH, Exchange, TimedLayers
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_overlap import CommComputeOverlap
from hp_platform import new_group
from hp_platform.testing import run_distributed, slow_group
from hp_schedule.runtime import (
    PipelineSchedule,
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    TensorSpec,
)
from hp_trainer.overlap import overlap_experts, overlap_pairs

STAGES, ROWS = 4, 16
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


class Stage(TimedLayers):
    """Layers whose result is there when they return it: it is sent on."""

    def forward(self, x: Tensor) -> Tensor:
        """[ROWS, WIDTH] to the same."""
        return super().forward(x) + 0


def run(
    name: str, settings: Settings, num_microbatches: int, exchange: Exchange, *, overlapped: bool
) -> tuple[list[float], list[Tensor]]:
    """Time some runs of a schedule; return this rank's gradients too."""
    place = dist.get_rank() // 2
    mine = [place, STAGES - 1 - place] if name == "DualPipeV" else [place, place + 2]
    overlap = CommComputeOverlap(strict=True, puts_off_weight_gradients=True)
    modules = {
        index: Stage(
            settings.layers, exchange, seconds=settings.compute, spend=time.sleep, seed=index
        )
        for index in mine
    }
    for module in modules.values():
        overlap_experts(module, overlap)
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


def exchanges(latency: float) -> Exchange:
    """Make the groups of the ranks that share experts: for rows, and for all beside them."""

    def slow(name: str) -> ProcessGroup:
        group = new_group([[0, 1], [2, 3]], name=name)
        assert group is not None, "every rank is in a group"
        return slow_group(group, latency=latency)

    return Exchange(slow("rows"), slow("small"))


def measure(settings: Settings) -> list[str]:
    """Return a printed row for each schedule and number of microbatches."""
    fast, slow = exchanges(0.0), exchanges(settings.latency)
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
