"""What it costs to make a schedule and to prove it, against the constructor of torch's own.

Both make every step of all ranks of interleaved 1F1B, two stages per rank: compute steps, the steps
of sharded parameters, sends and receives. hp-schedule also proves the result. Each point runs in a
process of its own, which tells its CPU time and its peak memory above that of its imports; torch's
stages are stubs, so that its time is that of the step lists alone.

    python benchmarks/bench_schedule_cost.py            # to 256 ranks, 1024 microbatches: minutes
    python benchmarks/bench_schedule_cost.py --quick    # to 64 ranks, 256 microbatches
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

from hp_schedule import (
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_send_recv,
    interleaved_1f1b,
    validate,
)

POINTS = ((8, 32), (16, 64), (32, 128), (64, 256), (128, 512), (256, 1024))
QUICK = 4
STAGES_PER_RANK = 2
TORCH = "torch.distributed.pipelining.schedules"


class Figures(NamedTuple):
    """What one point costs: steps made, CPU seconds by phase, peak MiB and its growth."""

    steps: int
    seconds: list[float]
    peak: int
    growth: int


def with_hp(num_ranks: int, num_microbatches: int) -> tuple[int, list[float]]:
    """Make and prove a schedule; returns its number of steps and seconds by phase."""
    times = [time.process_time()]
    schedule = interleaved_1f1b(
        num_ranks, num_microbatches=num_microbatches, num_stages_per_rank=STAGES_PER_RANK
    )
    times.append(time.process_time())
    schedule = add_fsdp_reduce_grad(add_fsdp_unshard_reshard(schedule))
    times.append(time.process_time())
    schedule = add_send_recv(schedule)
    times.append(time.process_time())
    validate(schedule, communication=True, max_active_stages=3).raise_if_failed()
    times.append(time.process_time())
    seconds = [after - before for before, after in pairwise(times)]
    return sum(map(len, schedule.steps)), seconds


def with_torch(num_ranks: int, num_microbatches: int) -> tuple[int, list[float]]:
    """Construct torch's schedule; returns its number of steps and the seconds."""
    schedules = import_module(TORCH)
    num_stages = STAGES_PER_RANK * num_ranks
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=0,
            is_first=index == 0,
            is_last=index == num_stages - 1,
            has_backward=True,
            submod=None,
        )
        for index in range(0, num_stages, num_ranks)
    ]
    began = time.process_time()
    schedule = schedules.ScheduleInterleaved1F1B(
        stages, num_microbatches, loss_fn=lambda y, _target: y
    )
    seconds = time.process_time() - began
    rows = schedule.pipeline_order_with_comms.values()
    return sum(map(len, rows)), [seconds]


Way = Callable[[int, int], tuple[int, list[float]]]


def run_point(way: Way, num_ranks: int, num_microbatches: int) -> Figures:
    """Measure one point in this process."""
    if way is with_torch:
        import_module(TORCH)
    before = peak_memory()
    steps, seconds = way(num_ranks, num_microbatches)
    return Figures(steps, seconds, peak_memory(), peak_memory() - before)


def peak_memory() -> int:
    """Return the most memory this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def measure(way: Way, num_ranks: int, num_microbatches: int) -> Figures:
    """Measure one point in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(run_point, way, num_ranks, num_microbatches).result()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out the largest points")
    options = parser.parse_args()
    print(f"Interleaved 1F1B, {STAGES_PER_RANK} stages per rank, every rank's steps; CPU seconds.")
    print("                     hp-schedule                                         torch")
    print(
        "ranks  microb.    steps  order  shard  messages  proof  total  us/step   MiB"
        "      total    MiB   ratio"
    )
    for num_ranks, num in POINTS[:QUICK] if options.quick else POINTS:
        ours = measure(with_hp, num_ranks, num)
        theirs = measure(with_torch, num_ranks, num)
        total, torch_total = sum(ours.seconds), sum(theirs.seconds)
        order, shard, messages, proof = ours.seconds
        print(
            f"{num_ranks:5d}  {num:7d}  {ours.steps:7d}  {order:5.2f}  {shard:5.2f}"
            f"  {messages:8.2f}  {proof:5.2f}  {total:5.2f}  {total / ours.steps * 1e6:7.2f}"
            f"  {ours.peak:4d}  {torch_total:9.2f}  {theirs.growth:5d}  {torch_total / total:6.1f}",
            flush=True,
        )
    print("MiB: peak of the whole process for hp-schedule, growth beyond the imports for torch.")


if __name__ == "__main__":
    main()
