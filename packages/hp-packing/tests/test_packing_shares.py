"""Shares of microbatches that a linear program finds are the best for a schedule."""

from collections.abc import Sequence
from random import Random

import pytest

from hp_packing.costs import Seconds
from hp_packing.planning.linear_program import _EVEN, Rates, best_shares
from hp_schedule import Costs, Schedule, search, simulate

STAGES, MICROBATCHES = 3, 7


def drawn(random: Random, *, memory: float) -> Rates:
    """Microbatches of which each takes something else for a share."""

    def seconds(scale: float) -> Seconds:
        return Seconds(*(scale * random.uniform(0.5, 2.0) for _ in range(3)))

    return Rates(
        work=[[seconds(1.0) for _ in range(MICROBATCHES)] for _ in range(STAGES)],
        each=[seconds(0.01) for _ in range(STAGES)],
        least=[seconds(0.03) for _ in range(STAGES)],
        tokens=[random.uniform(0.5, 2.0) for _ in range(MICROBATCHES)],
        message=[random.uniform(0.0, 0.1) for _ in range(MICROBATCHES)],
        memory=memory,
    )


def costs_of(rates: Rates, shares: Sequence[float]) -> Costs:
    """The same for the simulator."""

    def column(half: int) -> list[list[float]]:
        return [
            [
                max(share * work[half] + each[half], least[half])
                for share, work in zip(shares, of_stage, strict=True)
            ]
            for of_stage, each, least in zip(rates.work, rates.each, rates.least, strict=True)
        ]

    return Costs(
        forward=column(0),
        input_grad=column(1),
        weight_grad=column(2),
        activation=[[s * t for s, t in zip(shares, rates.tokens, strict=True)]] * STAGES,
        message=[[s * m for s, m in zip(shares, rates.message, strict=True)]] * STAGES,
        bandwidth=1.0,
    )


def schedule_for(rates: Rates, *, split_backward: bool) -> Schedule:
    return search(
        costs_of(rates, [1 / MICROBATCHES] * MICROBATCHES),
        num_ranks=STAGES,
        num_microbatches=MICROBATCHES,
        virtual=(1,),
        memory_limit=rates.memory,
        split_backward=split_backward,
        num_candidates=4,
    ).schedule


@pytest.mark.parametrize("split_backward", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_no_other_shares_take_less_time(seed: int, split_backward: bool) -> None:
    random = Random(seed)
    rates = drawn(random, memory=0.8)
    schedule = schedule_for(rates, split_backward=split_backward)
    evenness = _EVEN * max(sum(s.total for s in of) for of in rates.work) / MICROBATCHES

    def judged(shares: Sequence[float]) -> float | None:
        found = simulate(schedule, costs_of(rates, shares))
        if max(found.peak_activations) > rates.memory * (1 + 1e-6):
            return None
        return found.makespan + evenness * max(shares)

    best = best_shares(schedule, rates)
    assert best is not None
    assert sum(best) == pytest.approx(1.0, abs=1e-12)
    least = judged(best)
    assert least is not None
    looked_at = 0
    for step in (1.0, 0.1, 0.01):
        for _ in range(100):
            others = [share * random.uniform(1 - step, 1 + step) for share in best]
            found = judged([share / sum(others) for share in others])
            if found is not None and min(others) > 0.03 / MICROBATCHES:
                looked_at += 1
                assert found > least * (1 - 1e-9)
    assert looked_at > 30


def test_where_nothing_fits_the_memory_there_are_no_shares() -> None:
    rates = drawn(Random(0), memory=0.8)
    schedule = schedule_for(rates, split_backward=True)
    assert best_shares(schedule, rates._replace(memory=1e-3)) is None
