import itertools
import math

import pytest

from hp_train.layout import GRIDS, Axis, Layout

LAYOUTS = [
    layout
    for sizes in itertools.product((1, 2), (1, 2, 3), (1, 2, 4), (1, 2), (1, 2), (1, 2, 4), (1, 2))
    for layout in [
        Layout(
            **dict(
                zip(("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp"), sizes, strict=True)
            )
        )
    ]
    if layout.stage_size % (layout.ep * layout.etp) == 0
    and (
        layout.fsdp * layout.tp % (layout.ep * layout.etp) == 0
        or layout.ep * layout.etp % (layout.fsdp * layout.tp) == 0
    )
]
AXES: list[tuple[Axis, ...]] = [
    axes for grid in GRIDS for n in range(1, 6) for axes in itertools.combinations(grid, n)
]


def test_both_grids_fill_the_world() -> None:
    assert len(LAYOUTS) > 300
    for layout in LAYOUTS:
        for grid in GRIDS:
            assert layout.size(*grid) == layout.world_size


def test_the_groups_of_any_axes_part_the_world_into_equal_runs() -> None:
    for layout in LAYOUTS[::7]:
        for axes in AXES:
            groups = layout.ranks(*axes)
            assert sorted(itertools.chain.from_iterable(groups)) == list(range(layout.world_size))
            for group in groups:
                assert group == sorted(group)
                assert [layout.index(rank, *axes) for rank in group] == list(range(len(group)))


def test_complementary_axes_cross_in_one_rank() -> None:
    for layout in LAYOUTS[::7]:
        for grid in GRIDS:
            for n in range(1, 5):
                for axes in itertools.combinations(grid, n):
                    others = tuple(axis for axis in grid if axis not in axes)
                    for mine, theirs in itertools.product(
                        layout.ranks(*axes), layout.ranks(*others)
                    ):
                        assert len(set(mine) & set(theirs)) == 1


def test_ranks_that_share_out_experts_are_neighbours_of_one_stage() -> None:
    for layout in LAYOUTS:
        for ranks in layout.ranks("ep", "etp"):
            assert ranks == list(range(ranks[0], ranks[0] + layout.ep * layout.etp))
            assert len({layout.index(rank, "pp") for rank in ranks}) == 1


def test_experts_are_sharded_inside_a_replica_and_replicated_across() -> None:
    for layout in LAYOUTS:
        inside = layout.fsdp * layout.tp
        assert layout.expert_shard == max(1, inside // (layout.ep * layout.etp))
        if layout.expert_shard > 1:
            for ranks in layout.ranks("expert_shard"):
                assert len({layout.index(rank, "dp_replicate") for rank in ranks}) == 1


def test_the_quickstart_mesh_is_what_its_page_says() -> None:
    layout = Layout(pp=2, dp_replicate=2, ep=2)
    assert layout.pipelines() == [[0, 2], [1, 3]]
    assert layout.ranks("ep") == [[0, 1], [2, 3]]
    assert str(layout) == "pp 2 x dp_replicate 2 (ep 2)"
    assert str(Layout()) == "one process"


def test_axes_of_two_grids_make_no_group() -> None:
    layout = Layout(dp_shard=4, ep=2)
    assert layout.dp == math.prod((layout.expert_shard, layout.ep))
    with pytest.raises(ValueError, match="must be of one grid"):
        layout.ranks("dp_shard", "ep")
