"""Seconds that collectives of Gloo take while waking threads take cores from others, and do not.

Ranks that share cores, as in every test and on every laptop. Beside each other: the system's usual
policy, and that of `hp_platform.initialize` (Note [No core by waking up]); the medians of some
rounds, in turn. Ranks are those of `run_distributed`; nothing but torch's collectives is called.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist

from hp_platform.testing import run_distributed

POLICIES = (os.SCHED_OTHER, os.SCHED_BATCH)
CALLS = {256: 300, 65536: 100, 1 << 20: 20}
"""Calls of a round, by floats of each rank."""


def collect(kind: str, x: torch.Tensor, group_size: int) -> None:
    """Call one collective."""
    if kind == "all-reduce":
        dist.all_reduce(x)
    elif kind == "all-to-all":
        dist.all_to_all_single(torch.empty_like(x), x)
    else:
        dist.all_gather_single(x.new_empty(x.numel() * group_size), x)


def seconds(kind: str, size: int, rounds: int) -> list[list[float]]:
    """Return, for each policy, the seconds that one call takes in each round, of this rank."""
    taken: list[list[float]] = [[] for _ in POLICIES]
    x = torch.zeros(size)
    for number in range(rounds * len(POLICIES)):
        policy = number % len(POLICIES)
        for thread in map(int, os.listdir("/proc/self/task")):  # noqa: PTH208 - names alone
            os.sched_setscheduler(thread, POLICIES[policy], os.sched_param(0))
        dist.barrier()
        began = time.perf_counter()
        for _ in range(CALLS[size]):
            collect(kind, x, dist.get_world_size())
        taken[policy].append((time.perf_counter() - began) / CALLS[size])
    return taken


def main() -> None:
    """Print a row for each world size, collective and number of floats."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each policy")
    rounds = parser.parse_args().rounds
    print(f"{len(os.sched_getaffinity(0))} cores, milliseconds per call")
    print(f"{'ranks':>5} {'collective':>11} {'floats':>8} {'usual':>8} {'batch':>8} {'ratio':>6}")
    for world_size in (2, 4, 8):
        for kind in ("all-reduce", "all-to-all", "all-gather"):
            for size in CALLS:
                of_ranks = run_distributed(seconds, kind, size, rounds, world_size=world_size)
                usual, batch = (1e3 * statistics.median(taken) for taken in of_ranks[0])
                row = f"{world_size:5} {kind:>11} {size:8} {usual:8.2f} {batch:8.2f}"
                print(f"{row} {usual / batch:6.1f}", flush=True)


if __name__ == "__main__":
    main()
