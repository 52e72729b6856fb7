import json
import tomllib

import pytest

from hp_vtp import LayoutError, PipelineLayout, Replicated, Sharded, StageLayout


def problems_of(*stages: StageLayout, chain: tuple[int, ...], world_size: int = 0) -> list[str]:
    with pytest.raises(LayoutError) as caught:
        PipelineLayout(stages, chain, world_size)
    return list(caught.value.problems)


def test_a_straight_layout_numbers_ranks_stage_by_stage() -> None:
    layout = PipelineLayout.straight([1, 4, 2])
    assert [layout.ranks_of(stage) for stage in range(3)] == [(0,), (1, 2, 3, 4), (5, 6)]
    assert layout.world_size == 7
    assert layout.chain == (0, 1, 2)
    assert layout.tp_sizes == (1, 4, 2)


def test_a_u_shaped_layout_ends_on_its_first_stage() -> None:
    layout = PipelineLayout.u_shaped([1, 4, 4])
    assert layout.num_stages == 4
    assert layout.ranks_of(3) == layout.ranks_of(0) == (0,)
    assert layout.logical_stages_of(0) == (0, 3)
    assert layout.logical_stages_of(2) == (1,)


def test_a_loop_may_pass_the_first_stage_three_times() -> None:
    layout = PipelineLayout.from_ranks([[0], [1, 2]], chain=[0, 1, 0, 1, 0])
    assert layout.logical_stages_of(0) == (0, 2, 4)
    assert len(layout.edges) == 8


def test_ranks_need_not_be_contiguous() -> None:
    layout = PipelineLayout.from_ranks([[4, 0], [3, 1, 2]])
    assert layout.stage_of(4) == 0
    assert layout.tp_rank_of(4) == 0
    assert layout.tp_rank_of(0) == 1
    assert layout.leader_of(1) == 3
    assert layout.edge(0, 1).ranks == (0, 1, 2, 3, 4)


def test_replicas_are_numbered_domain_by_domain() -> None:
    layout = PipelineLayout.straight([1, 2], dp=2)
    assert layout.num_domains == 2
    assert layout.ranks_of(0, domain=1) == (3,)
    assert layout.ranks_of(1, domain=1) == (4, 5)
    assert layout.replica_of(5) == 1
    assert layout.domains_of(5) == (1,)


def test_one_first_stage_serves_the_domains_in_turn() -> None:
    layout = PipelineLayout.u_shaped([2, 1], dp=[2, 4])
    assert layout.num_domains == 4
    assert [layout.leader_of(0, domain=domain) for domain in range(4)] == [0, 3, 0, 3]
    assert layout.domains_of(0) == (0, 2)
    assert layout.domains_of(4) == (1, 3)
    assert layout.world_size == 8


def test_every_boundary_has_one_edge_per_direction_and_domain() -> None:
    layout = PipelineLayout.u_shaped([1, 2], dp=[1, 2])
    ways = [(edge.source, edge.destination, edge.domain) for edge in layout.edges]
    assert ways == [
        *[(0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1)],
        *[(1, 2, 0), (1, 2, 1), (2, 1, 0), (2, 1, 1)],
    ]
    assert layout.edge(1, 2).destination_ranks == (0,)
    assert layout.edge(1, 2).is_forward
    assert not layout.edge(1, 0).is_forward


def test_an_edge_carries_boundaries_and_lanes_of_both_ends() -> None:
    stages = (
        StageLayout(((0, 1),), boundary=Sharded(1), lanes=1),
        StageLayout(((2, 3, 4),)),
    )
    edge = PipelineLayout(stages, (0, 1)).edge(1, 0)
    assert (edge.source_boundary, edge.destination_boundary) == (Replicated(), Sharded(1))
    assert (edge.source_lanes, edge.destination_lanes) == (3, 1)
    assert str(edge) == "edge 1 -> 0 (gradients, domain 0)"


def test_only_the_first_rank_of_a_replica_leads() -> None:
    layout = PipelineLayout.straight([2, 3], dp=2)
    assert [rank for rank in range(10) if layout.is_leader(rank)] == [0, 2, 5, 7]
    assert not layout.is_leader(10)


def test_a_single_stage_has_no_edges() -> None:
    assert PipelineLayout.straight([2]).edges == ()


def test_all_problems_of_a_layout_come_at_once() -> None:
    problems = problems_of(
        StageLayout(((0, 1),), lanes=3),
        StageLayout(((1,), (2, 7)), boundary=Sharded(-1)),
        StageLayout(((3,), (4,), (5,))),
        chain=(0, 0, 1, 9),
        world_size=7,
    )
    assert problems == [
        "stage 0: lanes (3) must be within 1..tp_size (2)",
        "stage 1: replicas must have one size ([1, 2])",
        "stage 1: boundary dim (-1) must be at least 0",
        "stage 1: number of replicas (2) must divide the largest number of replicas (3)",
        "rank 1 must appear once, but is in stages [0, 1]",
        "rank (7) must be within 0..world_size - 1 (6)",
        "every rank must belong to a stage, but none has 6",
        "chain names stages [9], which must be within 0..2",
        "chain ([0, 0, 1, 9]) must visit every stage, but omits [2]",
        "chain positions 0 and 1 are both stage 0: merge them, since nothing is to be transferred",
    ]


def test_the_error_text_lists_the_problems_by_line() -> None:
    with pytest.raises(LayoutError, match=r"2 problem\(s\):\n- rank 0 must .*\n- chain"):
        PipelineLayout.from_ranks([[0], [0]], chain=[])


def test_empty_layouts_stages_and_replicas_are_problems() -> None:
    assert problems_of(chain=(0,)) == ["stages must not be empty"]
    assert any("at least one rank" in line for line in problems_of(StageLayout(()), chain=(0,)))
    assert any("at least one rank" in line for line in problems_of(StageLayout(((),)), chain=(0,)))


def test_ranks_that_no_stage_has_are_a_problem() -> None:
    stage = StageLayout(((0, 4),))
    assert problems_of(stage, chain=(0,), world_size=9) == [
        "every rank must belong to a stage, but none has 1..3, 5..8"
    ]


def test_neighbours_that_are_cut_along_different_dims_are_a_problem() -> None:
    first, second = StageLayout(((0,),), Sharded(0)), StageLayout(((1,),), Sharded(1))
    assert problems_of(first, second, chain=(0, 1)) == [
        "boundary dim of stage 0 (0) must equal that of its neighbour stage 1 (1)"
    ]


def test_bad_sizes_are_refused_before_ranks_are_numbered() -> None:
    with pytest.raises(LayoutError) as caught:
        PipelineLayout.straight([0, 2], dp=[1])
    assert caught.value.problems == (
        "len(dp) (1) must equal len(tp_sizes) (2)",
        "tp_sizes ([0, 2]) must all be at least 1",
    )
    with pytest.raises(LayoutError, match="stages must not be empty"):
        PipelineLayout.u_shaped([])


def test_model_dims_must_divide_by_every_stage() -> None:
    layout = PipelineLayout.straight([1, 3, 4])
    layout.require_divisible({"num_heads": 12})
    with pytest.raises(LayoutError) as caught:
        layout.require_divisible({"num_heads": 12, "ffn": 10})
    assert caught.value.problems == (
        "ffn (10) must be divisible by the TP size of stage 1 (3)",
        "ffn (10) must be divisible by the TP size of stage 2 (4)",
    )


def test_unknown_edges_and_ranks_are_refused() -> None:
    layout = PipelineLayout.straight([1, 2])
    for source, destination in ((0, 2), (1, 1), (-1, 0), (1, 2)):
        with pytest.raises(ValueError, match=r"must be neighbours within 0\.\.1"):
            layout.edge(source, destination)
    with pytest.raises(ValueError, match=r"domain \(1\) must be less than num_domains \(1\)"):
        layout.edge(0, 1, domain=1)
    with pytest.raises(ValueError, match=r"rank \(3\) must be less than world_size \(3\)"):
        layout.stage_of(3)


@pytest.mark.parametrize(
    "layout",
    [
        PipelineLayout.straight([1, 4, 4]),
        PipelineLayout.u_shaped([2, 1], dp=[2, 4]),
        PipelineLayout(
            (StageLayout(((2, 0),), Sharded(1), lanes=1), StageLayout(((1,),))), (0, 1, 0)
        ),
    ],
)
def test_a_layout_survives_json(layout: PipelineLayout) -> None:
    assert PipelineLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


def test_a_layout_reads_from_toml_in_both_forms() -> None:
    short = tomllib.loads('tp_sizes = [1, 2]\nshape = "u"\ndp = [1, 2]')
    assert PipelineLayout.from_dict(short) == PipelineLayout.u_shaped([1, 2], dp=[1, 2])
    long = tomllib.loads("""
        chain = [0, 1, 0]
        [[stages]]
        replicas = [[0]]
        [[stages]]
        replicas = [[1, 2]]
        boundary = { sharded = 1 }
        lanes = 1
    """)
    layout = PipelineLayout.from_dict(long)
    assert layout.stages[1] == StageLayout(((1, 2),), Sharded(1), lanes=1)
    assert layout.chain == (0, 1, 0)


def test_all_problems_of_a_dictionary_come_at_once() -> None:
    with pytest.raises(LayoutError) as caught:
        PipelineLayout.from_dict(
            {
                "stages": [{"ranks": [0]}, 3, {"replicas": [[0]], "lanes": "x", "boundary": "odd"}],
                "chain": "u",
                "world_size": True,
                "pp": 2,
            }
        )
    assert len(caught.value.problems) == 8
    assert "layout: unknown key 'pp', must be one of chain, stages, world_size" in (
        caught.value.problems
    )
    with pytest.raises(LayoutError, match=r"shape .*'v'.* must be 'straight' or 'u'"):
        PipelineLayout.from_dict({"tp_sizes": [1], "shape": "v"})
    with pytest.raises(LayoutError, match="stages must be a non-empty list"):
        PipelineLayout.from_dict({})
