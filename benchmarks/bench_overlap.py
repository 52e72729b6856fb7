"""A forward and a backward on a slow link, one after the other and overlapped.

Two Gloo ranks exchange rows before and after the experts of every layer. `slow_group` makes each
exchange take `--latency` seconds longer, and attention and experts take `--compute` seconds in each
direction without using a core, as on a device that is not the CPU. So every exchange is paired with
`--compute` seconds of the other side: what of it can be hidden is the shorter of the two, and
`hidden` is the share of that which overlap takes off the time. `waiting` is the same pair where the
wrapped functions wait for what they launch: threads alone hide nothing. The bits of the output and
of all gradients must be equal.

    python benchmarks/bench_overlap.py
    python benchmarks/bench_overlap.py --layers 8 --compute 0.04

`--trace FILE` also writes a trace of rank 0 for `python -m hp_overlap FILE`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _ExperimentalConfig
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

from hp_overlap import CommComputeOverlap
from hp_platform import all_to_all, all_to_all_lazy
from hp_platform.testing import run_distributed, slow_group

RANKS, ROWS, WIDTH = 2, 64, 32


@dataclass(frozen=True)
class Settings:
    """What to measure; times are in seconds."""

    layers: int
    compute: float
    latencies: tuple[float, ...]
    repeats: int
    trace: str


@dataclass(frozen=True)
class Row:
    """Best seconds of rank 0 at one latency."""

    latency: float
    sequential: float
    overlapped: float
    waiting: float
    hideable: float
    equal: bool

    @property
    def hidden(self) -> float:
        """Share of what can be hidden that is."""
        return (self.sequential - self.overlapped) / self.hideable if self.hideable else 0.0


class Busy(torch.autograd.Function):
    """Takes time in both directions, as compute on a device does: the host's threads go on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        """Scale `x`, later."""
        ctx.seconds = seconds
        y = x * 1.01
        time.sleep(seconds)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        """Scale the gradient, later."""
        (grad,) = grads
        result: Tensor = grad * 1.01
        time.sleep(ctx.seconds)
        return result, None


def make_chunk(
    settings: Settings,
    overlap: CommComputeOverlap,
    exchange: Callable[..., Tensor],
    group: ProcessGroup,
    seed: int,
) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """Return layers of attention and experts, and their weights."""
    dispatch = overlap.wrap_dispatch(lambda x: exchange(x, group=group))
    combine = overlap.wrap_combine(lambda x: exchange(x, group=group))
    generator = torch.Generator().manual_seed(seed)
    weights = [
        torch.randn(WIDTH, WIDTH, generator=generator).div(WIDTH).requires_grad_()
        for _ in range(2 * settings.layers)
    ]
    busy: Any = Busy

    def chunk(x: Tensor) -> Tensor:
        for attention, expert in zip(weights[::2], weights[1::2], strict=True):
            x = x + busy.apply(x @ attention, settings.compute)
            x = x + combine(busy.apply(dispatch(x) @ expert, settings.compute))
        return x

    return chunk, weights


def pair(
    settings: Settings,
    group: ProcessGroup,
    *,
    exchange: Callable[..., Tensor],
    overlapped: bool,
    trace: str = "",
) -> tuple[float, list[Tensor]]:
    """Time one pair; return the output of the forward and all gradients of the backward too."""
    overlap = CommComputeOverlap(strict=overlapped and exchange is all_to_all_lazy)
    backward, weights = make_chunk(settings, overlap, exchange, group, seed=1)
    forward, _ = make_chunk(settings, overlap, exchange, group, seed=2)
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    x0, x1 = torch.randn(2, ROWS, WIDTH, generator=generator)
    loss = backward(x0).square().sum()
    outputs: list[Tensor] = []
    profiler = profiled() if trace else nullcontext()
    dist.barrier()
    start = time.perf_counter()
    with profiler as running:
        if overlapped:
            overlap.run(lambda: outputs.append(forward(x1) + 0), loss.backward)
        else:
            loss.backward()
            outputs.append(forward(x1) + 0)
        seconds = time.perf_counter() - start
    if running is not None:
        running.export_chrome_trace(trace)
    return seconds, [outputs[0].detach(), *(w.grad for w in weights if w.grad is not None)]


def profiled() -> profile:
    """Return a profiler that sees the helper thread and the link as well."""
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    return profile(activities=[ProfilerActivity.CPU], experimental_config=every_thread)


def measure(settings: Settings) -> list[Row]:
    """Return a row for each latency; the ways alternate."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the default process group must be initialised")
    rows = []
    for latency in settings.latencies:
        group = slow_group(world, latency=latency)
        ways = [(all_to_all_lazy, False), (all_to_all_lazy, True), (all_to_all, True)]
        times: list[list[float]] = [[] for _ in ways]
        found: list[list[Tensor]] = [[] for _ in ways]
        for _ in range(settings.repeats):
            for i, (exchange, pairs) in enumerate(ways):
                seconds, found[i] = pair(settings, group, exchange=exchange, overlapped=pairs)
                times[i].append(seconds)
        hideable = 4 * settings.layers * min(latency, settings.compute)
        equal = all(all(map(torch.equal, found[0], other)) for other in found[1:])
        sequential, overlapped, waiting = map(min, times)
        rows.append(Row(latency, sequential, overlapped, waiting, hideable, equal))
    if settings.trace and dist.get_rank() == 0:
        pair(settings, group, exchange=all_to_all_lazy, overlapped=True, trace=settings.trace)
    elif settings.trace:
        pair(settings, group, exchange=all_to_all_lazy, overlapped=True)
    return rows


def main() -> None:
    """Print one row for each latency, as rank 0 measured it."""
    parser = argparse.ArgumentParser(description="overlap of a forward and a backward")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--compute", type=float, default=0.02, help="seconds of a section")
    parser.add_argument("--latency", type=float, nargs="+", default=[0.0, 0.01, 0.02, 0.04])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--trace", default="", help="file for a trace of the last pair of rank 0")
    given = parser.parse_args()
    settings = Settings(
        given.layers, given.compute, tuple(given.latency), given.repeats, given.trace
    )
    rows = run_distributed(measure, settings, world_size=RANKS, timeout=600)[0]
    print("latency  sequential  waiting  overlapped  ratio  hidden  bits")
    for r in rows:
        print(
            f"{1e3 * r.latency:4.0f} ms {1e3 * r.sequential:8.0f} ms {1e3 * r.waiting:5.0f} ms"
            f" {1e3 * r.overlapped:8.0f} ms {r.overlapped / r.sequential:6.2f} {r.hidden:7.0%}"
            f"  {'equal' if r.equal else 'DIFFER'}"
        )


if __name__ == "__main__":
    main()
