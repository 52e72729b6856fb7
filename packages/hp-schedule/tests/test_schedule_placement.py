"""Where stages live."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hp_schedule import generate_rank_to_stage_mapping, generate_stage_to_rank_mapping
from hp_schedule.schedule import PlacementStyle


def test_loop_deals_stages_out_in_turn() -> None:
    assert list(generate_stage_to_rank_mapping(3, 6).values()) == [0, 1, 2, 0, 1, 2]


def test_v_turns_round_at_each_end() -> None:
    mapping = generate_stage_to_rank_mapping(3, 9, "v")
    assert list(mapping.values()) == [0, 1, 2, 2, 1, 0, 0, 1, 2]


def test_u_ends_where_it_began() -> None:
    assert list(generate_stage_to_rank_mapping(3, 4, "u").values()) == [0, 1, 2, 0]
    assert list(generate_stage_to_rank_mapping(3, 7, "u").values()) == [0, 1, 2, 0, 1, 2, 0]
    assert generate_rank_to_stage_mapping(3, 4, "u") == {0: [0, 3], 1: [1], 2: [2]}


def test_any_chain_is_given_by_the_rank_of_each_stage() -> None:
    mapping = generate_stage_to_rank_mapping(3, 5, [2, 0, 1, 1, 2])
    assert list(mapping.values()) == [2, 0, 1, 1, 2]
    assert generate_rank_to_stage_mapping(3, 5, [2, 0, 1, 1, 2]) == {0: [1], 1: [2, 3], 2: [0, 4]}


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from(["loop", "v"]))
def test_the_two_mappings_are_inverse(num_ranks: int, per_rank: int, style: PlacementStyle) -> None:
    to_rank = generate_stage_to_rank_mapping(num_ranks, num_ranks * per_rank, style)
    to_stages = generate_rank_to_stage_mapping(num_ranks, num_ranks * per_rank, style)
    assert sorted(to_stages) == list(range(num_ranks))
    assert all(len(stages) == per_rank for stages in to_stages.values())
    assert {stage: rank for rank, stages in to_stages.items() for stage in stages} == to_rank


@pytest.mark.parametrize(
    ("num_ranks", "num_stages", "style", "message"),
    [
        (0, 1, "loop", r"num_ranks \(0\) must be >= 1"),
        (3, 2, "loop", r"num_stages \(2\) must be >= num_ranks \(3\)"),
        (2, 3, "v", r"num_stages \(3\) must be a multiple of num_ranks \(2\)"),
        (2, 4, "u", r"num_stages \(4\) must be one more than a multiple of num_ranks \(2\)"),
        (2, 4, "w", r"style \(w\) must be loop or v or u, or a rank for each stage"),
        (2, 2, [0], r"len\(style\) \(1\) must equal num_stages \(2\)"),
        (2, 2, [0, 2], r"rank \(2\) of stage 1 must be >= 0 and < num_ranks \(2\)"),
        (2, 2, [1, 1], r"rank \(0\) must have a stage"),
    ],
)
def test_counts_that_do_not_fit_are_refused(
    num_ranks: int, num_stages: int, style: PlacementStyle, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate_stage_to_rank_mapping(num_ranks, num_stages, style)
