"""Rows whose columns are moments."""

import pytest

from hp_schedule import (
    DeadlockError,
    MetaStep,
    Schedule,
    add_fsdp_reduce_grad,
    auto_align_and_add_send_recv,
    drop_communication,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
    validate,
)


def _schedule(*rows: str, stage_to_rank: list[int], num_microbatches: int) -> Schedule:
    return Schedule.from_steps(
        [[MetaStep.from_str(text) for text in row.split()] for row in rows],
        stage_to_rank=stage_to_rank,
        num_microbatches=num_microbatches,
    )


def _cells(schedule: Schedule) -> list[str]:
    rows = drop_communication(schedule).steps
    return [" ".join("." if step is None else str(step) for step in row) for row in rows]


def test_a_step_stands_in_the_first_column_after_its_inputs() -> None:
    assert _cells(auto_align_and_add_send_recv(gpipe(2, num_microbatches=2))) == [
        "0F0 0F1 . . 0B0 0B1",
        ". 1F0 1F1 1B0 1B1",
    ]


def test_aligned_rows_without_their_empty_cells_are_the_rows_given() -> None:
    for schedule in (one_f_one_b(4, num_microbatches=6), interleaved_1f1b(3, num_microbatches=2)):
        found = auto_align_and_add_send_recv(schedule)
        validate(found, communication=True).raise_if_failed()
        rows = [[step for step in row if step] for row in drop_communication(found).steps]
        assert rows == [list(row) for row in schedule.steps]
        # Aligning what is aligned already changes nothing.
        assert auto_align_and_add_send_recv(drop_communication(found)) == found


def test_an_overlap_takes_two_columns_and_both_its_inputs_stand_before_it() -> None:
    schedule = _schedule(
        "0F0 0F1 0B0 0B1",
        "1F0 (1B0;1F1)OVERLAP_B_F 1B1",
        stage_to_rank=[0, 1],
        num_microbatches=2,
    )
    found = auto_align_and_add_send_recv(schedule)
    validate(found, communication=True).raise_if_failed()
    assert _cells(found) == ["0F0 0F1 . . 0B0 0B1", ". 1F0 (1B0;1F1)OVERLAP_B_F . 1B1"]


@pytest.mark.parametrize("rows", [("0B0 0F0", "1F0 1B0"), ("0F0 0B0", "1B0 1F0"), ("0F0 0B0", "")])
def test_rows_that_cannot_run_are_an_error(rows: tuple[str, str]) -> None:
    with pytest.raises(DeadlockError, match="waits for a value that is never computed"):
        auto_align_and_add_send_recv(_schedule(*rows, stage_to_rank=[0, 1], num_microbatches=1))


def test_only_compute_steps_are_aligned() -> None:
    with pytest.raises(ValueError, match="compute steps only, it has REDUCE_GRAD steps"):
        auto_align_and_add_send_recv(add_fsdp_reduce_grad(gpipe(2, num_microbatches=1)))
