import itertools
import math
from typing import cast

import pytest
from torch.distributed import ProcessGroup

from hp_trainer.config import MeshConfig
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.ranks import GRIDS, GROUPS, Axis, Layout, partitions

EVEN = [
    MeshConfig(pp=pp, dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, ep=ep, etp=etp)
    for pp, replicate, shard, cp, tp, ep, etp in itertools.product(
        (1, 2), (1, 2, 3), (1, 2, 4), (1, 2), (1, 2), (1, 2, 4), (1, 2)
    )
]
UNEVEN = [
    MeshConfig(pp=len(tp), dp_replicate=replicate, dp_shard=shard, stage_tp=tp, stage_ep=ep)
    for replicate, shard, tp, ep in itertools.product(
        (1, 2), (1, 2), ((1, 2), (2, 1, 4), (1, 3)), ((), (1, 2), (1, 1, 2), (1, 3))
    )
    if len(ep) in (0, len(tp))
]
LAYOUTS = [
    layout
    for layout in map(Layout.of, EVEN + UNEVEN)
    if all(
        stage.num_ranks % (stage.ep * stage.etp) == 0
        and (
            stage.fsdp * stage.tp % (stage.ep * stage.etp) == 0
            or stage.ep * stage.etp % (stage.fsdp * stage.tp) == 0
        )
        for stage in layout.stages
    )
]
AXES: list[tuple[Axis, ...]] = [
    axes for grid in GRIDS for n in range(1, 5) for axes in itertools.combinations(grid, n)
]


def test_stages_follow_each_other_and_fill_the_world() -> None:
    assert len(LAYOUTS) > 300
    assert sum(not layout.is_even for layout in LAYOUTS) > 20
    for layout in LAYOUTS:
        members = itertools.chain.from_iterable(stage.members for stage in layout.stages)
        assert list(members) == list(range(layout.world_size))
        for rank in range(layout.world_size):
            assert rank in layout.stages[layout.pp_index(rank)].members


def test_each_pipeline_side_by_side_has_the_ranks_of_tensor_parallelism_of_every_stage() -> None:
    nobody = cast("ProcessGroup", None)  # a place is worked out without messages
    with_cp = [Layout.of(MeshConfig(pp=2, dp_shard=2, cp=2, stage_tp=(1, 2)))]
    for layout in LAYOUTS[::7] + with_cp:
        for stage in layout.stages:
            found = [Mesh(layout, rank, {}, nobody, "cpu").domain for rank in stage.members]
            domains = range(stage.dp * stage.cp)
            assert sorted(found) == [domain for domain in domains for _ in range(stage.tp)]


def test_both_grids_fill_a_stage() -> None:
    for layout in LAYOUTS:
        for stage, grid in itertools.product(layout.stages, GRIDS):
            assert stage.size(*grid) == stage.num_ranks


def test_the_groups_of_any_axes_part_the_world_into_runs_that_stay_in_a_stage() -> None:
    for layout in LAYOUTS[::7]:
        for axes in AXES:
            groups = layout.ranks(*axes)
            assert sorted(itertools.chain.from_iterable(groups)) == list(range(layout.world_size))
            for group in groups:
                assert group == sorted(group)
                (stage,) = {layout.pp_index(rank) for rank in group}
                places = [layout.stages[stage].index(rank, *axes) for rank in group]
                assert places == list(range(len(group)))


def test_complementary_axes_cross_in_one_rank() -> None:
    for layout in LAYOUTS[::7]:
        for stage, grid in itertools.product(layout.stages, GRIDS):
            for n in range(1, 4):
                for axes in itertools.combinations(grid, n):
                    others = tuple(axis for axis in grid if axis not in axes)
                    for mine, theirs in itertools.product(stage.ranks(*axes), stage.ranks(*others)):
                        assert len(set(mine) & set(theirs)) == 1


def test_ranks_that_share_out_experts_are_neighbours_of_one_stage() -> None:
    for layout in LAYOUTS:
        for stage in layout.stages:
            for ranks in stage.ranks("ep", "etp"):
                assert ranks == list(range(ranks[0], ranks[0] + stage.ep * stage.etp))


def test_experts_are_sharded_inside_a_replica_and_replicated_across() -> None:
    for stage in itertools.chain.from_iterable(layout.stages for layout in LAYOUTS):
        inside = stage.fsdp * stage.tp
        assert stage.expert_shard == max(1, inside // (stage.ep * stage.etp))
        if stage.expert_shard > 1:
            for ranks in stage.ranks("expert_shard"):
                assert len({stage.index(rank, "dp_replicate") for rank in ranks}) == 1


def test_the_quickstart_mesh_is_what_its_page_says() -> None:
    layout = Layout.of(MeshConfig(pp=2, dp_replicate=2, ep=2))
    assert layout.pipelines() == [[0, 2], [1, 3]]
    assert layout.ranks("ep") == [[0, 1], [2, 3]]
    assert str(layout) == "pp 2 x dp_replicate 2 (ep 2)"
    assert str(Layout()) == "one process"


def test_stages_of_different_sizes_have_no_rank_to_rank_pipelines() -> None:
    layout = Layout.of(MeshConfig(pp=2, dp_shard=2, stage_tp=(1, 2), stage_ep=(1, 4)))
    assert layout.ranks("tp") == [[0], [1], [2, 3], [4, 5]]
    assert layout.ranks("ep") == [[0], [1], [2, 3, 4, 5]]
    assert str(layout) == "pp 2 x dp_shard 2 x tp [1, 2] (ep [1, 4])"
    assert not layout.is_even
    with pytest.raises(ValueError, match="must have the same number of ranks"):
        layout.pipelines()


def test_axes_of_two_grids_make_no_group() -> None:
    layout = Layout.of(MeshConfig(dp_shard=4, ep=2))
    assert layout.dp == math.prod((layout.stages[0].expert_shard, layout.stages[0].ep))
    with pytest.raises(ValueError, match="must be of one grid"):
        layout.ranks("dp_shard", "ep")


def test_every_rank_is_in_one_group_of_each_kind() -> None:
    for layout in LAYOUTS:
        everyone = list(range(layout.world_size))
        for name, lists in partitions(layout).items():
            assert sorted(itertools.chain.from_iterable(lists)) == everyone, name
        missing = {name for name in GROUPS if name not in partitions(layout)}
        assert missing == {
            name for name, axes in GROUPS.items() if all(s.size(*axes) == 1 for s in layout.stages)
        }
        assert ("alone" in partitions(layout)) == bool(missing)
