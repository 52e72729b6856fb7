"""What validation finds, and that it misses nothing."""

import pytest

from hp_schedule import (
    DeadlockError,
    FindingKind,
    MetaStep,
    Schedule,
    ScheduleError,
    add_send_recv,
    forward_only,
    gpipe,
    validate,
)

K = FindingKind
_GOOD = ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0")


def _schedule(*rows: str, num_microbatches: int = 1) -> Schedule:
    steps = [[MetaStep.from_str(text) for text in row.split()] for row in rows]
    return Schedule.from_steps(
        steps, stage_to_rank=range(len(rows)), num_microbatches=num_microbatches
    )


def _kinds(schedule: Schedule) -> set[FindingKind]:
    return {finding.kind for finding in validate(schedule).findings}


def test_a_sound_schedule_has_no_findings() -> None:
    report = validate(_schedule(*_GOOD))
    assert report
    assert report.findings == ()
    report.raise_if_failed()


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (("0F0 0SEND_F0 0RECV_B0 0B0 1W0", _GOOD[1]), K.PLACEMENT),
        (("0F0 0F0 0SEND_F0 0RECV_B0 0B0", _GOOD[1]), K.DUPLICATE),
        (("0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0", _GOOD[1]), K.DUPLICATE),
        (("0F0 0SEND_F0 0RECV_B0 0B0 0I0", _GOOD[1]), K.DUPLICATE),
        (("0F0 0SEND_F0 0RECV_B0", _GOOD[1]), K.MISSING),
        (("0F0 0SEND_F0 0RECV_B0 0I0", _GOOD[1]), K.MISSING),
        (("0F0 0RECV_B0 0B0", _GOOD[1]), K.MISSING),
        ((_GOOD[0], "1F0 1B0 1SEND_B0"), K.ORDER),
        (("0SEND_F0 0F0 0RECV_B0 0B0", _GOOD[1]), K.ORDER),
        (("0F0 0SEND_F0 0B0 0RECV_B0", _GOOD[1]), K.ORDER),
        (("0F0 0SEND_F0 0RECV_B0 0W0 0I0", _GOOD[1]), K.ORDER),
        ((_GOOD[0], "1RECV_F0 1F0 1SEND_B0 1B0"), K.ORDER),
        ((_GOOD[0] + " 0SEND_B0", _GOOD[1]), K.UNNEEDED),
    ],
)
def test_each_rule_is_checked(rows: tuple[str, str], kind: FindingKind) -> None:
    assert kind in _kinds(_schedule(*rows))


def test_receives_in_another_order_than_the_sends_are_found() -> None:
    schedule = _schedule(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
        num_microbatches=2,
    )
    assert _kinds(schedule) == {K.MESSAGE_ORDER}


def test_sends_that_wait_for_each_others_receives_are_a_deadlock_with_its_cycle() -> None:
    schedule = _schedule(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        num_microbatches=2,
    )
    (finding,) = validate(schedule).findings
    assert finding.kind is K.DEADLOCK
    assert "rank 0, cell 3: 0SEND_F1 waits for rank 1 to reach 1RECV_F1" in finding.message
    assert "rank 1, cell 3: 1SEND_B0 waits for rank 0 to reach 0RECV_B0" in finding.message
    with pytest.raises(DeadlockError, match="<-- here"):
        validate(schedule).raise_if_failed()


def test_a_contradiction_of_compute_steps_is_found_without_messages() -> None:
    assert _kinds(_schedule("0B0 0F0", "1F0 1B0")) == {K.ORDER}
    crossed = _schedule("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0", num_microbatches=2)
    assert _kinds(crossed) == {K.DEADLOCK}


def test_the_error_shows_the_timetable_with_the_cell_marked() -> None:
    schedule = _schedule("0F0 0SEND_F0 0B0 0RECV_B0", _GOOD[1])
    with pytest.raises(ScheduleError) as caught:
        validate(schedule).raise_if_failed()
    marked = [line for line in str(caught.value).splitlines() if "<-- here" in line]
    assert len(marked) == 1
    assert ">0B0<" in marked[0]


def test_the_absence_of_all_backwards_can_be_refused() -> None:
    schedule = add_send_recv(forward_only(2, num_microbatches=1))
    assert validate(schedule)
    assert not validate(schedule, forward_only=False)


def test_the_absence_of_all_messages_can_be_refused() -> None:
    schedule = gpipe(2, num_microbatches=1)
    assert validate(schedule)
    assert not validate(schedule, communication=True)


def test_an_overlap_needs_both_inputs_at_its_start() -> None:
    rows = [_GOOD[0], "1RECV_F0 (1F0;1B0)OVERLAP_F_B 1SEND_B0"]
    assert _kinds(_schedule(*rows)) == {K.ORDER}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("0F0 0UNSHARD 0B0", "computes while its parameters are sharded"),
        ("0UNSHARD 0F0 0RESHARD 0B0", "computes while its parameters are sharded"),
        ("0UNSHARD 0UNSHARD 0F0 0B0", "unsharded already"),
        ("0UNSHARD 0F0 0B0 0RESHARD 0RESHARD", "is not unsharded"),
        ("0UNSHARD 0F0 0REDUCE_GRAD 0B0", "after they were reduced"),
        ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "twice"),
    ],
)
def test_fsdp_steps_must_surround_the_compute_steps(row: str, text: str) -> None:
    (finding, *_) = validate(_schedule(row)).findings
    assert finding.kind is K.FSDP
    assert text in finding.message


def test_fsdp_steps_in_their_place_are_accepted() -> None:
    row = "0UNSHARD 0F0 0RESHARD 0UNSHARD 0I0 0W0 0REDUCE_GRAD 0RESHARD"
    assert validate(_schedule(row))
