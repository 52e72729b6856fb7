import itertools

import pytest

from hp_train.mesh import Layout

LAYOUTS = [
    Layout(pp, dp, ep)
    for pp, dp, ep in itertools.product((1, 2, 3), (1, 2, 4, 6), (1, 2, 3, 4))
    if dp % ep == 0
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_axis_parts_the_world(layout: Layout) -> None:
    for axis in (
        layout.pipelines(),
        layout.data_ranks(),
        layout.expert_ranks(),
        layout.expert_replica_ranks(),
    ):
        assert sorted(itertools.chain.from_iterable(axis)) == list(range(layout.world_size))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pipelines_and_data_ranks_cross_in_one_rank(layout: Layout) -> None:
    for pipeline, data in itertools.product(layout.pipelines(), layout.data_ranks()):
        (rank,) = set(pipeline) & set(data)
        assert layout.coordinates(rank) == (
            layout.data_ranks().index(data),
            layout.pipelines().index(pipeline),
        )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_expert_shards_and_replicas_cross_within_one_stage(layout: Layout) -> None:
    for shards, replicas in itertools.product(layout.expert_ranks(), layout.expert_replica_ranks()):
        same_stage = layout.coordinates(shards[0])[0] == layout.coordinates(replicas[0])[0]
        assert len(set(shards) & set(replicas)) == same_stage


def test_the_quickstart_mesh_is_what_its_page_says() -> None:
    layout = Layout(pp=2, dp=2, ep=2)
    assert layout.pipelines() == [[0, 2], [1, 3]]
    assert layout.expert_ranks() == [[0, 1], [2, 3]]
    assert str(layout) == "pp 2 x dp 2 (ep 2)"
