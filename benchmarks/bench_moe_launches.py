"""What one MoE layer asks of a GPU, forward and backward, counted without one.

    python benchmarks/bench_moe_launches.py                # one rank, and 4 that share experts
    python benchmarks/bench_moe_launches.py --lines        # and every launch with its source line

`hp_dry` runs the real code of the layer (bf16, the branches of CUDA and NCCL) and writes
down every launch, every wait of the host and every allocation; nothing is computed or timed.
Columns:

    launches      kernels, copies and fills beside matrix products and exchanges
    bytes         read and written by those launches, every operand once
    live peak     most memory beyond what there was before forward, gradients of weights included
    host reads    how often the host waits for the device

in units of PD = T * k * D * 2 bytes, one copy of all rows that go to experts. Sizes are those of a
layer of Qwen3-30B-A3B: 128 experts, k = 8, D = 2048, H = 768; T = 4096 tokens on each rank.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hp_dry import DryDevice, active_device, run_ranks
from hp_dry.trace import Allocate, Event, HostWait, Launch, Release, Trace
from hp_expert import BoundedAllToAllDispatcher, ExpertParallel, GroupedExperts, MoE, TopKRouter
from hp_expert import rows_per_pair as rows_of
from hp_plan.costs.routing import Skew
from hp_platform import initialize
from hp_platform.dry_device import answering
from hp_train.dry_run.answers import Answers

T, K, E, D, H = 4096, 8, 128, 2048, 768
PD = T * K * D * 2
RANKS = 4
FACTOR = 1.5
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten._grouped_mm")


class Goal(NamedTuple):
    """The most of each that a layer may take."""

    launches: int
    backward_bytes: float
    live_peak: float
    host_reads: int


GOALS = {
    "one rank": Goal(50, 12.0, 12.0, 0),
    f"ep {RANKS}": Goal(90, 12.0, 12.0, 1),
    f"ep {RANKS}, bounded": Goal(90, 12.0 * FACTOR, 12.0 * FACTOR, 0),
}


@dataclass(frozen=True)
class Figures:
    """What one half of a layer took.

    Attributes:
        launches: Launches beside products, by operator.
        num_bytes: Their bytes, by operator.
        waits: Calls for which the host waited.
        lines: Operator and line of each launch.
    """

    launches: Counter[str]
    num_bytes: Counter[str]
    waits: list[str]
    lines: list[str]


def figures_of(events: Iterable[Event]) -> Figures:
    """Count a part of a trace."""
    found = Figures(Counter(), Counter(), [], [])
    for event in events:
        if isinstance(event, HostWait):
            found.waits.append(f"{event.what} at {event.at}")
        if not isinstance(event, Launch) or event.what.startswith(PRODUCTS):
            continue
        found.launches[event.what] += event.num_kernels
        found.num_bytes[event.what] += event.num_bytes
        if event.num_kernels:
            size = event.num_bytes / PD
            found.lines.append(f"{event.num_kernels:3} {size:7.3f} {event.what:34} {event.at}")
    return found


def live_peak(events: Iterable[Event]) -> int:
    """Most bytes of blocks that were allocated in these events."""
    sizes: dict[int, int] = {}
    live = peak = 0
    for event in events:
        if isinstance(event, Allocate):
            sizes[event.block] = event.num_bytes
            live += event.num_bytes
        elif isinstance(event, Release):
            live -= sizes.pop(event.block, 0)
        peak = max(peak, live)
    return peak


def run_layer(layer: MoE) -> tuple[int, int, int]:
    """Run forward and backward twice; return where both begin and end in the second run.

    The first run makes what is made once.
    """
    events = active_device().trace.events
    marks = (0, 0, 0)
    for _ in range(2):
        x = torch.randn(T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(x)
        for parameter in layer.parameters():
            parameter.grad = None
        first = len(events)
        y, _routing = layer(x)
        second = len(events)
        y.backward(grad)
        marks = (first, second, len(events))
    return marks


def make_layer() -> MoE:
    """Return a layer with bf16 experts and an fp32 router."""
    with torch.device("cuda"):
        layer = MoE(TopKRouter(D, E, K), GroupedExperts(E, D, H))
    layer.experts.to(torch.bfloat16)
    return layer


def one_of_ranks(bounded: bool) -> Any:
    """Run a layer whose experts are spread over the ranks."""
    initialize(device_type="cuda")
    layer = make_layer()
    group = dist.group.WORLD
    assert group is not None
    capacity = rows_of(T, K, E, RANKS, factor=FACTOR)

    def dispatcher(ranks: dist.ProcessGroup, num_experts: int) -> BoundedAllToAllDispatcher:
        return BoundedAllToAllDispatcher(ranks, num_experts, capacity, "cuda")

    ExpertParallel(dispatcher=dispatcher if bounded else None).apply(layer, group)
    with answering(Answers(Skew("uniform"))):
        return run_layer(layer)


def layers() -> Iterable[tuple[str, Trace, tuple[int, int, int]]]:
    """Run the layer on one rank and on several."""
    with DryDevice() as gpu:
        yield "one rank", gpu.trace, run_layer(make_layer())
    for name, bounded in ((f"ep {RANKS}", False), (f"ep {RANKS}, bounded", True)):
        run = run_ranks(one_of_ranks, bounded, world_size=RANKS, timeout=120)
        yield name, run.traces[0], run.results[0]


def show(name: str, forward: Figures, backward: Figures, peak: int) -> None:
    """Print a table by operator, and the totals beside the goals."""
    print(f"\n{name}\n{'':40}{'forward':>9}{'backward':>9}{'bytes fwd':>11}{'bytes bwd':>11}")
    operators = {*forward.launches, *backward.launches}
    for what in sorted(operators, key=lambda w: -forward.launches[w] - backward.launches[w]):
        halves = (forward, backward)
        counts = "".join(f"{half.launches[what]:9}" for half in halves)
        shares = "".join(f"{half.num_bytes[what] / PD:11.2f}" for half in halves)
        if forward.launches[what] + backward.launches[what]:
            print(f"{what:40}{counts}{shares}")
    launches = [sum(half.launches.values()) for half in (forward, backward)]
    sizes = [sum(half.num_bytes.values()) / PD for half in (forward, backward)]
    print(f"{'all':40}{launches[0]:9}{launches[1]:9}{sizes[0]:11.2f}{sizes[1]:11.2f}")
    waits, goal = forward.waits + backward.waits, GOALS[name]
    for what, found, most in (
        ("launches", sum(launches), goal.launches),
        ("bytes of the backward, PD", sizes[1], goal.backward_bytes),
        ("live peak, PD", peak / PD, goal.live_peak),
        ("host reads", len(waits), goal.host_reads),
    ):
        verdict = "reached" if found <= most else "missed"
        shown = f"{found:.2f}" if isinstance(found, float) else str(found)
        print(f"  {what}: {shown}, goal {most:g}: {verdict}")
    for wait in waits:
        print(f"  the host waits for {wait}")


def main() -> None:
    """Print a table for each way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lines", action="store_true", help="every launch with its source line")
    options = parser.parse_args()
    for name, trace, (first, second, last) in layers():
        forward = figures_of(trace.events[first:second])
        backward = figures_of(trace.events[second:last])
        peak = live_peak(trace.events[first:last])
        show(name, forward, backward, peak)
        if options.lines:
            print("\n".join(["forward", *forward.lines, "backward", *backward.lines]))


if __name__ == "__main__":
    main()
