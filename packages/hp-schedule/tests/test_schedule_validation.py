"""What validation finds, and that it misses nothing."""

from dataclasses import replace

import pytest

from hp_schedule import (
    Costs,
    DeadlockError,
    FindingKind,
    Lacking,
    MetaStep,
    MetaStepType,
    Schedule,
    ScheduleError,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_send_recv,
    forward_only,
    from_csv,
    from_json,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate,
    to_csv,
    to_json,
    validate,
    validate_pipeline_execution,
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
        ("0UNSHARD 0F0 0I0 0REDUCE_GRAD 0W0", "after they were reduced"),
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


@pytest.mark.parametrize("num_ranks", [3, 4, 6])
def test_a_backward_before_the_receive_of_its_gradient_is_found(num_ranks: int) -> None:
    """As published for interleaved 1F1B with few microbatches, on the last rank."""
    schedule = add_send_recv(interleaved_1f1b(num_ranks, num_microbatches=num_ranks - 2))
    rows = [list(row) for row in schedule.steps]
    last = rows[-1]
    receive = next(i for i, s in enumerate(last) if s and s.type is MetaStepType.BWD_RECV)
    step = last.pop(receive)
    assert step is not None
    backward = MetaStep(MetaStepType.BWD, step.stage_index, step.microbatch_index)
    last.insert(last.index(backward) + 1, step)
    wrong = Schedule.from_steps(
        rows, stage_to_rank=schedule.stage_to_rank, num_microbatches=num_ranks - 2
    )
    (finding,) = validate(wrong).findings
    assert finding.kind is K.ORDER
    assert f"{backward} stands before {step}" in finding.message


def test_memory_above_the_limit_is_found_at_its_cell() -> None:
    schedule = gpipe(2, num_microbatches=4)
    assert validate(schedule, memory_limit=4)
    found = validate(schedule, memory_limit=3).findings
    assert [(f.kind, f.rank, f.position) for f in found] == [(K.MEMORY, 0, 3), (K.MEMORY, 1, 3)]
    costs = Costs(activation=[[1, 2, 3, 4], 0])
    (finding,) = validate(schedule, memory_limit=5, costs=costs).findings
    assert finding.message == "rank 0, cell 2: activations (6) must be <= memory_limit (5)"


def test_stages_on_one_rank_share_its_memory() -> None:
    schedule = interleaved_1f1b(4, num_microbatches=8, num_stages_per_rank=2)
    peak = max(simulate(schedule, Costs(activation=0.5)).peak_activations)
    assert validate(schedule, memory_limit=peak)
    assert not validate(schedule, memory_limit=peak - 0.5)


def test_more_gathered_stages_than_allowed_are_found() -> None:
    schedule = add_fsdp_unshard_reshard(
        interleaved_1f1b(2, num_microbatches=2, num_stages_per_rank=4), max_active_stages=3
    )
    assert validate(schedule, max_active_stages=3)
    (finding, *_) = validate(schedule, max_active_stages=2).findings
    assert finding.kind is K.FSDP
    assert "stage 4 is one of 3 unsharded, that must be <= 2" in finding.message


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("0UNSHARD 0F0 0B0", "stage 0 is left unsharded"),
        (
            "0UNSHARD 1UNSHARD 0F0 1F0 1B0 0B0 0REDUCE_GRAD 0RESHARD 1RESHARD",
            "stage 1 never reduces its gradients",
        ),
    ],
)
def test_parameters_are_left_sharded_and_gradients_reduced(row: str, text: str) -> None:
    steps = [MetaStep.from_str(step) for step in row.split()]
    num_stages = 1 + max(step.stage_index or 0 for step in steps)
    schedule = Schedule.from_steps([steps], stage_to_rank=[0] * num_stages, num_microbatches=1)
    (finding,) = validate(schedule).findings
    assert finding.kind is K.FSDP
    assert text in finding.message


def _lose(schedule: Schedule, stage: int, *types: MetaStepType) -> Schedule:
    """Return a schedule without the steps of some types of one stage, or of all (-1)."""
    rows = [
        [s for s in row if s and not (s.type in types and stage in (-1, s.stage_index))]
        for row in schedule.steps
    ]
    lost = Schedule.from_steps(
        rows, stage_to_rank=schedule.stage_to_rank, num_microbatches=schedule.num_microbatches
    )
    return schedule.with_rows(row.codes() for row in lost.steps)


_GATHERS = (MetaStepType.FSDP_UNSHARD, MetaStepType.FSDP_RESHARD)
_REDUCES = (MetaStepType.FSDP_REDUCE_GRAD,)


@pytest.mark.parametrize("stage", [0, 3, -1])
@pytest.mark.parametrize(
    ("lost", "text"),
    [
        (_GATHERS, "is sharded and never unsharded"),
        (_REDUCES, "never reduces its gradients"),
        ((*_GATHERS, *_REDUCES), "is sharded and never unsharded"),
    ],
)
def test_a_sharded_stage_that_lost_all_steps_of_a_kind_is_found(
    stage: int, lost: tuple[MetaStepType, ...], text: str
) -> None:
    schedule = interleaved_1f1b(2, num_microbatches=2)
    schedule = add_fsdp_reduce_grad(add_fsdp_unshard_reshard(add_send_recv(schedule)))
    assert validate(schedule).is_runnable
    findings = validate(_lose(schedule, stage, *lost)).findings
    assert findings
    assert {finding.kind for finding in findings} == {K.FSDP}
    assert text in findings[0].message
    assert not validate(_lose(from_csv(to_csv(schedule)), max(stage, 0), *lost))


def test_stages_that_a_schedule_says_are_whole_need_no_steps() -> None:
    schedule = add_send_recv(interleaved_1f1b(2, num_microbatches=2))
    some = add_fsdp_unshard_reshard(add_fsdp_reduce_grad(schedule, stages=[1]), stages=[1])
    assert validate(some).is_runnable
    assert validate(from_json(to_json(some))).is_runnable
    # A CSV cannot say so: there the steps of one stage ask for those of all.
    assert {f.kind for f in validate(from_csv(to_csv(some, as_is=True))).findings} == {K.FSDP}
    other = replace(some, gathered_stages=(0,))
    assert any("stage 1 is not sharded" in f.message for f in validate(other).findings)
    reduced = validate(add_fsdp_reduce_grad(schedule, stages=[1]))
    assert reduced.is_runnable


def test_what_is_absent_altogether_is_lacking_unless_somebody_asks_for_it() -> None:
    compute = interleaved_1f1b(2, num_microbatches=2)
    assert validate(compute).lacking == (Lacking.COMMUNICATION,)
    assert validate(compute, communication=False).is_runnable
    evaluation = forward_only(2, num_microbatches=2)
    assert validate(evaluation).lacking == (Lacking.BACKWARD, Lacking.COMMUNICATION)
    assert validate(add_send_recv(evaluation), forward_only=True).is_runnable
    assert validate(add_fsdp_unshard_reshard(add_send_recv(compute))).lacking == (
        Lacking.REDUCE_GRAD,
    )
    assert validate(add_fsdp_unshard_reshard(add_send_recv(evaluation))).lacking == (
        Lacking.BACKWARD,
    )
    assert validate(interleaved_1f1b(1, num_microbatches=2)).is_runnable


@pytest.mark.parametrize("stages", [(1, 0), (0, 0), (4,), (-1,)])
def test_stages_that_are_declared_must_exist_once_and_in_order(stages: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"gathered_stages \(\[.*\]\) must be of the 4 stages"):
        replace(interleaved_1f1b(2, num_microbatches=2), gathered_stages=stages)


def _two_chains(*rows: str) -> Schedule:
    return Schedule.from_steps(
        [[MetaStep.from_str(text) for text in row.split()] for row in rows],
        stage_to_rank=[0, 1, 1, 0],
        num_microbatches=1,
        chains=[[0, 1], [2, 3]],
    )


def test_messages_that_meet_head_on_run_only_with_a_channel_for_each_direction() -> None:
    rows = (
        "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
        "2F0 2SEND_F0 1RECV_F0 1F0 1B0 1SEND_B0 2RECV_B0 2B0",
    )
    schedule = _two_chains(*rows)
    assert validate(schedule, channels="edge")
    for channels in ("pair", "rank", None):
        (finding,) = validate(schedule, channels=channels).findings
        assert finding.kind is K.DEADLOCK
    (finding,) = validate(schedule, channels="pair").findings
    assert "3F0 waits for 3RECV_F0, on rank 1 behind" not in finding.message
    assert "with one communicator for each pair of ranks" in finding.message
    # One side giving way is enough for all.
    given_way = _two_chains("0F0 3RECV_F0 0SEND_F0 3F0 3B0 0RECV_B0 3SEND_B0 0B0", rows[1])
    assert validate(given_way)


def test_calls_in_the_form_of_upstream_are_told_the_form_of_this_package() -> None:
    schedule = one_f_one_b(2, num_microbatches=2)
    assert validate_pipeline_execution(schedule) == validate(schedule)
    with pytest.raises(TypeError, match=r"must have 1, a Schedule, which has chunk_num"):
        validate_pipeline_execution(schedule, 1, "loop")
    with pytest.raises(TypeError, match=r"schedule \(dict\) must be a Schedule; .*from_steps"):
        validate_pipeline_execution({0: list(schedule.steps[0])})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"type \(0\) must be a MetaStepType: MetaStep\(type, "):
        MetaStep(0, MetaStepType.FWD, 1)  # type: ignore[arg-type]
