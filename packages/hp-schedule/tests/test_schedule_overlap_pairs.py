"""Pairs of a forward and a backward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_schedule import (
    DeadlockError,
    MetaStep,
    MetaStepType,
    Schedule,
    add_send_recv,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    one_f_one_b,
    pair_overlap,
    validate,
    zbv,
)
from hp_schedule.passes.overlap import PairOrder


def _text(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.steps]


def _pairs(schedule: Schedule) -> int:
    return sum(step is not None and step.type.is_overlap for row in schedule.steps for step in row)


def _apart(schedule: Schedule) -> Schedule:
    return Schedule.from_steps(
        [[half for step in row if step for half in step.leaves()] for row in schedule.steps],
        stage_to_rank=schedule.stage_to_rank,
        num_microbatches=schedule.num_microbatches,
        chains=schedule.chains,
    )


def test_each_backward_of_the_steady_state_takes_the_forward_behind_it() -> None:
    assert _text(pair_overlap(one_f_one_b(2, num_microbatches=3))) == [
        "0F0 0F1 (0B0;0F2)OVERLAP_B_F 0B1 0B2",
        "1F0 (1B0;1F1)OVERLAP_B_F (1B1;1F2)OVERLAP_B_F 1B2",
    ]


def test_a_forward_is_not_paired_with_its_own_backward() -> None:
    schedule = pair_overlap(one_f_one_b(2, num_microbatches=3), order="f_b")
    assert _text(schedule) == [
        "0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]


def test_interleaved_pairs_its_steps_if_asked() -> None:
    plain = interleaved_1f1b(4, num_microbatches=8)
    paired = interleaved_1f1b(4, num_microbatches=8, overlap_b_f=True)
    assert paired == pair_overlap(plain)
    # Every forward behind the warm-up of each rank: 16 forwards, 4 + 2 (3 - rank) + 1 before.
    assert _pairs(paired) == sum(16 - (4 + 2 * (3 - rank) + 1) for rank in range(4))


@pytest.mark.parametrize("order", ["b_f", "f_b"])
def test_pairs_leave_every_schedule_valid_and_its_order_as_it_was(order: PairOrder) -> None:
    for num_ranks in range(1, 6):
        for num in range(1, 2 * num_ranks + 2):
            for schedule in (
                gpipe(num_ranks, num_microbatches=num),
                one_f_one_b(num_ranks, num_microbatches=num),
                interleaved_1f1b(num_ranks, num_microbatches=num, num_stages_per_rank=3),
                interleaved_zero_bubble(num_ranks, num_microbatches=num),
                zbv(num_ranks, num_microbatches=num),
            ):
                paired = pair_overlap(schedule, order=order)
                assert _apart(paired) == schedule
                validate(paired).raise_if_failed()
                found = add_send_recv(paired)
                validate(found, communication=bool(found.edges)).raise_if_failed()


def test_of_two_pairs_that_would_wait_for_each_other_one_is_taken_apart() -> None:
    """Rank 0 cannot give F1 before B0 is done, rank 1 cannot give B0's input before F1 is."""
    rows = ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    schedule = Schedule.from_steps(
        [[MetaStep.from_str(text) for text in row.split()] for row in rows],
        stage_to_rank=[0, 1],
        num_microbatches=2,
    )
    assert _text(pair_overlap(schedule, order="f_b")) == [
        "0F0 0F1 0B0 0B1",
        "1F0 (1F1;1B0)OVERLAP_F_B 1B1",
    ]


@st.composite
def _orders(draw: st.DrawFn) -> Schedule:
    """Two stages on each of three ranks in a V, in any order in which what is ready may run."""
    place, num = [0, 1, 2, 2, 1, 0], draw(st.integers(1, 3))
    rows: list[list[MetaStep]] = [[] for _ in range(3)]
    ready = [(0, microbatch, MetaStepType.FWD) for microbatch in range(num)]
    while ready:
        stage, microbatch, kind = ready.pop(draw(st.integers(0, len(ready) - 1)))
        rows[place[stage]].append(MetaStep(kind, stage, microbatch))
        if kind is MetaStepType.FWD and stage < 5:
            ready.append((stage + 1, microbatch, kind))
        elif kind is MetaStepType.FWD:
            ready.append((stage, microbatch, MetaStepType.BWD))
        elif stage > 0:
            ready.append((stage - 1, microbatch, kind))
    return Schedule.from_steps(rows, stage_to_rank=place, num_microbatches=num)


@given(_orders(), st.sampled_from(["b_f", "f_b"]))
def test_pairs_of_any_possible_order_run_to_their_end(schedule: Schedule, order: PairOrder) -> None:
    paired = pair_overlap(schedule, order=order)
    assert _apart(paired) == schedule
    validate(paired).raise_if_failed()
    validate(add_send_recv(paired), communication=True).raise_if_failed()


def test_a_contradiction_is_a_deadlock_error() -> None:
    schedule = Schedule.from_steps(
        [[MetaStep.from_str("0B0"), MetaStep.from_str("0F0")]],
        stage_to_rank=[0],
        num_microbatches=1,
    )
    with pytest.raises(DeadlockError, match="rank 0, cell 0: 0B0 waits for a value"):
        pair_overlap(schedule)


def test_messages_must_come_after_pairs() -> None:
    with pytest.raises(ValueError, match="must have no communication steps"):
        pair_overlap(add_send_recv(gpipe(2, num_microbatches=1)))


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match=r"order \(fb\) must be b_f or f_b"):
        pair_overlap(gpipe(2, num_microbatches=1), order="fb")  # type: ignore[arg-type]
