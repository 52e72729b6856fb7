"""Bounds of searches, held against every plan that any search of the same problem returns."""

import math
import os
from functools import partial
from importlib.util import find_spec
from random import Random
from typing import Any

import pytest

from hp_schedule import (
    Costs,
    ModelCosts,
    SearchResult,
    pair_overlap,
    search,
    shorten,
    simulate,
)
from hp_schedule.cli import main
from hp_schedule.passes.overlap import PairOrder
from hp_schedule.searching import space
from hp_schedule.steps import BWD, BWD_INPUT, BWD_WEIGHT, FWD

ROUNDING = 1e-9
DRAWN = int(os.environ.get("HP_SCHEDULE_BOUNDS", "25"))
"""Problems; each gives five results and more, and `nox -s exact` draws a thousand."""
EXACT = DRAWN > 100 and find_spec("ortools") is not None
"""Whether bounds of the exact engine are held against the plans, too."""


def drawn(random: Random) -> tuple[ModelCosts | Costs, dict[str, Any]]:
    """Return costs and arguments of a search, with and without each thing that a bound knows."""

    def some(value: float) -> float:
        return value if random.random() < 0.5 else 0.0

    ranks = random.randint(1, 4)
    latency: Any = some(random.uniform(0.0, 2.0))
    if random.random() < 0.2:
        pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
        latency = {pair: random.uniform(0.0, 2.0) for pair in pairs}
    costs = ModelCosts(
        first_scale=random.choice((0.3, 1.0, 1.0, 2.0)),
        last_scale=random.choice((0.5, 1.0, 1.0, 3.0)),
        latency=latency,
        message=some(random.uniform(0.0, 1.0)),
        bandwidth=random.choice((1.0, 3.0, math.inf)),
    )
    arguments: dict[str, Any] = {
        "num_ranks": ranks,
        "num_microbatches": random.randint(1, 8),
        "virtual": random.choice(((1,), (2,), (1, 2), (1, 2, 4))),
        "memory_limit": random.choice((math.inf, math.inf, 4.0, ranks + 1.0)),
        "blocking": random.random() < 0.5,
    }
    if random.random() < 0.2:
        sizes = [random.choice((1.0, 1.0, 2.5)) for _ in range(arguments["num_microbatches"])]
        arguments["virtual"] = (1,)
        each = [sizes] * ranks
        of_stages = Costs(forward=each, input_grad=each, latency=latency, message=costs.message)
        return of_stages, arguments
    return costs, arguments


def makespans_without_search(result: SearchResult, arguments: dict[str, Any]) -> list[float]:
    """Return what the plan takes with pairs made, and what it takes when it is shortened."""
    timed = partial(simulate, costs=result.costs, blocking=arguments["blocking"])
    limit = arguments["memory_limit"] + ROUNDING
    orders: tuple[PairOrder, ...] = ("b_f", "f_b")
    plans = [pair_overlap(result.schedule, order=order) for order in orders]
    if result.schedule.kinds <= {FWD, BWD, BWD_INPUT, BWD_WEIGHT}:
        shorter = shorten(result.schedule, result.costs, memory_limit=arguments["memory_limit"])
        plans.extend([shorter[0]] if shorter else [])
    outcomes = [timed(plan) for plan in plans]
    return [found.makespan for found in outcomes if max(found.peak_activations) <= limit]


def test_no_search_returns_a_plan_below_the_bound_of_a_wider_one() -> None:
    num_results = 0
    for seed in range(DRAWN):
        costs, arguments = drawn(Random(seed))
        found = partial(search, costs, **arguments)
        wide = [found(num_candidates=0), found(num_candidates=12, seed=seed)]
        narrow = [
            found(num_candidates=6, keep_order=True),
            found(num_candidates=6, split_backward=False),
            *(found(num_candidates=4, virtual=(number,)) for number in arguments["virtual"]),
        ]
        results = [*wide, *narrow]
        # What fits this memory fits more of it as well.
        wide.append(found(num_candidates=0, memory_limit=math.inf))
        if arguments["memory_limit"] < math.inf and not arguments["blocking"]:
            ways = found(num_candidates=12, retention=("recompute", "offload"))
            assert wide[-1].lower_bound <= ways.makespan * (1 + ROUNDING), (seed, arguments)
            num_results += 1
        if EXACT and seed % 4 == 0:
            wide.append(found(num_candidates=2, exact=0.2))
        bound = max(result.lower_bound for result in wide)
        for result in results:
            times = [*result.makespans.values(), *makespans_without_search(result, arguments)]
            assert result.lower_bound <= min(times) * (1 + ROUNDING), (seed, arguments)
            assert bound <= min(times) * (1 + ROUNDING), (seed, arguments)
        num_results += len(results)
    print(f"{num_results} results of {DRAWN} problems, none below a bound")  # noqa: T201
    assert num_results >= 4 * DRAWN


def test_pairs_that_send_both_messages_at_once_are_below_no_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = (
        "search --ranks 3 --microbatches 7 --virtual 1,2,4 --first-scale 0.3 --last-scale 3 "
        "--latency 1.5 --blocking --candidates 20"
    )
    status = main(line.split())
    out = capsys.readouterr()
    assert status == 0
    said = (out.out + out.err).strip().splitlines()[-1]
    assert "20 candidates, ended by candidates" in said  # and not by a bound that a plan has beaten


def test_a_search_does_not_stop_at_a_bound_that_a_plan_has_beaten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(space, "lower_bound", lambda _: 1e6)
    result = search(ModelCosts(), num_ranks=2, num_microbatches=4, virtual=(1,), num_candidates=5)
    assert (result.num_candidates, result.ended_by) == (5, "candidates")
    assert result.lower_bound == 0.0
