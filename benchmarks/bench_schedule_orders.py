"""What the order of microbatches is worth: in the order given, searched, and proven.

One microbatch of eight is four times as long as the others, at each place in turn: four ranks,
memory of four. Then packs of lognormal work: step / pure work of a search that keeps the order and
of one that chooses it, with no candidates (closed forms alone) and with some. With OR-Tools
(`hp-schedule[exact]`) the table says what CP-SAT proves in the order given and in any.

    python benchmarks/bench_schedule_orders.py
    python benchmarks/bench_schedule_orders.py --candidates 0 20 200    other efforts
"""

from __future__ import annotations

import argparse
import time
from importlib.util import find_spec
from random import Random
from statistics import fmean

from hp_schedule import Costs, SearchResult, search

RANKS, MICROBATCHES, MEMORY = 4, 8, 4.0
BATCHES, PACKS = 8, 16
EFFORT = 20.0


def one_long(position: int) -> Costs:
    """Return costs of stages with one long microbatch."""
    lengths = [4.0 if place == position else 1.0 for place in range(MICROBATCHES)]
    return Costs([lengths] * RANKS, [lengths] * RANKS, [lengths] * RANKS)


def drawn(seed: int) -> Costs:
    """Return costs of packs of one number of tokens, in which attention takes what it takes."""
    random = Random(seed)  # noqa: S311 - nothing is secret
    work = [min(4.0, max(0.5, random.lognormvariate(0.0, 0.6))) for _ in range(PACKS)]
    weight = [0.6] * PACKS
    return Costs([work] * RANKS, [work] * RANKS, [weight] * RANKS, latency=0.05)


def find(costs: Costs, num_microbatches: int, candidates: int, **options: object) -> SearchResult:
    """Search with one stage per rank."""
    return search(
        costs,
        num_ranks=RANKS,
        num_microbatches=num_microbatches,
        virtual=(1,),
        memory_limit=MEMORY,
        num_candidates=candidates,
        **options,  # type: ignore[arg-type]
    )


def proven(costs: Costs, *, keep_order: bool) -> str:
    """Return what CP-SAT proves to be the least, or the bounds that it left."""
    result = find(costs, MICROBATCHES, 60, keep_order=keep_order, exact=EFFORT)
    if result.ended_by == "bound":
        return f"{result.makespan:g}"
    return f"{result.lower_bound:g} to {result.makespan:g}"


def print_positions(candidates: int) -> None:
    """Print the table of the long microbatch."""
    has_engine = find_spec("ortools") is not None
    print("| place | given order | proven | searched order | proven |\n|--|--|--|--|--|")
    least = proven(one_long(0), keep_order=False) if has_engine else "-"
    for position in range(MICROBATCHES):
        costs = one_long(position)
        kept = find(costs, MICROBATCHES, candidates, keep_order=True).makespan
        free = find(costs, MICROBATCHES, candidates).makespan
        exact = proven(costs, keep_order=True) if has_engine else "-"
        print(f"| {position} | {kept:g} | {exact} | {free:g} | {least} |", flush=True)


def print_batches(efforts: list[int]) -> None:
    """Print step / pure work over drawn batches."""
    print(f"\n{BATCHES} batches of {PACKS} packs\n")
    print("| candidates | given order | searched order | CPU ms |\n|--|--|--|--|")
    for candidates in efforts:
        ratios: dict[bool, list[float]] = {True: [], False: []}
        began = 0.0
        for seed in range(BATCHES):
            costs = drawn(seed)
            tables = costs.durations(RANKS, PACKS)
            pure = sum(tables[0][:PACKS]) + sum(tables[1][:PACKS])
            for keep_order, found in ratios.items():
                start = time.thread_time()
                result = find(costs, PACKS, candidates, keep_order=keep_order)
                began += 0.0 if keep_order else time.thread_time() - start
                found.append(result.makespan / pure)
        kept, free = fmean(ratios[True]), fmean(ratios[False])
        print(
            f"| {candidates} | {kept:.3f} | {free:.3f} | {1000 * began / BATCHES:.0f} |", flush=True
        )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--candidates", type=int, nargs="*", default=[0, 20, 150])
    options = parser.parse_args()
    print_positions(max(options.candidates))
    print_batches(options.candidates)


if __name__ == "__main__":
    main()
