"""Searched schedules against the best published one with the same ranks, microbatches and memory.

For every point of ranks x microbatches x latency x costs, at the memory of 1F1B and at half of it,
and for each number of stages per rank, the search builds a fixed number of candidates, so that the
table does not depend on the machine. The published value is the smallest that
`published_schedules.json` has; for points it has not, of the closed forms of this package. The
bound is proven: no schedule of the places searched is shorter.

    python benchmarks/bench_schedule_search.py              a part of the table, some minutes
    python benchmarks/bench_schedule_search.py --all        the whole table, about an hour
    python benchmarks/bench_schedule_search.py --blocking   where sends hold up their ranks

Where sends hold up their ranks, the published value is the smallest of both sources.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean

from hp_schedule import ModelCosts, search, simulate
from hp_schedule.schedule import PlacementStyle
from hp_schedule.searching.search import closed_forms

VIRTUAL = (1, 2, 4)
STYLES: tuple[PlacementStyle, ...] = ("loop", "v")
LATENCIES = (0.0, 0.05, 0.2)
SCALES = {"uniform": (1.0, 1.0), "uneven": (0.7, 1.3)}
EPSILON = 1e-6
ROUNDING = 0.005 + EPSILON
"""The published table has two digits."""


@dataclass(frozen=True)
class Point:
    """One line of the table."""

    ranks: int
    microbatches: int
    costs: str
    latency: float
    memory: str
    blocking: bool = False

    @property
    def memory_limit(self) -> float:
        """In activations of one rank's share of the model."""
        full = min(self.ranks, self.microbatches)
        return full if self.memory == "full" else math.ceil(full / 2) + 0.5

    @property
    def divides(self) -> bool:
        """Whether the ranks divide the microbatches."""
        return self.microbatches % self.ranks == 0

    def model(self) -> ModelCosts:
        """Return what the model costs: 1 for each of F, I and W of a rank's share."""
        first, last = SCALES[self.costs]
        return ModelCosts(first_scale=first, last_scale=last, latency=self.latency)


@dataclass(frozen=True)
class Row:
    """What was found: by stages per rank, infinite where nothing fits."""

    point: Point
    published: dict[int, float]
    searched: dict[int, float]
    bound: float

    @property
    def best(self) -> float:
        """The shortest searched schedule."""
        return min(self.searched.values())

    @property
    def best_published(self) -> float:
        """The shortest published schedule."""
        return min(self.published.values())

    @property
    def is_worse(self) -> bool:
        """Whether a published schedule with as many stages per rank is shorter."""
        return any(found > self.published[v] + ROUNDING for v, found in self.searched.items())

    @property
    def is_better(self) -> bool:
        """Whether the searched schedule is shorter than every published one."""
        return self.best < self.best_published - ROUNDING

    @property
    def can_be_better(self) -> bool:
        """Whether the published schedule is longer than the bound."""
        return self.best_published > self.bound + ROUNDING


def points(ranks: list[int], *, blocking: bool = False) -> Iterator[Point]:
    """Yield the lines of the table; without latency there is nothing that blocks."""
    for num in ranks:
        for microbatches in sorted({num // 2, num, 3 * num // 2 + 1, 2 * num, 4 * num}):
            for latency in LATENCIES[1:] if blocking else LATENCIES:
                for costs in SCALES:
                    for memory in ("full", "half"):
                        yield Point(num, microbatches, costs, latency, memory, blocking)


def published_values(point: Point) -> dict[int, float]:
    """Return the shortest published makespan by stages per rank, infinite where there is none."""
    result = dict.fromkeys(VIRTUAL, math.inf)
    known = table_values(point)
    values = [] if known is None else known
    if known is None or point.blocking:
        values = [*values, *generated_values(point)]
    for makespan, number in values:
        result[number] = min(result[number], makespan)
    return result


def generated_values(point: Point) -> Iterator[tuple[float, int]]:
    """Yield makespan and stages per rank of the closed forms that fit the memory."""
    for number in VIRTUAL:
        costs = point.model().of_stages(point.ranks, point.ranks * number)
        for style in STYLES:
            forms = closed_forms(
                point.ranks,
                num_microbatches=point.microbatches,
                num_stages_per_rank=number,
                style=style,
            )
            for _, schedule in forms:
                simulation = simulate(schedule, costs, blocking=point.blocking)
                if max(simulation.peak_activations) <= point.memory_limit + EPSILON:
                    yield simulation.makespan, number


def table_values(point: Point) -> list[tuple[float, int]] | None:
    """Return makespan and stages per rank of the published schedules of a point, if it is known."""
    file = Path(__file__).with_name("published_schedules.json")
    wanted = (point.ranks, point.microbatches, point.costs, point.latency)
    for entry in json.loads(file.read_text(encoding="utf-8"))["points"]:
        if (entry["ranks"], entry["microbatches"], entry["costs"], entry["latency"]) == wanted:
            name = f"{point.memory} blocking" if point.blocking else point.memory
            return [(makespan, number) for makespan, number, _ in entry.get(name, ())]
    return None


def num_candidates(point: Point, number: int, most: int) -> int:
    """Return how many plans to build for a number of stages per rank, at most that many."""
    steps = 3 * point.ranks * number * point.microbatches
    return min(120, max(20, 500_000 // steps), most)


def measure(point: Point, most: int, virtual: Sequence[int] = VIRTUAL) -> Row:
    """Search one point."""
    searched = {}
    bound = math.inf
    for number in virtual:
        result = search(
            point.model(),
            num_ranks=point.ranks,
            num_microbatches=point.microbatches,
            virtual=(number,),
            memory_limit=point.memory_limit,
            blocking=point.blocking,
            num_candidates=num_candidates(point, number, most),
            time_budget=math.inf,
        )
        searched[number] = result.makespan
        bound = min(bound, result.lower_bound)
    return Row(point, published_values(point), searched, bound)


def line(row: Row) -> str:
    """Return a row of the Markdown table."""
    point = row.point
    gain = "" if math.isinf(row.best_published) else percent(1 - row.best / row.best_published)
    published = "-" if math.isinf(row.best_published) else f"{row.best_published:.2f}"
    stages = min(row.searched, key=row.searched.__getitem__)
    cells = [
        point.ranks,
        point.microbatches,
        point.costs,
        point.latency,
        f"{point.memory_limit:g}",
        published,
        f"{row.best:.2f}",
        stages,
        gain,
        f"{row.bound:.2f}",
        percent(1 - row.bound / row.best),
        "worse" if row.is_worse else "",
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def percent(value: float) -> str:
    """Return a share in percent, without a sign where it rounds to zero."""
    return f"{round(value, 3) + 0.0:.1%}"


def share(rows: list[Row]) -> str:
    """Return how many rows are strictly better."""
    better = sum(row.is_better for row in rows)
    return f"{better} of {len(rows)} ({better / max(1, len(rows)):.0%})"


def summary(rows: list[Row]) -> Iterator[str]:
    """Yield the sentences under the table."""
    known = [row for row in rows if not math.isinf(row.best_published)]
    yield f"Worse than a published schedule: {sum(row.is_worse for row in rows)} of {len(rows)}."
    open_rows = [row for row in known if row.can_be_better and not row.point.divides]
    yield f"Better where the ranks do not divide M and the bound leaves room: {share(open_rows)}."
    late = [row for row in known if row.point.latency == max(LATENCIES)]
    yield f"Better at latency {max(LATENCIES)}: {share(late)}."
    yield f"Better at uneven costs: {share([row for row in known if row.point.costs == 'uneven'])}."
    if rows[0].point.blocking:
        fair = sum(row.best <= row.best_published + ROUNDING for row in known)
        yield f"Better or equal where sends block: {fair} of {len(known)}."
    for memory in ("full", "half"):
        gaps = [1 - row.bound / row.best for row in rows if row.point.memory == memory]
        if gaps:
            yield f"Mean gap to the bound with {memory} memory: {percent(fmean(gaps))}."
    at_bound = sum(row.best <= row.bound + EPSILON for row in rows)
    yield f"At the bound, so proven optimal: {at_bound} of {len(rows)}."


def main() -> None:
    """Print the table and the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every point up to 32 ranks")
    parser.add_argument("--ranks", type=int, nargs="*", help="default 2 4")
    parser.add_argument("--blocking", action="store_true", help="sends hold up their ranks")
    parser.add_argument("--memory", choices=["full", "half"], help="default: both")
    parser.add_argument("--virtual", type=int, nargs="*", default=VIRTUAL, help="stages per rank")
    parser.add_argument("--candidates", type=int, default=120, help="at most, of each search")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    ranks = options.ranks or ([2, 4, 8, 16, 32] if options.all else [2, 4])
    print(
        "| P | M | costs | latency | memory | published | searched | stages per rank | gain |",
        end="",
    )
    print(" bound | gap | |")
    print("|--|--|--|--|--|--|--|--|--|--|--|--|")
    rows = []
    every = points(ranks, blocking=options.blocking)
    chosen = [point for point in every if options.memory in {None, point.memory}]
    search_one = partial(measure, most=options.candidates, virtual=options.virtual)
    with Pool(options.jobs) as pool:
        for row in pool.imap(search_one, chosen):
            rows.append(row)
            print(line(row), flush=True)
    print()
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
