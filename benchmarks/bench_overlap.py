"""A forward and a backward of MoE layers on a slow link, one after the other and overlapped.

Two Gloo ranks share the experts of real layers of hp-expert (`timed_layers.py`). Each exchange
takes `--latency` seconds longer, that of counts included, and those of one group follow each other.
Attention and experts take `--compute` seconds in each direction. `clock` counts these seconds and
nothing else, the same on any machine; `wall` spends them, as the time of the better of `--repeats`
pairs. Outputs and gradients must have equal bits in all ways:

    sequential   backward, then forward
    one group    a pair with all exchanges in one group, no weight gradient put off
    overlapped   a pair with a group for what travels beside rows, weight gradients put off

`sequential` exchanges as `overlapped` does, `one group` is compared with a sequential pair of its
own. `bound` is what no order of launches can beat, see docs/reference/benchmarks.md.

    python benchmarks/bench_overlap.py
    python benchmarks/bench_overlap.py --layers 8 --compute 0.04 --top-k 4

`--trace FILE` also writes a trace of rank 0 for `python -m hp_overlap FILE`.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from timed_layers import WIDTH, Exchange, Spend, TimedLayers
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

from hp_overlap import CommComputeOverlap
from hp_platform import new_group
from hp_platform.testing import CountedClock, run_distributed, slow_group
from hp_trainer.overlap import overlap_experts

RANKS, ROWS = 2, 64


@dataclass(frozen=True)
class Settings:
    """What to measure; times are in seconds."""

    layers: int
    compute: float
    latencies: tuple[float, ...]
    top_k: tuple[int, ...]
    repeats: int
    trace: str


@dataclass(frozen=True)
class Way:
    """One way to run a backward and a forward.

    Attributes:
        overlapped: Whether as a pair.
        alone: Whether what travels beside rows has a group of its own.
    """

    overlapped: bool
    alone: bool


WAYS = (Way(False, True), Way(True, True), Way(False, False), Way(True, False))


@dataclass(frozen=True)
class Row:
    """Seconds of rank 0 by way, counted and spent, at one latency."""

    top_k: int
    latency: float
    clock: tuple[float, ...]
    wall: tuple[float, ...]
    bound: float
    equal: bool


@dataclass(frozen=True)
class Link:
    """Groups that are slow by a clock, or by the time that passes."""

    rows: ProcessGroup
    small: ProcessGroup
    clock: CountedClock | None

    @property
    def spend(self) -> Spend:
        """Let seconds pass."""
        return time.sleep if self.clock is None else self.clock.spend

    @property
    def now(self) -> float:
        """Seconds since some time."""
        return time.perf_counter() if self.clock is None else self.clock.now


def pair(
    settings: Settings, link: Link, way: Way, *, top_k: int, trace: str = ""
) -> tuple[float, list[Tensor]]:
    """Time one pair; return the output of the forward and all gradients of the backward too."""
    overlap = CommComputeOverlap(strict=way.overlapped, puts_off_weight_gradients=way.alone)
    exchange = Exchange(link.rows, link.small if way.alone else None, top_k)

    def layers(seed: int) -> TimedLayers:
        made = TimedLayers(
            settings.layers, exchange, seconds=settings.compute, spend=link.spend, seed=seed
        )
        overlap_experts(made, overlap)
        return made

    backward, forward = layers(1), layers(2)
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    x0, x1 = torch.randn(2, ROWS, WIDTH, generator=generator)
    loss = backward(x0).square().sum()
    outputs: list[Tensor] = []
    profiler = profiled() if trace else nullcontext()
    dist.barrier()
    start = link.now
    with profiler as running:
        if way.overlapped:
            overlap.run(lambda: outputs.append(forward(x1) + 0), loss.backward)
        else:
            loss.backward()
            outputs.append(forward(x1) + 0)
        seconds = link.now - start
    if running is not None:
        running.export_chrome_trace(trace)
    return seconds, [
        outputs[0].detach(),
        *(p.grad for p in backward.parameters() if p.grad is not None),
    ]


def profiled() -> profile:
    """Return a profiler that sees the helper thread and the link as well."""
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread)


def bound(settings: Settings, latency: float, top_k: int) -> float:
    """Seconds that no order of launches can beat, where small exchanges have their group.

    Compute follows compute, an exchange one of its group, and a side its own results. Where rows
    are deduplicated, codes travel as well.
    """
    compute, small = settings.compute, 2 if top_k >= 4 else 1
    per_layer = max(
        4 * compute,
        2 * compute + (2 + small) * latency,  # the forward: counts, what is small or rows, combine
        (2 + small) * latency,  # the small group: also the gradient of the routing weights
        4 * latency,  # rows
    )
    return settings.layers * per_layer


def measure(settings: Settings) -> list[Row]:
    """Return a row for each latency; the ways alternate."""
    world, other = dist.group.WORLD, new_group([list(range(RANKS))], name="small")
    if world is None or other is None:
        raise RuntimeError("the default process group must be initialised")

    def slow(latency: float, clock: CountedClock | None) -> Link:
        rows, small = (slow_group(g, latency=latency, clock=clock) for g in (world, other))
        return Link(rows, small, clock)

    rows = []
    for top_k in settings.top_k:
        for latency in settings.latencies:
            counted, spent = slow(latency, CountedClock()), slow(latency, None)
            by_clock = [pair(settings, counted, way, top_k=top_k) for way in WAYS]
            walls: list[list[float]] = [[] for _ in WAYS]
            for _ in range(settings.repeats):
                for way, times in zip(WAYS, walls, strict=True):
                    times.append(pair(settings, spent, way, top_k=top_k)[0])
            equal = all(all(map(torch.equal, by_clock[0][1], found)) for _, found in by_clock[1:])
            clock = tuple(seconds for seconds, _ in by_clock)
            wall = tuple(min(times, default=0.0) for times in walls)
            least = bound(settings, latency, top_k)
            rows.append(Row(top_k, latency, clock, wall, least, equal))
    if settings.trace:
        spent = slow(settings.latencies[-1], None)
        trace = settings.trace if dist.get_rank() == 0 else ""
        pair(settings, spent, WAYS[1], top_k=settings.top_k[0], trace=trace)
    return rows


def shown(row: Row) -> str:
    """Write a row as a line."""
    parts = [f"{row.top_k:5d} {1e3 * row.latency:5.0f} ms"]
    for seconds in filter(any, (row.clock, row.wall)):
        sequential, overlapped, before, one_group = seconds
        parts.append(
            f"{1e3 * sequential:9.0f} {1e3 * overlapped:9.0f} {overlapped / sequential:6.2f}"
            f" {one_group / before:9.2f}"
        )
    return "  ".join(
        [*parts, f"{row.bound / row.clock[0]:6.2f}", "equal" if row.equal else "DIFFER"]
    )


def main() -> None:
    """Print one row for each latency, as rank 0 measured it; times in milliseconds."""
    parser = argparse.ArgumentParser(description="overlap of a forward and a backward")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--compute", type=float, default=0.04, help="seconds of a section")
    parser.add_argument("--latency", type=float, nargs="+", default=[0.0, 0.01, 0.02, 0.04, 0.08])
    parser.add_argument("--top-k", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=3, help="pairs by the time that passes")
    parser.add_argument("--trace", default="", help="file for a trace of the last pair of rank 0")
    given = parser.parse_args()
    settings = Settings(
        given.layers,
        given.compute,
        tuple(given.latency),
        tuple(given.top_k),
        given.repeats,
        given.trace,
    )
    rows = run_distributed(measure, settings, world_size=RANKS, timeout=600)[0]
    by = "sequential overlapped ratio one group"
    walls = f"  {by} by wall" if given.repeats else ""
    print(f"top k  latency  {by} by clock{walls}   bound  bits")
    for row in rows:
        print(shown(row))


if __name__ == "__main__":
    main()
