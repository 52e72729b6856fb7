"""One rank's row from its closed form, without the others."""

import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from hp_schedule import (
    SCHEDULES,
    ClosedForm,
    add_send_recv,
    closed_form,
    drop_communication,
    dualpipe_v,
    gpipe,
    grouped_interleaved,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    simulate,
    v_min,
    validate,
    zbv,
    zero_bubble,
)
from hp_schedule.costs import Costs
from hp_schedule.schedule import dataflow
from hp_schedule.steps import leaves
from hp_schedule.validation.report import ValidationReport


def _options(num_ranks: int, *per_rank: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield every generator with its variants, and with numbers of stages where it takes any."""
    for kind in SCHEDULES.values():
        numbers = [{"num_stages_per_rank": number} for number in per_rank]
        for options in kind.variants(num_ranks, latency=0.4).values():
            for paired in ({kind.pairs: False}, {kind.pairs: True}) if kind.pairs else ({},):
                for number in [{}] if kind.stages_per_rank else numbers:
                    yield kind.generate, {**options, **paired, **number}


@cache
def _forms(max_ranks: int) -> list[ClosedForm]:
    return list(_make_forms(max_ranks))


def _make_forms(max_ranks: int) -> Iterator[ClosedForm]:
    for num_ranks in range(1, max_ranks + 1):
        for num in range(1, 3 * num_ranks + 1):
            for generator, options in _options(num_ranks, 1, 2, 3):
                yield closed_form(generator, num_ranks, num_microbatches=num, **options)


def test_a_row_made_alone_is_the_row_of_the_pass_over_all_ranks() -> None:
    for form in _forms(4):
        schedule = form.schedule(communication=True)
        rows = [form.row(rank) for rank in range(form.num_ranks)]
        assert tuple(rows) == schedule.steps


def test_rows_made_alone_fit_each_other_on_every_machine() -> None:
    for form in _forms(5):
        _check(form).raise_if_failed()


@pytest.mark.parametrize(("num_ranks", "num"), [(7, 3), (8, 5), (8, 13), (8, 16), (12, 25)])
def test_rows_of_longer_pipelines_fit_too(num_ranks: int, num: int) -> None:
    for generator, options in _options(num_ranks, 4):
        form = closed_form(generator, num_ranks, num_microbatches=num, **options)
        _check(form).raise_if_failed()


def _check(form: ClosedForm) -> ValidationReport:
    schedule = form.schedule(communication=True)
    return validate(schedule, communication=bool(schedule.edges))


def test_logical_time_grows_along_rows_and_from_each_value_to_its_reader() -> None:
    for form in _forms(5):
        rows = [form.timed_row(rank) for rank in range(form.num_ranks)]
        flow = dataflow(form.schedule())
        made = {
            flow.value_written(half): time
            for row in rows
            for time, code in row
            for half in leaves(code)
        }
        for row in rows:
            times = [time for time, _ in row]
            assert all(before < after for before, after in pairwise(times))
            for time, code in row:
                for half in leaves(code):
                    assert flow.value_read(half) < 0 or made[flow.value_read(half)] < time


def test_a_row_without_messages_is_the_generators() -> None:
    for form in _forms(3):
        schedule = form.schedule()
        rows = tuple(form.row(rank, communication=False) for rank in range(form.num_ranks))
        assert rows == schedule.steps
        assert drop_communication(form.schedule(communication=True)) == schedule


@pytest.mark.parametrize(
    "generator",
    [gpipe, one_f_one_b, interleaved_1f1b, looped_bfs, zero_bubble, interleaved_zero_bubble, zbv],
)
def test_messages_laid_out_along_logical_time_are_nearly_hidden(generator: Any) -> None:
    for num in (4, 8, 13, 16):
        form = closed_form(generator, 8, num_microbatches=num)
        step = form.num_ranks / form.num_stages
        costs = Costs(forward=step, input_grad=step, weight_grad=step, latency=0.05)
        at_best = simulate(form.schedule(), costs).makespan
        assert simulate(form.schedule(communication=True), costs).makespan <= at_best * 1.03


@pytest.mark.parametrize(
    "generator",
    [
        gpipe,
        one_f_one_b,
        interleaved_1f1b,
        looped_bfs,
        zero_bubble,
        interleaved_zero_bubble,
        grouped_interleaved,
        v_min,
        zbv,
        dualpipe_v,
    ],
)
def test_one_row_of_many_costs_what_its_own_steps_cost(generator: Any) -> None:
    """Counted in calls: 18 to 48 for each step of the row; all 64 rows would be 64 times that."""
    num_calls = 0

    def count(_frame: object, event: str, _what: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        row = closed_form(generator, 64, num_microbatches=256).row(25)
    finally:
        sys.setprofile(None)
    assert num_calls < 100 * len(row)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    form = closed_form(gpipe, 2, num_microbatches=1)
    with pytest.raises(ValueError, match=rf"rank \({rank}\) must be >= 0 and < num_ranks \(2\)"):
        form.row(rank)


def test_only_generators_have_a_closed_form() -> None:
    with pytest.raises(ValueError, match="must be one of dualpipe_v, forward_only, gpipe"):
        closed_form(add_send_recv, 2)


def test_times_must_fit_the_compute_steps() -> None:
    schedule = gpipe(2, num_microbatches=1)
    with pytest.raises(ValueError, match=r"len\(times\[1\]\) \(1\) must equal the number of"):
        add_send_recv(schedule, times=[[1, 4], [2]])
