"""What microbatches keep: run again, or copied to the host and back."""

import random
import re

import pytest
from schedule_tracing import trace

from hp_schedule import (
    SCHEDULES,
    Costs,
    FindingKind,
    MetaStep,
    MetaStepType,
    ModelCosts,
    Schedule,
    ScheduleKind,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_offload,
    add_recompute,
    add_send_recv,
    chrome_trace,
    drop_retention,
    from_csv,
    from_json,
    gpipe,
    interleaved_1f1b,
    measured_costs,
    one_f_one_b,
    pair_overlap,
    simulate,
    timeline_svg,
    timetable,
    to_csv,
    to_json,
    validate,
    zero_bubble,
)


def _row(text: str, num_microbatches: int = 2) -> Schedule:
    return Schedule.from_steps(
        [[MetaStep.from_str(step) for step in text.split()]],
        stage_to_rank=[0],
        num_microbatches=num_microbatches,
    )


@pytest.mark.parametrize(
    "kind", [kind for kind in SCHEDULES.values() if kind.trains], ids=lambda kind: kind.name
)
def test_every_schedule_takes_any_choice_and_stays_valid(kind: ScheduleKind) -> None:
    rng = random.Random(kind.name)
    schedule = kind.build(4, 6, kind.stages_per_rank or 2, paired=None)
    for round_ in range(6):
        places = [
            (stage, microbatch)
            for stage in range(schedule.num_stages)
            for microbatch in range(schedule.num_microbatches)
        ]
        rng.shuffle(places)
        one, two = sorted(rng.sample(range(len(places) + 1), 2))
        chosen = add_offload(schedule, places[one:two], ahead=round_ % 3)
        chosen = add_recompute(chosen, places[:one])
        assert chosen.recomputed == set(places[:one])
        assert chosen.offloaded == set(places[one:two])
        assert drop_retention(chosen) == schedule
        sent = add_send_recv(chosen)
        if round_ % 2:
            sent = add_fsdp_reduce_grad(add_fsdp_unshard_reshard(sent, max_active_stages=2))
        assert validate(sent).is_runnable
        assert from_json(to_json(sent)) == sent
        assert trace(sent).weight_grads == trace(drop_retention(sent)).weight_grads


def test_messages_and_sharding_may_be_there_before() -> None:
    schedule = add_fsdp_reduce_grad(
        add_fsdp_unshard_reshard(add_send_recv(interleaved_1f1b(2, num_microbatches=4)))
    )
    chosen = add_offload(add_recompute(schedule, [(0, 1), (3, 2)]), [(1, 0), (2, 3)])
    assert validate(chosen).is_runnable


def test_a_recompute_stands_before_the_pair_that_its_backward_is_half_of() -> None:
    paired = pair_overlap(one_f_one_b(2, num_microbatches=4))
    row = [str(step) for step in add_recompute(paired).steps[0]]
    pair = next(step for step in row if "OVERLAP" in step)
    backward = re.findall(r"\d+B\d+", pair)[0]
    assert row[row.index(pair) - 1] == backward.replace("B", "RECOMPUTE")


def test_all_but_what_has_no_room_is_offloaded_by_default() -> None:
    chosen = add_offload(one_f_one_b(2, num_microbatches=3))
    # Elsewhere the copy back would stand right behind the copy out.
    assert chosen.offloaded == {(0, 1)}
    assert validate(chosen)


@pytest.mark.parametrize(
    ("row", "kind", "words"),
    [
        ("0RECOMPUTE0 0F0 0B0 0F1 0B1", "order", "0RECOMPUTE0 stands before 0F0"),
        ("0F0 0B0 0RECOMPUTE0 0F1 0B1", "order", "0RECOMPUTE0 stands behind 0B0"),
        ("0F0 0I0 0RECOMPUTE0 0W0 0F1 0B1", "order", "0RECOMPUTE0 stands behind 0I0"),
        ("0F0 0RECOMPUTE0 0RECOMPUTE0 0B0 0F1 0B1", "duplicate", "0RECOMPUTE0 stands twice"),
        ("0F0 0OFFLOAD0 0F1 0B0 0B1", "order", "0B0 stands before 0RELOAD0"),
        ("0F0 0F1 0RELOAD0 0B0 0B1", "order", "0RELOAD0 stands before 0OFFLOAD0"),
        ("0F0 0F1 0B0 0B1 0OFFLOAD0", "order", "0OFFLOAD0 stands behind 0B0"),
        ("0F0 0OFFLOAD0 0RELOAD0 0OFFLOAD0 0RELOAD0 0B0 0F1 0B1", "duplicate", "stands twice"),
        (
            "0F0 0OFFLOAD0 0F1 0RELOAD0 0RECOMPUTE0 0B0 0B1",
            "retention",
            "0RECOMPUTE0 and 0OFFLOAD0 are of one microbatch",
        ),
        (
            "0F0 0RECOMPUTE0 0OFFLOAD0 0RELOAD0 0B0 0F1 0B1",
            "retention",
            "0OFFLOAD0 and 0RECOMPUTE0 are of one microbatch",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(row: str, kind: str, words: str) -> None:
    found = validate(_row(row)).findings
    assert found[0].kind is FindingKind(kind)
    assert words in found[0].message


def test_a_copy_that_never_comes_back_is_missing() -> None:
    found = validate(_row("0F0 0B0 0F1 0OFFLOAD1", 2)).findings
    messages = [finding.message for finding in found]
    assert any("0RELOAD1 is missing" in message for message in messages)


def test_a_step_on_the_wrong_rank_and_one_without_backwards_are_refused() -> None:
    rows = [[*row] for row in one_f_one_b(2, num_microbatches=2).steps]
    rows[1].insert(1, MetaStep(MetaStepType.RECOMPUTE, 0, 1))
    wrong = Schedule.from_steps(rows, stage_to_rank=[0, 1], num_microbatches=2)
    assert validate(wrong).findings[0].kind is FindingKind.PLACEMENT
    forward = validate(_row("0F0 0RECOMPUTE0 0F1"), forward_only=True)
    assert forward.findings[0].kind is FindingKind.UNNEEDED


def test_a_recompute_needs_gathered_parameters() -> None:
    row = "0UNSHARD 0F0 0F1 0RESHARD 0RECOMPUTE0 0UNSHARD 0B0 0B1 0RESHARD 0REDUCE_GRAD"
    found = validate(_row(row)).findings
    assert found[0].kind is FindingKind.FSDP
    assert found[0].position == 4


def test_places_are_checked() -> None:
    schedule = gpipe(2, num_microbatches=2)
    with pytest.raises(ValueError, match=r"place \(0, 7\) must have a backward"):
        add_recompute(schedule, [(0, 7)])
    with pytest.raises(ValueError, match=r"place \(0, 1\) must have no RECOMPUTE"):
        add_offload(add_recompute(schedule, [(0, 1)]), [(0, 1)])
    with pytest.raises(ValueError, match=r"ahead \(-1\) must be >= 0"):
        add_offload(schedule, ahead=-1)


def test_a_recompute_takes_time_and_gives_memory() -> None:
    schedule = gpipe(1, num_microbatches=4)
    costs = Costs(forward=2.0, recompute=1.5, activation=3.0, kept_input=0.5)
    plain, again = simulate(schedule, costs), simulate(add_recompute(schedule), costs)
    assert plain.makespan == 4 * (2 + 2)
    assert again.makespan == plain.makespan + 4 * 1.5
    assert plain.peak_activations == (12.0,)
    assert again.peak_activations == (3 + 3 * 0.5,)
    # Without a price of its own it is a forward.
    assert simulate(add_recompute(schedule), Costs(forward=2.0)).makespan == 4 * (2 + 2 + 2)


def test_a_recompute_runs_while_its_rank_waits() -> None:
    schedule = one_f_one_b(4, num_microbatches=4)
    chosen = add_recompute(schedule, [(0, 0)])
    assert simulate(chosen).makespan == simulate(schedule).makespan


def test_copies_share_a_way_to_the_host_and_overlap_with_compute() -> None:
    schedule = _row("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0F3 0RELOAD0 0B3 0B2 0RELOAD1 0B1 0B0", 4)
    costs = Costs(activation=2.0, host_bandwidth=2.0, offloaded=1.0)
    result = simulate(schedule, costs)
    # Copies out end at 1.5 and 2.5; of those back the first is early and the second takes 0.5.
    assert result.makespan == 12.5
    assert result.peak_activations == (2 + 2 + 2 + 2 - 1 - 1 + 1,)
    slow = simulate(schedule, Costs(activation=2.0, host_bandwidth=0.25, offloaded=1.0))
    # Out until 5 and 9; back from 5 to 9 and from 9 to 13; 1's backward begins then, 0's at 15.
    assert slow.makespan == 17.0
    assert slow.exposed_communication == (5.0,)
    assert [str(span.step) for span in slow.timeline if not span.step.type.is_compute] == [
        "0RELOAD1"
    ]


def test_what_is_on_its_way_to_the_host_is_still_held() -> None:
    schedule = _row("0F0 0OFFLOAD0 0F1 0RELOAD0 0B1 0B0", 2)
    assert simulate(schedule, Costs(host_bandwidth=10.0)).peak_activations == (2.0,)
    assert simulate(schedule).peak_activations == (2.0,)
    far = _row("0F0 0OFFLOAD0 0F1 0B1 0RELOAD0 0B0", 2)
    assert simulate(far).peak_activations == (1.0,)
    assert simulate(far, Costs(host_bandwidth=0.5)).peak_activations == (2.0,)
    assert validate(far, memory_limit=1.0, costs=Costs())


def test_memory_of_a_row_is_that_of_the_simulator_without_delays() -> None:
    rng = random.Random(0)
    costs = Costs(activation=1.0, kept_input=0.25, offloaded=0.75)
    for _ in range(60):
        schedule = rng.choice([gpipe, one_f_one_b, zero_bubble])(3, num_microbatches=4)
        if rng.random() < 0.3 and not schedule.has_communication:
            schedule = pair_overlap(schedule)
        places = [(s, m) for s in range(3) for m in range(4)]
        rng.shuffle(places)
        schedule = add_recompute(add_offload(schedule, places[:4]), places[4:8])
        quick = simulate(schedule, costs)
        exact = simulate(schedule, costs, cores=99)
        assert quick.makespan == pytest.approx(exact.makespan)
        assert quick.peak_activations == pytest.approx(exact.peak_activations)
        assert quick.bubble == pytest.approx(exact.bubble)
        top = max(quick.peak_activations)
        assert validate(schedule, memory_limit=top, costs=costs)
        assert not validate(schedule, memory_limit=top - 0.01, costs=costs)


def test_costs_are_checked() -> None:
    with pytest.raises(ValueError, match=r"host_bandwidth \(0.0\) must be > 0"):
        Costs(host_bandwidth=0.0)
    with pytest.raises(ValueError, match=r"kept_input \(-1.0\) must be >= 0"):
        Costs(kept_input=-1.0)
    with pytest.raises(ValueError, match=r"offloaded \(2.0\) must be <= activation \(1.0\)"):
        simulate(gpipe(1, num_microbatches=1), Costs(offloaded=2.0))


def test_costs_of_a_model_are_shared_out() -> None:
    model = ModelCosts(recompute=0.8, kept_input=0.1, offloaded=0.6, host_bandwidth=3.0)
    costs = model.of_stages(2, 4)
    assert costs.recompute == [0.4] * 4
    assert costs.kept_input == [0.1] * 4
    assert costs.offloaded == [0.3] * 4
    assert costs.host_bandwidth == 3.0


def test_text_has_the_steps_by_their_names() -> None:
    schedule = add_send_recv(
        add_offload(add_recompute(one_f_one_b(2, num_microbatches=3), [(0, 1)]), [(0, 2)])
    )
    csv = to_csv(schedule, as_is=True)
    assert "0RECOMPUTE1" in csv
    assert "0OFFLOAD2" in csv
    assert "0RELOAD2" in csv
    assert from_csv(csv) == schedule
    assert '["RECOMPUTE",0,1]' in to_json(schedule)


def test_pictures_show_what_is_run_again() -> None:
    schedule = add_recompute(one_f_one_b(2, num_microbatches=3), [(0, 1)])
    assert " R1 " in timetable(schedule)
    timeline = simulate(schedule).timeline
    assert "forward run again of stage 0, microbatch 1" in timeline_svg({"plan": timeline})
    names = [event["name"] for event in chrome_trace({"plan": timeline})["traceEvents"]]
    assert "0RECOMPUTE1" in names


def test_costs_of_a_run_price_what_ran_again() -> None:
    schedule = add_recompute(one_f_one_b(2, num_microbatches=3), [(0, 1)])
    timeline = simulate(schedule, Costs(recompute=0.75)).timeline
    found = measured_costs(timeline, num_stages=2, num_microbatches=3)
    assert found.recompute == [0.75, 1.0]
    plain = simulate(one_f_one_b(2, num_microbatches=3)).timeline
    assert measured_costs(plain, num_stages=2, num_microbatches=3).recompute is None
