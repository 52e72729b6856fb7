"""Messages between the compute steps."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_tracing import trace

from hp_schedule import (
    Costs,
    DeadlockError,
    MetaStep,
    MetaStepType,
    Schedule,
    add_send_recv,
    drop_communication,
    generate_stage_to_rank_mapping,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate,
    validate,
)


def _schedule(*rows: str, stage_to_rank: list[int], num_microbatches: int) -> Schedule:
    steps = [[MetaStep.from_str(text) for text in row.split()] for row in rows]
    return Schedule.from_steps(
        steps, stage_to_rank=stage_to_rank, num_microbatches=num_microbatches
    )


def test_a_send_follows_its_producer_and_a_receive_precedes_its_consumer() -> None:
    rows = [" ".join(map(str, r)) for r in add_send_recv(gpipe(2, num_microbatches=1)).steps]
    assert rows == ["0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"]


def test_a_receive_is_posted_while_the_rank_still_computes_the_step_before() -> None:
    rows = [" ".join(map(str, r)) for r in add_send_recv(gpipe(2, num_microbatches=3)).steps]
    assert rows[1].startswith("1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2")


def test_of_what_is_produced_at_once_even_ranks_send_before_they_receive() -> None:
    """Else all that pass something on at once would wait for each other in one long chain."""
    schedule = add_send_recv(gpipe(4, num_microbatches=3), costs=Costs(latency=1))
    rows = [" ".join(map(str, row)) for row in schedule.steps]
    assert "1RECV_F2 1F0 1SEND_F0" in rows[1]
    assert "2F0 2SEND_F0 2RECV_F2" in rows[2]
    assert "3RECV_F2 3F0" in rows[3]


def test_dropping_messages_gives_the_compute_steps_back() -> None:
    schedule = interleaved_1f1b(3, num_microbatches=5)
    assert drop_communication(add_send_recv(schedule)) == schedule


def test_stages_on_one_rank_hand_over_without_messages() -> None:
    schedule = _schedule(
        "0F0 3F0 3B0 0B0",
        "1F0 2F0 2B0 1B0",
        stage_to_rank=list(generate_stage_to_rank_mapping(2, 4, "v").values()),
        num_microbatches=1,
    )
    found = add_send_recv(schedule)
    validate(found).raise_if_failed()
    text = [str(step) for row in found.steps for step in row]
    assert sum("SEND" in step for step in text) == 4
    assert not any(step.startswith(("2RECV_F", "1RECV_B")) for step in text)


def test_one_rank_alone_needs_no_messages() -> None:
    schedule = interleaved_1f1b(1, num_microbatches=3, num_stages_per_rank=3)
    assert add_send_recv(schedule) == schedule


def test_messages_cost_nothing_without_latency() -> None:
    for num_ranks in range(1, 6):
        for per_rank in range(1, 4):
            for num in range(1, 3 * num_ranks + 1):
                schedule = interleaved_1f1b(
                    num_ranks, num_microbatches=num, num_stages_per_rank=per_rank
                )
                found = simulate(add_send_recv(schedule)).makespan
                assert found == simulate(schedule).makespan


def test_messages_are_posted_early_enough_to_hide_a_latency_below_one_step() -> None:
    costs = Costs(latency=0.2)
    for num_ranks in (2, 4, 8):
        for per_rank in (1, 2, 4):
            for num in (num_ranks // 2, num_ranks, num_ranks + 3, 3 * num_ranks):
                schedule = interleaved_1f1b(
                    num_ranks, num_microbatches=num, num_stages_per_rank=per_rank
                )
                best = simulate(schedule, costs).makespan
                assert simulate(add_send_recv(schedule), costs).makespan <= best * 1.01


@st.composite
def _random_schedules(draw: st.DrawFn) -> Schedule:
    """Any placement, and any order in which ranks may run what is ready, backward split or not."""
    num_ranks = draw(st.integers(1, 4))
    num = draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, num_ranks - 1), max_size=4))
    place = draw(st.permutations([*range(num_ranks), *extra]))
    rows: list[list[MetaStep]] = [[] for _ in range(num_ranks)]
    last = len(place) - 1
    ready = [(0, microbatch, MetaStepType.FWD) for microbatch in range(num)]
    while ready:
        stage, microbatch, kind = ready.pop(draw(st.integers(0, len(ready) - 1)))
        rows[place[stage]].append(MetaStep(kind, stage, microbatch))
        if kind is MetaStepType.BWD_WEIGHT:
            continue
        if kind is MetaStepType.BWD_INPUT:
            ready.append((stage, microbatch, MetaStepType.BWD_WEIGHT))
        split = draw(st.sampled_from([MetaStepType.BWD, MetaStepType.BWD_INPUT]))
        if kind is MetaStepType.FWD:
            ready.append(
                (stage + 1, microbatch, kind) if stage < last else (last, microbatch, split)
            )
        elif stage > 0:
            ready.append((stage - 1, microbatch, split))
    return Schedule.from_steps(rows, stage_to_rank=place, num_microbatches=num)


@given(_random_schedules(), st.integers(1, 3), st.integers(1, 3))
def test_any_possible_order_gets_messages_that_cannot_deadlock(
    schedule: Schedule, forward: int, input_grad: int
) -> None:
    found = add_send_recv(schedule, costs=Costs(forward=forward, input_grad=input_grad))
    validate(found, communication=bool(found.edges)).raise_if_failed()
    last = schedule.num_stages - 1
    outputs = trace(found).outputs
    assert all((last, microbatch) in outputs for microbatch in range(schedule.num_microbatches))


def test_a_contradiction_between_compute_steps_is_a_deadlock_error() -> None:
    schedule = _schedule("0B0 0F0", "1F0 1B0", stage_to_rank=[0, 1], num_microbatches=1)
    with pytest.raises(DeadlockError, match="0B0 waits"):
        add_send_recv(schedule)


def test_messages_are_not_added_twice() -> None:
    schedule = add_send_recv(one_f_one_b(2, num_microbatches=2))
    with pytest.raises(ValueError, match="must have no communication steps"):
        add_send_recv(schedule)


def test_bubbles_and_fsdp_steps_stay_in_place() -> None:
    step = MetaStep.from_str
    schedule = Schedule.from_steps(
        [
            [step("0UNSHARD"), step("0F0"), None, step("0B0"), step("0REDUCE_GRAD")],
            [None, step("1F0"), step("1B0")],
        ],
        stage_to_rank=[0, 1],
        num_microbatches=1,
    )
    assert drop_communication(add_send_recv(schedule)) == schedule


def _calls(num_ranks: int) -> int:
    """Calls that generation, messages and proof of an interleaved schedule take."""
    num_calls = 0

    def count(_frame: object, event: str, _what: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        schedule = add_send_recv(interleaved_1f1b(num_ranks, num_microbatches=4 * num_ranks))
        validate(schedule).raise_if_failed()
    finally:
        sys.setprofile(None)
    return num_calls


def test_generation_messages_and_proof_cost_as_much_for_each_step_of_a_large_schedule() -> None:
    """Twice the ranks with twice the microbatches each: four times the steps."""
    assert _calls(32) < 4.5 * _calls(16)
