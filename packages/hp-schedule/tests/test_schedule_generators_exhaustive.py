"""Every generator over a whole grid: 2 to 8 ranks, 1 to 4 stages each, up to 3 rounds.

By default there are at most 5 ranks; HP_WHOLE has 8.
"""

import os
from collections.abc import Iterator

import pytest
from schedule_tracing import Symbol, trace

from hp_schedule import SCHEDULES, Schedule, ScheduleKind, add_send_recv, validate
from hp_schedule.steps import BWD, BWD_INPUT, BWD_WEIGHT, FWD, KIND_MASK, leaves

_RANKS = range(2, 9 if os.environ.get("HP_WHOLE") else 6)
_KINDS = pytest.mark.parametrize("kind", SCHEDULES.values(), ids=list(SCHEDULES))


def _schedules(kind: ScheduleKind, num_ranks: int, num_microbatches: int) -> Iterator[Schedule]:
    for options in kind.variants(num_ranks, latency=0.4).values():
        for paired in (False, True) if kind.pairs else (False,):
            for per_rank in [kind.stages_per_rank] if kind.stages_per_rank else range(1, 5):
                yield kind.build(num_ranks, num_microbatches, per_rank, paired=paired, **options)


@_KINDS
def test_every_schedule_is_valid_and_free_of_deadlock_on_every_machine(kind: ScheduleKind) -> None:
    for num_ranks in _RANKS:
        for num_microbatches in range(1, 3 * num_ranks + 1):
            for schedule in _schedules(kind, num_ranks, num_microbatches):
                found = add_send_recv(schedule)
                validate(found, communication=True).raise_if_failed()


@_KINDS
def test_every_schedule_computes_what_one_process_computes(kind: ScheduleKind) -> None:
    for num_ranks in (2, 3, 5):
        for num_microbatches in (1, num_ranks - 1, num_ranks + 1, 2 * num_ranks):
            for schedule in _schedules(kind, num_ranks, num_microbatches):
                _check_values(schedule)


def _check_values(schedule: Schedule) -> None:
    found = trace(add_send_recv(schedule))
    last = schedule.num_stages - 1
    for microbatch in range(schedule.num_microbatches):
        value: Symbol = ("x", microbatch)
        inputs = []
        for stage in range(schedule.num_stages):
            inputs.append(value)
            value = ("F", stage, value)
            assert found.outputs[stage, microbatch] == value
        if schedule.is_forward_only:
            continue
        grad: Symbol = ("loss", value)
        for stage in range(last, -1, -1):
            assert found.weight_grads[stage].count((inputs[stage], grad)) == 1
            grad = ("B", stage, grad)


@_KINDS
def test_every_stage_takes_microbatches_in_ascending_order(kind: ScheduleKind) -> None:
    """So that weight gradients accumulate as in one process."""
    for num_ranks in (2, 5, 8):
        for num_microbatches in (num_ranks - 1, 2 * num_ranks + 1):
            for schedule in _schedules(kind, num_ranks, num_microbatches):
                seen: dict[tuple[bool, bool, int], list[int]] = {}
                for row in schedule.steps:
                    for part in (part for code in row.codes() for part in leaves(code)):
                        stage = part >> 4 & 0x3FFF
                        for what in _WHAT[part & KIND_MASK]:
                            seen.setdefault((*what, stage), []).append(part >> 18)
                for order in seen.values():
                    assert order == sorted(order)


_WHAT = {
    FWD: [(True, False)],
    BWD_INPUT: [(False, True)],
    BWD_WEIGHT: [(False, False)],
    BWD: [(False, True), (False, False)],
}
