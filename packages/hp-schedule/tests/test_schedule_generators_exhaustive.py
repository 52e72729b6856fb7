"""Every generator over a whole grid: 2 to 8 ranks, 1 to 4 stages each, up to 3 rounds."""

from collections.abc import Callable
from functools import partial

import pytest

from hp_schedule import (
    Schedule,
    add_send_recv,
    dualpipe_v,
    forward_only,
    gpipe,
    grouped_interleaved,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    u_shape,
    v_half,
    v_min,
    validate,
    zbv,
    zero_bubble,
)
from hp_schedule.packing import BWD, BWD_INPUT, BWD_WEIGHT, FWD, KIND_MASK, leaves
from hp_schedule.tracing import Symbol, trace

_RANKS = range(2, 9)
_FIXED: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero_bubble_1p": partial(zero_bubble, max_in_flight="1p"),
    "zero_bubble_1.5p": partial(zero_bubble, max_in_flight="1.5p"),
    "zero_bubble_2p": partial(zero_bubble, max_in_flight="2p"),
    "zbv": zbv,
    "zbv_latency": partial(zbv, latency=0.4),
    "v_half": v_half,
    "v_half_latency": partial(v_half, latency=0.4),
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
    "dualpipe_v_apart": partial(dualpipe_v, overlap_f_b=False),
    "u_shape": u_shape,
}
_ANY_STAGES: dict[str, Callable[..., Schedule]] = {
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_1f1b_overlap": partial(interleaved_1f1b, overlap_b_f=True),
    "looped_bfs": looped_bfs,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "grouped_interleaved": grouped_interleaved,
    "forward_only": forward_only,
}


def _schedules(name: str, num_ranks: int, num_microbatches: int) -> list[Schedule]:
    if name in _FIXED:
        return [_FIXED[name](num_ranks, num_microbatches=num_microbatches)]
    generate = partial(_ANY_STAGES[name], num_ranks, num_microbatches=num_microbatches)
    return [generate(num_stages_per_rank=per_rank) for per_rank in range(1, 5)]


@pytest.mark.parametrize("name", [*_FIXED, *_ANY_STAGES])
def test_every_schedule_is_valid_and_free_of_deadlock_on_every_machine(name: str) -> None:
    for num_ranks in _RANKS:
        for num_microbatches in range(1, 3 * num_ranks + 1):
            for schedule in _schedules(name, num_ranks, num_microbatches):
                found = add_send_recv(schedule)
                validate(found, communication=True).raise_if_failed()


@pytest.mark.parametrize("name", [*_FIXED, *_ANY_STAGES])
def test_every_schedule_computes_what_one_process_computes(name: str) -> None:
    for num_ranks in (2, 3, 5):
        for num_microbatches in (1, num_ranks - 1, num_ranks + 1, 2 * num_ranks):
            for schedule in _schedules(name, num_ranks, num_microbatches):
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


@pytest.mark.parametrize("name", [*_FIXED, *_ANY_STAGES])
def test_every_stage_takes_microbatches_in_ascending_order(name: str) -> None:
    """So that weight gradients accumulate as in one process."""
    for num_ranks in (2, 5, 8):
        for num_microbatches in (num_ranks - 1, 2 * num_ranks + 1):
            for schedule in _schedules(name, num_ranks, num_microbatches):
                seen: dict[tuple[bool, bool, int], list[int]] = {}
                for row in schedule.steps:
                    for part in (part for code in row.codes() for part in leaves(code)):
                        kind, stage = part & KIND_MASK, part >> 4 & 0x3FFF
                        for what in _WHAT[kind]:
                            seen.setdefault((*what, stage), []).append(part >> 18)
                for order in seen.values():
                    assert order == sorted(order)


_WHAT = {
    FWD: [(True, False)],
    BWD_INPUT: [(False, True)],
    BWD_WEIGHT: [(False, False)],
    BWD: [(False, True), (False, False)],
}
