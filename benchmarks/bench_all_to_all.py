"""Forward and backward of a differentiable all-to-all over 4 Gloo ranks, against torch's own.

`raw` is the floor: two calls of `torch.distributed.all_to_all_single` without autograd. `torch` is
`all_to_all_single_autograd` of torch's functional collectives. All three alternate in one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from hp_platform import all_to_all
from hp_platform.testing import run_distributed

WORLD_SIZE = 4
SIZES_KIB = (16, 256, 4096)
REPEATS = 60


def with_hp(x: Tensor) -> None:
    """Exchange and differentiate with hp-platform."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("the default process group must be initialised")
    all_to_all(x, group=group).sum().backward()


def with_torch(x: Tensor) -> None:
    """Exchange and differentiate with torch's functional collective."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("the default process group must be initialised")
    splits = [len(x) // WORLD_SIZE] * WORLD_SIZE
    all_to_all_single_autograd(x, splits, splits, group).sum().backward()


def raw(x: Tensor) -> None:
    """Do the two exchanges and nothing else."""
    rows = x.detach()
    for _ in range(2):
        dist.all_to_all_single(torch.empty_like(rows), rows)


WAYS: dict[str, Callable[[Tensor], None]] = {"hp": with_hp, "torch": with_torch, "raw": raw}


def measure() -> dict[int, dict[str, float]]:
    """Return the median milliseconds of each way, by the KiB that each rank sends."""
    table: dict[int, dict[str, float]] = {}
    for kib in SIZES_KIB:
        x = torch.ones(kib, 256, requires_grad=True)
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for repeat in range(REPEATS + 2):
            for name, run in WAYS.items():
                dist.barrier()
                start = time.perf_counter()
                run(x)
                if repeat >= 2:  # the first calls make connections and fill caches
                    times[name].append(1e3 * (time.perf_counter() - start))
        table[kib] = {name: statistics.median(values) for name, values in times.items()}
    return table


def main() -> None:
    """Print one row for each size, as rank 0 measured it."""
    table = run_distributed(measure, world_size=WORLD_SIZE)[0]
    print(f"{'KiB per rank':>12} " + " ".join(f"{name:>9}" for name in WAYS) + "  hp/torch")
    for kib, row in table.items():
        cells = " ".join(f"{row[name]:6.2f} ms" for name in WAYS)
        print(f"{kib:12} {cells} {row['hp'] / row['torch']:9.2f}")


if __name__ == "__main__":
    main()
