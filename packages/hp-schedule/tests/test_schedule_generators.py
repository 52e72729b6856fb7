"""The closed forms: what they look like, and that all of them are valid."""

from collections.abc import Callable, Iterator

import pytest

from hp_schedule import (
    Schedule,
    add_send_recv,
    forward_only,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    simulate,
    validate,
)


def _grid() -> Iterator[tuple[int, int, int]]:
    for num_ranks in range(1, 7):
        for per_rank in range(1, 4):
            for num_microbatches in range(1, 2 * num_ranks + 2):
                yield num_ranks, per_rank, num_microbatches


def _all_schedules() -> Iterator[Schedule]:
    for num_ranks, per_rank, num in _grid():
        if per_rank == 1:
            yield gpipe(num_ranks, num_microbatches=num)
            yield one_f_one_b(num_ranks, num_microbatches=num)
        counts = {"num_microbatches": num, "num_stages_per_rank": per_rank}
        yield interleaved_1f1b(num_ranks, **counts)
        yield forward_only(num_ranks, **counts)


def _text(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.steps]


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert _text(gpipe(2, num_microbatches=2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]


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


def test_forward_only_has_no_backward() -> None:
    schedule = forward_only(2, num_microbatches=3, num_stages_per_rank=2)
    assert schedule.is_forward_only
    assert _text(schedule)[0] == "0F0 0F1 0F2 2F0 2F1 2F2"


def test_every_generator_is_valid_for_every_count() -> None:
    for schedule in _all_schedules():
        validate(schedule).raise_if_failed()
        validate(add_send_recv(schedule)).raise_if_failed()


def test_1f1b_holds_at_most_as_many_activations_as_ranks_are_left() -> None:
    for num_ranks, _, num in _grid():
        peak = simulate(one_f_one_b(num_ranks, num_microbatches=num)).peak_activations
        assert list(peak) == [min(num, num_ranks - rank) for rank in range(num_ranks)]


def test_1f1b_and_gpipe_reach_their_known_makespan() -> None:
    for num_ranks, _, num in _grid():
        for generate in (gpipe, one_f_one_b):
            found = simulate(generate(num_ranks, num_microbatches=num)).makespan
            assert found == 3 * (num + num_ranks - 1)


def test_interleaving_divides_the_bubble_when_the_microbatches_fill_the_rounds() -> None:
    for num_ranks, per_rank, _ in _grid():
        for rounds in (1, 2, 3):
            num = rounds * num_ranks
            schedule = interleaved_1f1b(
                num_ranks, num_microbatches=num, num_stages_per_rank=per_rank
            )
            assert simulate(schedule).makespan == 3 * (num * per_rank + num_ranks - 1)


@pytest.mark.parametrize("generate", [gpipe, one_f_one_b, interleaved_1f1b, forward_only])
@pytest.mark.parametrize(("num_ranks", "num"), [(0, 1), (1, 0), (-1, 3)])
def test_counts_below_one_are_refused(
    generate: Callable[..., Schedule], num_ranks: int, num: int
) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        generate(num_ranks, num_microbatches=num)


def test_stages_per_rank_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_stages_per_rank \(0\) must be >= 1"):
        interleaved_1f1b(2, num_microbatches=2, num_stages_per_rank=0)
