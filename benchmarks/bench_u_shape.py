"""Compare the searched order of U-shaped pipelines with the documented one, in the simulator.

    python benchmarks/bench_u_shape.py > docs/reference/tables/u_shape_table.md    # all, minutes
    python benchmarks/bench_u_shape.py --stages 4 --microbatches 24

A forward of the edge takes 1, one of the cloud 2, a backward twice its forward. The latency is that
between the edge and its neighbours. Exits with status 1 if the search is slower anywhere.
"""

from __future__ import annotations

import argparse
import sys

from hp_schedule import Costs
from hp_vtp.u_shape import documented_order, search_u_shape

LATENCIES = (0, 1, 2, 3, 4)


def costs_of(num_ranks: int, latency: float) -> Costs:
    """Costs of the stages of a ring of `num_ranks`, the first and the last on the edge."""
    times = [1.0, *[2.0] * (num_ranks - 1), 1.0]
    edges = {
        (a, b): latency if 0 in (a, b) else 0.0
        for a in range(num_ranks)
        for b in range(num_ranks)
        if a != b
    }
    return Costs(forward=times, input_grad=times, weight_grad=times, latency=edges)


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="*", default=list(range(2, 9)))
    parser.add_argument("--microbatches", type=int, nargs="*", default=list(range(1, 25)))
    args = parser.parse_args()
    heads = [f"latency {latency}" for latency in LATENCIES]
    print("| stages | microbatches | " + " | ".join(heads) + " |")
    print("|---" * (2 + len(heads)) + "|")
    worse, gains = 0, []
    for stages in args.stages:
        for num in args.microbatches:
            cells = []
            for latency in LATENCIES:
                costs = costs_of(stages, latency)
                documented = documented_order(stages, num_microbatches=num, costs=costs).makespan
                found = search_u_shape(stages, num_microbatches=num, costs=costs)
                worse += found.makespan > documented
                gains.append(1 - found.makespan / documented)
                cells.append(f"{documented:g} / {found.makespan:g} (+{found.extra})")
            print(f"| {stages} | {num} | " + " | ".join(cells) + " |", flush=True)
    print(
        f"\n{len(gains)} points: slower {worse} times, faster {sum(gain > 0 for gain in gains)}; "
        f"on average {100 * sum(gains) / len(gains):.1f} % shorter, at most "
        f"{100 * max(gains):.1f} %."
    )
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
