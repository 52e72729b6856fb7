"""Steps around sharded parameters."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_schedule import (
    MetaStep,
    MetaStepType,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_send_recv,
    gpipe,
    interleaved_1f1b,
    validate,
)

_FSDP = {
    MetaStepType.FSDP_UNSHARD,
    MetaStepType.FSDP_RESHARD,
    MetaStepType.FSDP_REDUCE_GRAD,
}


def _one_rank(row: str) -> Schedule:
    steps = [MetaStep.from_str(text) for text in row.split()]
    leaves = [leaf for step in steps for leaf in step.leaves()]
    num_stages = 1 + max(leaf.stage_index or 0 for leaf in leaves)
    return Schedule.from_steps(
        [steps],
        stage_to_rank=[0] * num_stages,
        num_microbatches=1 + max(leaf.microbatch_index or 0 for leaf in leaves),
    )


def _text(schedule: Schedule, rank: int = 0) -> str:
    return " ".join(map(str, schedule.steps[rank]))


def test_a_stage_is_gathered_before_its_first_use_and_freed_after_its_last() -> None:
    found = add_fsdp_unshard_reshard(_one_rank("0F0 0B0"))
    assert _text(found) == "0UNSHARD 0F0 0B0 0RESHARD"


def test_the_next_stage_is_gathered_ahead_of_its_use() -> None:
    found = add_fsdp_unshard_reshard(_one_rank("0F0 1F0 2F0"), max_active_stages=2)
    assert _text(found) == "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 1RESHARD 2F0 2RESHARD"


def test_without_prefetch_a_stage_is_gathered_when_it_is_used() -> None:
    found = add_fsdp_unshard_reshard(_one_rank("0F0 1F0 1B0 0B0"), prefetch=0)
    assert _text(found) == "0UNSHARD 0F0 1UNSHARD 1F0 1B0 1RESHARD 0B0 0RESHARD"


def test_room_is_made_by_the_stage_that_is_used_last() -> None:
    row = "0F0 1F0 2F0 0F1 1F1"
    found = add_fsdp_unshard_reshard(_one_rank(row), max_active_stages=2, prefetch=0)
    assert _text(found) == (
        "0UNSHARD 0F0 1UNSHARD 1F0 1RESHARD 2UNSHARD 2F0 2RESHARD "
        "0F1 0RESHARD 1UNSHARD 1F1 1RESHARD"
    )


def test_both_stages_of_an_overlap_are_gathered() -> None:
    found = add_fsdp_unshard_reshard(
        _one_rank("0F0 (1F0;0B0)OVERLAP_F_B 1B0"), max_active_stages=2, prefetch=0
    )
    assert _text(found) == ("0UNSHARD 0F0 1UNSHARD (1F0;0B0)OVERLAP_F_B 0RESHARD 1B0 1RESHARD")


def test_an_overlap_of_two_stages_needs_room_for_both() -> None:
    schedule = _one_rank("0F0 (1F0;0B0)OVERLAP_F_B 1B0")
    with pytest.raises(ValueError, match=r"max_active_stages \(1\) must be >= 2"):
        add_fsdp_unshard_reshard(schedule, max_active_stages=1)


def test_stages_that_are_not_sharded_are_left_alone() -> None:
    found = add_fsdp_unshard_reshard(_one_rank("0F0 1F0 1B0 0B0"), stages=[1])
    assert _text(add_fsdp_reduce_grad(found, stages=[1])) == (
        "1UNSHARD 0F0 1F0 1B0 1REDUCE_GRAD 1RESHARD 0B0"
    )


def test_gradients_are_reduced_after_the_last_weight_gradient_and_its_message() -> None:
    schedule = add_send_recv(gpipe(2, num_microbatches=2))
    assert _text(add_fsdp_reduce_grad(schedule), 1).endswith("1B1 1SEND_B1 1REDUCE_GRAD")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("0F0 0F1 0B1 0B0", "0F0 0F1 0B1 0B0 0REDUCE_GRAD"),
        ("0F0 0I0 0F1 0I1 0W0 0W1", "0F0 0I0 0F1 0I1 0W0 0W1 0REDUCE_GRAD"),
        ("0F0 0F1 0F2 0B0 0I1 0W1 0B2", "0F0 0F1 0F2 0B0 0I1 0W1 0B2 0REDUCE_GRAD"),
        ("0F0 (0B0;0F1)OVERLAP_B_F 0B1", "0F0 (0B0;0F1)OVERLAP_B_F 0B1 0REDUCE_GRAD"),
        ("0F0 1F0 1F1 (0F1;1B0)OVERLAP_F_B", "0F0 1F0 1F1 (0F1;1B0)OVERLAP_F_B 1REDUCE_GRAD"),
    ],
)
def test_the_last_weight_gradient_is_counted_not_numbered(row: str, expected: str) -> None:
    assert _text(add_fsdp_reduce_grad(_one_rank(row))) == expected


@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 5),
)
def test_any_window_gives_a_valid_schedule_within_its_cap(
    num_ranks: int, num_microbatches: int, per_rank: int, cap: int, prefetch: int
) -> None:
    schedule = interleaved_1f1b(
        num_ranks, num_microbatches=num_microbatches, num_stages_per_rank=per_rank
    )
    prefetch = min(prefetch, cap - 1)
    found = add_fsdp_reduce_grad(
        add_fsdp_unshard_reshard(schedule, max_active_stages=cap, prefetch=prefetch)
    )
    for each in (found, add_send_recv(found)):
        validate(each, max_active_stages=cap).raise_if_failed()
    compute = [[step for step in row if step and step.type not in _FSDP] for row in found.steps]
    assert compute == [list(row) for row in schedule.steps]
    reduced = Counter(
        step.stage_index
        for row in found.steps
        for step in row
        if step and step.type is MetaStepType.FSDP_REDUCE_GRAD
    )
    assert reduced == dict.fromkeys(range(schedule.num_stages), 1)


def test_a_larger_cap_never_gathers_more_often() -> None:
    schedule = interleaved_1f1b(2, num_microbatches=8, num_stages_per_rank=5)
    counts = [
        _text(add_fsdp_unshard_reshard(schedule, max_active_stages=cap, prefetch=0)).count("UNSH")
        for cap in range(1, 7)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] == 5


@pytest.mark.parametrize(
    ("cap", "prefetch", "message"),
    [
        (0, None, "max_active_stages (0) must be >= 1"),
        (3, 3, "prefetch (3) must be >= 0 and < max_active_stages (3)"),
        (3, -1, "prefetch (-1) must be >= 0 and < max_active_stages (3)"),
    ],
)
def test_numbers_out_of_range_are_refused(cap: int, prefetch: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        add_fsdp_unshard_reshard(_one_rank("0F0 0B0"), max_active_stages=cap, prefetch=prefetch)


def test_steps_are_not_added_twice() -> None:
    schedule = add_fsdp_reduce_grad(add_fsdp_unshard_reshard(_one_rank("0F0 0B0")))
    with pytest.raises(ValueError, match="no UNSHARD"):
        add_fsdp_unshard_reshard(schedule)
    with pytest.raises(ValueError, match="no REDUCE_GRAD"):
        add_fsdp_reduce_grad(schedule)
