"""Seconds until N ranks have met, done one all-reduce and ended: forkserver against spawn.

A distributed test is short; starting its ranks is most of what it costs. `run_distributed` forks
them from a server that has imported torch; `torch.multiprocessing.spawn` starts Python and imports
torch in each.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from hp_platform.testing import run_distributed

WORLD_SIZES = (2, 4)
REPEATS = 3


def all_reduce_once() -> float:
    """Sum one number over the ranks."""
    x = torch.ones(())
    dist.all_reduce(x)
    return float(x)


def spawned_rank(rank: int, world_size: int, port: int) -> None:
    """Do what a rank of `run_distributed` does, in a spawned process."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
    all_reduce_once()
    dist.destroy_process_group()


def run_spawned(world_size: int) -> None:
    """Run the ranks with torch's own launcher."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    spawn(spawned_rank, args=(world_size, port), nprocs=world_size)


def run_forked(world_size: int) -> None:
    """Run the ranks with hp-platform's."""
    run_distributed(all_reduce_once, world_size=world_size)


def seconds(run: Callable[[int], None], world_size: int) -> float:
    """Return the seconds that one run takes."""
    start = time.perf_counter()
    run(world_size)
    return time.perf_counter() - start


def main() -> None:
    """Print one row for each world size; the two alternate, and the median counts."""
    print(f"first run_distributed of the process: {seconds(run_forked, 2):.2f} s\n")
    print(f"{'ranks':>5} {'run_distributed':>16} {'spawn':>8} {'ratio':>6}")
    for world_size in WORLD_SIZES:
        pairs = [
            (seconds(run_forked, world_size), seconds(run_spawned, world_size))
            for _ in range(REPEATS)
        ]
        forked, spawned = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = spawned / forked
        print(f"{world_size:5} {forked:14.2f} s {spawned:6.2f} s {ratio:6.1f}")


if __name__ == "__main__":
    main()
