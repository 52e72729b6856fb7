"""Choices of what to run again and what to copy away, so that a schedule fits its memory."""

import itertools
import random

import pytest

from hp_schedule import (
    Costs,
    ModelCosts,
    Retention,
    Schedule,
    add_offload,
    add_recompute,
    add_send_recv,
    dualpipe_v,
    fit_memory,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    search,
    simulate,
    validate,
    zbv,
)

_BOTH: tuple[Retention, ...] = ("recompute", "offload")
_SCHEDULES = {
    "gpipe": gpipe(3, num_microbatches=5),
    "1f1b": one_f_one_b(4, num_microbatches=8),
    "interleaved": interleaved_1f1b(3, num_microbatches=6),
    "zero_bubble": interleaved_zero_bubble(3, num_microbatches=6),
    "dualpipe_v": dualpipe_v(3, num_microbatches=8),
    "zbv": zbv(3, num_microbatches=6),
}


@pytest.mark.parametrize("name", _SCHEDULES)
def test_what_fits_is_valid_keeps_the_limit_and_says_its_time(name: str) -> None:
    rng = random.Random(name)
    schedule = _SCHEDULES[name]
    fitted = 0
    for _ in range(12):
        costs = Costs(
            kept_input=rng.choice([0.0, 0.1]),
            recompute=rng.choice([None, 0.7]),
            offloaded=rng.choice([None, 0.8]),
            host_bandwidth=rng.choice([0.4, 1.0, 4.0]),
            latency=rng.choice([0.0, 0.1]),
        )
        before = simulate(schedule, costs)
        limit = max(before.peak_activations) * rng.uniform(0.5, 1.1)
        fit = fit_memory(schedule, costs, limit, ways=rng.choice([_BOTH, *zip(_BOTH)]))
        if fit is None:
            continue
        fitted += 1
        result = simulate(fit.schedule, costs)
        assert validate(fit.schedule, memory_limit=limit, costs=costs)
        assert validate(add_send_recv(fit.schedule, costs=costs)).is_runnable
        assert max(result.peak_activations) <= limit * (1 + 1e-6)
        assert fit.makespan == result.makespan
        assert bool(fit.choice) == (max(before.peak_activations) > limit)
        again = {place for place, way in fit.choice.items() if way == "recompute"}
        assert fit.schedule.recomputed == again
        assert fit.schedule.offloaded == set(fit.choice) - again
    assert fitted >= 4


def _all_choices(schedule: Schedule, costs: Costs, limit: float) -> float:
    """Return the least time of all choices that fit."""
    places = [
        (stage, microbatch)
        for stage in range(schedule.num_stages)
        for microbatch in range(schedule.num_microbatches)
    ]
    best = float("inf")
    for ways in itertools.product(("", "r", "o"), repeat=len(places)):
        again = [place for place, way in zip(places, ways, strict=True) if way == "r"]
        away = [place for place, way in zip(places, ways, strict=True) if way == "o"]
        for ahead in (0, 1):
            chosen = add_recompute(add_offload(schedule, away, ahead=ahead), again)
            result = simulate(chosen, costs)
            fits = max(result.peak_activations) <= limit + 1e-9
            if fits and validate(chosen, memory_limit=limit, costs=costs):
                best = min(best, result.makespan)
            if not away:
                break
    return best


@pytest.mark.parametrize("bandwidth", [0.5, 2.0])
@pytest.mark.parametrize("limit", [2.0, 1.2])
def test_small_schedules_are_fitted_in_little_more_than_the_least_time(
    bandwidth: float, limit: float
) -> None:
    costs = Costs(kept_input=0.1, host_bandwidth=bandwidth, latency=0.1)
    for schedule in (gpipe(2, num_microbatches=3), gpipe(1, num_microbatches=5)):
        best = _all_choices(schedule, costs, limit)
        fit = fit_memory(schedule, costs, limit)
        if best == float("inf"):
            assert fit is None
            continue
        assert fit is not None
        assert best <= fit.makespan + 1e-9
        assert fit.makespan <= best * 1.06


def test_a_fast_way_to_the_host_is_taken_and_a_slow_one_is_not() -> None:
    schedule = gpipe(2, num_microbatches=6)
    fast = fit_memory(schedule, Costs(host_bandwidth=10.0), 3.0)
    slow = fit_memory(schedule, Costs(host_bandwidth=0.01), 3.0)
    assert fast is not None
    assert slow is not None
    assert set(fast.choice.values()) == {"offload"}
    assert set(slow.choice.values()) == {"recompute"}
    assert fast.makespan < slow.makespan


def test_what_cannot_fit_is_none() -> None:
    assert fit_memory(one_f_one_b(2, num_microbatches=2), Costs(), 0.9) is None


def test_arguments_are_checked() -> None:
    schedule = gpipe(1, num_microbatches=2)
    with pytest.raises(ValueError, match=r"retention \(forget\) must be recompute or offload"):
        fit_memory(schedule, Costs(), 1.0, ways=("forget",))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must have no RECOMPUTE"):
        fit_memory(add_recompute(schedule), Costs(), 1.0)
    with pytest.raises(ValueError, match=r"retention \(forget\)"):
        search(Costs(), num_ranks=1, num_microbatches=1, retention=("forget",))  # type: ignore[arg-type]


def test_search_with_retention_is_no_longer_and_fits_where_nothing_did() -> None:
    model = ModelCosts(kept_input=0.02, host_bandwidth=1.0, latency=0.05)
    makespans = {}
    for retention in ((), ("recompute",), _BOTH):
        found = search(
            model,
            num_ranks=4,
            num_microbatches=6,
            memory_limit=1.6,
            retention=retention,
            num_candidates=24,
        )
        makespans[len(retention)] = found.makespan
        assert found.lower_bound <= found.makespan
        assert found.makespan == simulate(found.schedule, found.costs).makespan
        assert validate(found.schedule, memory_limit=1.6, costs=found.costs)
        assert validate(add_send_recv(found.schedule, costs=found.costs)).is_runnable
    assert makespans[2] <= makespans[1] < makespans[0]
    with pytest.raises(ValueError, match=r"memory_limit \(0.5\)"):
        search(model, num_ranks=4, num_microbatches=6, memory_limit=0.5, num_candidates=4)
    half = search(
        ModelCosts(kept_input=0.02),
        num_ranks=4,
        num_microbatches=6,
        virtual=(2,),
        memory_limit=0.9,
        retention=("recompute",),
        num_candidates=12,
    )
    assert half.schedule.recomputed
    with pytest.raises(ValueError, match="that recompute can make fit"):
        search(
            model,
            num_ranks=4,
            num_microbatches=6,
            memory_limit=0.1,
            retention=("recompute",),
            num_candidates=4,
        )
