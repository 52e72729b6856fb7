"""The closed forms: what they look like, how long they take and what they hold."""

import math
from collections.abc import Callable, Iterator

import pytest

from hp_schedule import (
    SCHEDULES,
    Costs,
    Schedule,
    dualpipe_v,
    forward_only,
    gpipe,
    grouped_interleaved,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    simulate,
    u_shape,
    v_half,
    v_min,
    validate,
    zbv,
    zero_bubble,
)
from hp_schedule.generators.zero_bubble import MaxInFlight

_ALL = [kind.generate for kind in SCHEDULES.values()]


def _grid() -> Iterator[tuple[int, int, int]]:
    for num_ranks in range(1, 7):
        for per_rank in range(1, 4):
            for num_microbatches in range(1, 2 * num_ranks + 2):
                yield num_ranks, per_rank, num_microbatches


def _text(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.steps]


def _measure(schedule: Schedule) -> tuple[float, float]:
    """Return makespan and peak activations in units of a rank's share of the model."""
    share = schedule.num_ranks / schedule.num_stages
    costs = Costs(forward=share, input_grad=share, weight_grad=share, activation=share)
    found = simulate(schedule, costs)
    return found.makespan, max(found.peak_activations)


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert _text(gpipe(2, num_microbatches=2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]


def test_looped_breadth_first_takes_all_microbatches_through_each_stage() -> None:
    assert _text(looped_bfs(2, num_microbatches=2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]


def test_1f1b_warms_up_by_the_number_of_ranks_behind() -> None:
    assert _text(one_f_one_b(3, num_microbatches=4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_interleaved_takes_a_round_through_each_local_stage() -> None:
    assert _text(interleaved_1f1b(2, num_microbatches=2)) == [
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]


def test_interleaved_with_one_stage_per_rank_is_1f1b() -> None:
    for num in (1, 3, 4, 9):
        expected = one_f_one_b(4, num_microbatches=num)
        assert interleaved_1f1b(4, num_microbatches=num, num_stages_per_rank=1) == expected


def test_zero_bubble_puts_off_as_many_weight_gradients_as_there_are_ranks_before() -> None:
    assert _text(zero_bubble(2, num_microbatches=3)) == [
        "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_interleaved_zero_bubble_with_one_stage_per_rank_is_zero_bubble() -> None:
    for num in (5, 9):
        expected = zero_bubble(4, num_microbatches=num)
        assert interleaved_zero_bubble(4, num_microbatches=num, num_stages_per_rank=1) == expected


def test_v_min_runs_each_step_right_behind_its_input() -> None:
    assert _text(v_min(2, num_microbatches=1)) == [
        "0F0 3F0 3I0 3W0 0I0 0W0",
        "1F0 2F0 2I0 1I0 2W0 1W0",
    ]


def test_zbv_of_two_ranks_reads_as_its_figure() -> None:
    assert _text(zbv(2, num_microbatches=3)) == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2",
    ]


def test_dualpipe_pairs_a_forward_of_one_arm_with_a_backward_of_the_other() -> None:
    assert _text(dualpipe_v(2, num_microbatches=4))[0] == (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B "
        "3B2 (3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3"
    )


def test_u_shape_begins_and_ends_on_rank_0() -> None:
    schedule = u_shape(2, num_microbatches=3, warm_up=2, turns=1)
    assert schedule.stage_to_rank == (0, 1, 0)
    assert _text(schedule) == [
        "0F0 0F1 2F0 2B0 0F2 2F1 2B1 0B0 2F2 2B2 0B1 0B2",
        "1F0 1F1 1B0 1F2 1B1 1B2",
    ]


def test_forward_only_has_no_backward() -> None:
    schedule = forward_only(2, num_microbatches=3, num_stages_per_rank=2)
    assert schedule.is_forward_only
    assert _text(schedule)[0] == "0F0 0F1 0F2 2F0 2F1 2F2"


def test_1f1b_holds_at_most_as_many_activations_as_ranks_are_left() -> None:
    for num_ranks, _, num in _grid():
        peak = simulate(one_f_one_b(num_ranks, num_microbatches=num)).peak_activations
        assert list(peak) == [min(num, num_ranks - rank) for rank in range(num_ranks)]


def test_1f1b_and_gpipe_reach_their_known_makespan() -> None:
    for num_ranks, _, num in _grid():
        for generate in (gpipe, one_f_one_b):
            found = simulate(generate(num_ranks, num_microbatches=num)).makespan
            assert found == 3 * (num + num_ranks - 1)


@pytest.mark.parametrize("generate", [interleaved_1f1b, looped_bfs])
def test_interleaving_divides_the_bubble_when_the_microbatches_fill_the_rounds(
    generate: Callable[..., Schedule],
) -> None:
    for num_ranks, per_rank, _ in _grid():
        for rounds in (1, 2, 3):
            num = rounds * num_ranks
            schedule = generate(num_ranks, num_microbatches=num, num_stages_per_rank=per_rank)
            assert simulate(schedule).makespan == 3 * (num * per_rank + num_ranks - 1)


def test_interleaved_zero_bubble_divides_the_bubble_at_1f1b_memory() -> None:
    for num_ranks, per_rank, _ in _grid():
        for num in range(num_ranks, 3 * num_ranks + 1):
            schedule = interleaved_zero_bubble(
                num_ranks, num_microbatches=num, num_stages_per_rank=per_rank
            )
            makespan, peak = _measure(schedule)
            assert peak <= num_ranks + 1e-9
            if per_rank == 1 or num % num_ranks == 0 or 2 * (num % num_ranks) >= num_ranks:
                assert makespan == pytest.approx(3 * num + (num_ranks - 1) / per_rank)


@pytest.mark.parametrize(("memory", "factor"), [("1p", 1), ("1.5p", 1.5), ("2p", 2)])
def test_zero_bubble_keeps_to_its_memory_and_leaves_only_the_ramp(
    memory: MaxInFlight, factor: float
) -> None:
    for num_ranks in range(1, 9):
        for num in range(1, 3 * num_ranks + 1):
            schedule = zero_bubble(num_ranks, num_microbatches=num, max_in_flight=memory)
            makespan, peak = _measure(schedule)
            assert peak <= min(num, factor * num_ranks)
            if num >= num_ranks:
                assert makespan == 3 * num + num_ranks - 1


def test_more_memory_makes_zero_bubble_tolerant_of_latency() -> None:
    costs = Costs(latency=0.2)
    makespans = [
        simulate(zero_bubble(8, num_microbatches=16, max_in_flight=limit), costs).makespan
        for limit in (8, 10, 12)
    ]
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[0] > makespans[-1] == pytest.approx(3 * 16 + 7 * 1.2)


def test_zbv_leaves_only_half_the_ramp_at_1f1b_memory() -> None:
    for num_ranks in range(1, 9):
        for num in range(1, 3 * num_ranks + 1):
            makespan, peak = _measure(zbv(num_ranks, num_microbatches=num))
            assert peak <= min(num, num_ranks)
            if num >= num_ranks:
                assert makespan == 3 * num + (num_ranks - 1) / 2


def test_v_half_holds_half_and_v_min_a_third() -> None:
    for num_ranks in range(1, 9):
        for num in range(1, 3 * num_ranks + 1):
            longest = zero_bubble(num_ranks, num_microbatches=num)
            times = [_measure(longest)[0]]
            for generate, limit in (
                (v_half, num_ranks // 2 + 1),
                (v_min, math.ceil((num_ranks + 2) / 3)),
            ):
                makespan, peak = _measure(generate(num_ranks, num_microbatches=num))
                assert peak <= min(num, limit + (num_ranks == 2))
                times.append(makespan)
            assert times[1] <= times[2]


def test_small_groups_save_memory() -> None:
    for num_ranks in range(2, 9):
        for per_rank in (2, 4):
            for group in range((num_ranks + 1) // 2, num_ranks + 1):
                schedule = grouped_interleaved(
                    num_ranks,
                    num_microbatches=3 * group,
                    num_stages_per_rank=per_rank,
                    group_size=group,
                )
                limit = group + (num_ranks - group) / per_rank
                assert _measure(schedule)[1] <= limit + 1e-9


def test_a_latency_makes_weight_gradients_cover_the_messages() -> None:
    costs = Costs(forward=0.5, input_grad=0.5, weight_grad=0.5, latency=0.2)
    for generate in (zbv, v_half):
        plain = simulate(generate(8, num_microbatches=16), costs).makespan
        adapted = simulate(generate(8, num_microbatches=16, latency=0.4), costs).makespan
        assert adapted < plain


def test_the_documented_u_shape_takes_its_known_time() -> None:
    """Makespans of MindSpeed-MM's order: edge steps 1, cloud steps 2, backwards twice as long."""
    known = {(2, 1): 153, (2, 4): 221, (3, 0): 154, (3, 2): 175, (3, 4): 227, (4, 1): 165}
    known |= {(4, 4): 233, (8, 4): 257}
    for (num_ranks, latency), makespan in known.items():
        step = [1, *[2] * (num_ranks - 1), 1]
        schedule = u_shape(num_ranks, num_microbatches=24)
        edges = {edge: latency if 0 in edge else 0 for edge in schedule.edges}
        costs = Costs(forward=step, input_grad=step, weight_grad=step, latency=edges)
        assert simulate(schedule, costs).makespan == makespan


@pytest.mark.parametrize("generate", _ALL)
@pytest.mark.parametrize(("num_ranks", "num"), [(0, 1), (1, 0), (-1, 3)])
def test_counts_below_one_are_refused(
    generate: Callable[..., Schedule], num_ranks: int, num: int
) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        generate(num_ranks, num_microbatches=num)


@pytest.mark.parametrize("generate", _ALL)
def test_one_rank_alone_is_a_schedule(generate: Callable[..., Schedule]) -> None:
    validate(generate(1, num_microbatches=3)).raise_if_failed()


@pytest.mark.parametrize(
    ("generate", "options", "message"),
    [
        (interleaved_1f1b, {"num_stages_per_rank": 0}, r"num_stages_per_rank \(0\) must be >= 1"),
        (zero_bubble, {"max_in_flight": 3}, r"max_in_flight \(3\) must be >= num_ranks \(4\)"),
        (zero_bubble, {"max_in_flight": "3p"}, r"max_in_flight \(3p\) must be a number or one of"),
        (grouped_interleaved, {"group_size": 1}, r"group_size \(1\) must be >= half of num_ranks"),
        (zbv, {"latency": -1.0}, r"latency \(-1.0\) must be >= 0"),
        (v_half, {"latency": math.nan}, r"latency \(nan\) must be >= 0"),
        (u_shape, {"warm_up": 0}, r"warm_up \(0\) must be >= 1"),
        (u_shape, {"turns": 9}, r"turns \(9\) must be >= 0 and <= warm_up \(5\)"),
        (u_shape, {"extra": -1}, r"extra \(-1\) must be >= 0"),
        (u_shape, {"warm_up": 1, "extra": 2}, "waits for a value that is never computed"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    generate: Callable[..., Schedule], options: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(4, num_microbatches=8, **options)
