from itertools import pairwise
from math import gcd, lcm
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hp_vtp import (
    Algorithm,
    Links,
    Placement,
    Replicated,
    Sharded,
    StepKind,
    TransferPlan,
    bound_seconds,
    explain,
    plan_transfer,
    predicted_seconds,
)
from hp_vtp.plan import cut_traffic, link_of
from hp_vtp.topology.stages import cut, cut_by_lane

ALL_SIZES = [(a, b) for a in range(1, 9) for b in range(1, 9)]
ALGORITHMS: tuple[Algorithm, ...] = ("interval", "leader", "direct", "auto")
PLACEMENTS: tuple[Placement, ...] = (Replicated(), Sharded(0))
sizes = st.integers(1, 8)


def simulate(plan: TransferPlan) -> list[dict[int, int]]:
    """Move the numbers 0..extent - 1 as the plan says; return what each destination rank has."""
    n = plan.extent
    source = [
        {unit: unit for unit in range(*plan.source_range(i))} for i in range(plan.num_sources)
    ]
    destination: list[dict[int, int]] = [{} for _ in range(plan.num_destinations)]
    for step in plan.steps:
        senders = destination if step.kind == StepKind.SPREAD else source
        receivers = source if step.kind == StepKind.COLLECT else destination
        before = [dict(held) for held in senders]  # a step uses nothing that it brings itself
        for move in step.moves:
            assert 0 <= move.start < move.stop <= n
            room = plan.workspace_range(move.receiver, at_destination=step.kind != StepKind.COLLECT)
            for unit in range(move.start, move.stop):
                assert unit not in receivers[move.receiver], "delivered twice"
                assert room[0] <= unit < room[1], "no room"
                receivers[move.receiver][unit] = before[move.sender][unit]
    return destination


def check_delivery(plan: TransferPlan) -> None:
    for index, held in enumerate(simulate(plan)):
        wanted = range(*plan.destination_range(index))
        assert {unit: held[unit] for unit in wanted} == {unit: unit for unit in wanted}
        if plan.algorithm != "leader":  # whose first rank also holds what it hands on
            assert len(held) == len(wanted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("source", PLACEMENTS)
@pytest.mark.parametrize("destination", PLACEMENTS)
def test_every_element_arrives_once_for_all_sizes(
    algorithm: Algorithm, source: Placement, destination: Placement
) -> None:
    for a, b in ALL_SIZES:
        for n in (0, 1, 7, 41):
            plan = plan_transfer(
                (n,),
                num_sources=a,
                num_destinations=b,
                source=source,
                destination=destination,
                algorithm=algorithm,
            )
            check_delivery(plan)


@settings(deadline=None, max_examples=100)
@given(a=sizes, b=sizes, n=st.integers(0, 300), chunks=sizes, source=st.sampled_from(PLACEMENTS))
def test_chunks_bring_the_same_over_the_same_links(
    a: int, b: int, n: int, chunks: int, source: Placement
) -> None:
    whole, cut_up = (
        plan_transfer(
            (n,),
            num_sources=a,
            num_destinations=b,
            source=source,
            algorithm="interval",
            chunks=number,
        )
        for number in (1, chunks)
    )
    check_delivery(cut_up)
    assert cut_traffic(cut_up) == cut_traffic(whole)
    assert cut_up.num_messages <= chunks * (a + b)


def test_large_tensors_are_spread_under_the_hop_of_later_chunks() -> None:
    links = Links(cross_bandwidth=1e9, cross_latency=1e-5, local_bandwidth=2e9, local_latency=1e-5)
    plan = plan_transfer((64 * 2**20,), num_sources=2, num_destinations=4, links=links)
    whole = plan_transfer(
        (64 * 2**20,), num_sources=2, num_destinations=4, algorithm="interval", links=links
    )
    assert plan.chunks > 4
    assert predicted_seconds(plan, links) < 1.1 * bound_seconds(plan, links)
    assert predicted_seconds(whole, links) > 1.5 * bound_seconds(plan, links)
    assert f"interval in {plan.chunks} chunks" in explain(plan, links)
    small = plan_transfer((2**16,), num_sources=2, num_destinations=4, links=links)
    assert small.chunks == 1


@settings(deadline=None, max_examples=150)
@given(data=st.data(), a=sizes, b=sizes, n=st.integers(0, 200))
def test_every_element_arrives_once_with_lanes(data: st.DataObject, a: int, b: int, n: int) -> None:
    plan = plan_transfer(
        (n,),
        num_sources=a,
        num_destinations=b,
        source=data.draw(st.sampled_from(PLACEMENTS)),
        destination=data.draw(st.sampled_from(PLACEMENTS)),
        source_lanes=data.draw(st.none() | st.integers(1, a)),
        destination_lanes=data.draw(st.none() | st.integers(1, b)),
        algorithm=data.draw(st.sampled_from(ALGORITHMS)),
    )
    check_delivery(plan)


@settings(deadline=None, max_examples=200)
@given(a=sizes, b=sizes, n=st.integers(0, 10**9), source=st.booleans(), destination=st.booleans())
@example(a=8, b=7, n=55, source=True, destination=False)
def test_interval_plan_meets_the_bound(
    a: int, b: int, n: int, source: bool, destination: bool
) -> None:
    plan = plan_transfer(
        (n,),
        num_sources=a,
        num_destinations=b,
        itemsize=2,
        source=source,
        destination=destination,
        algorithm="interval",
    )
    traffic = cut_traffic(plan)
    assert sum(traffic.sent) == sum(traffic.received) == 2 * n
    assert max(*traffic.sent, *traffic.received) <= plan.bound_bytes == 2 * -(-n // min(a, b))
    assert plan.num_messages <= a + b - gcd(a, b)
    if n >= lcm(a, b):
        assert plan.num_messages == a + b - gcd(a, b)


@settings(deadline=None, max_examples=200)
@given(a=sizes, b=sizes, n=st.integers(0, 10**6), lanes=sizes)
def test_interval_plan_meets_the_bound_of_shared_links(a: int, b: int, n: int, lanes: int) -> None:
    plan = plan_transfer(
        (n,),
        num_sources=a,
        num_destinations=b,
        source_lanes=min(a, lanes),
        destination_lanes=min(b, lanes),
        algorithm="interval",
    )
    traffic = cut_traffic(plan)
    assert max(*traffic.sent, *traffic.received) <= plan.bound_bytes


@given(length=st.integers(0, 10**6), parts=st.integers(1, 12), lanes=st.integers(1, 12))
def test_ranks_that_share_a_lane_carry_its_part(length: int, parts: int, lanes: int) -> None:
    ends = cut_by_lane(length, parts, lanes)
    assert ends[0] == 0
    assert ends[-1] == length
    assert len(ends) == parts + 1
    if lanes < parts:
        load = [0] * lanes
        for rank in range(parts):
            assert ends[rank] <= ends[rank + 1]
            load[link_of(rank, parts, lanes)] += ends[rank + 1] - ends[rank]
        assert max(load) - min(load) <= 1


@given(length=st.integers(0, 10**6), parts=st.integers(1, 12))
def test_slices_differ_by_at_most_one(length: int, parts: int) -> None:
    ends = cut(length, parts)
    lengths = [stop - start for start, stop in pairwise(ends)]
    assert sum(lengths) == length
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(("a", "b", "messages"), [(2, 4, 4), (4, 8, 8), (3, 8, 10), (2, 3, 4)])
def test_interval_plan_sends_few_messages(a: int, b: int, messages: int) -> None:
    plan = plan_transfer((840,), num_sources=a, num_destinations=b, algorithm="interval")
    assert plan.num_messages == messages


@pytest.mark.parametrize("b", range(1, 9))
def test_leader_plan_sends_one_message_and_broadcasts_in_a_tree(b: int) -> None:
    plan = plan_transfer((10,), num_sources=3, num_destinations=b, algorithm="leader")
    assert plan.num_messages == 1
    assert len(plan.steps) == 1 + (b - 1).bit_length()


def test_sharded_destinations_need_no_exchange() -> None:
    for source in PLACEMENTS:
        plan = plan_transfer(
            (64, 8),
            num_sources=2,
            num_destinations=4,
            source=source,
            destination=Sharded(0),
            algorithm="interval",
        )
        assert [step.kind for step in plan.steps] == [StepKind.HOP]


def test_a_plan_along_an_inner_dim_counts_slices() -> None:
    plan = plan_transfer(
        (3, 10, 4), num_sources=2, num_destinations=3, itemsize=2, destination=Sharded(1)
    )
    assert plan.dim == 1
    assert plan.extent == 10
    assert plan.unit_bytes == 24
    assert [plan.destination_shape(j) for j in range(3)] == [(3, 3, 4), (3, 3, 4), (3, 4, 4)]
    assert plan.source_shape(1) == (3, 10, 4)


def test_a_scalar_crosses() -> None:
    plan = plan_transfer((), num_sources=2, num_destinations=3)
    check_delivery(plan)
    assert plan.extent == 1
    assert plan.destination_shape(2) == ()


def test_leader_of_a_sharded_source_collects_first() -> None:
    plan = plan_transfer(
        (9,), num_sources=3, num_destinations=1, source=Sharded(0), algorithm="leader"
    )
    assert [step.kind for step in plan.steps] == [StepKind.COLLECT, StepKind.HOP]
    assert plan.workspace_range(0, at_destination=False) == (0, 9)
    assert plan.workspace_range(1, at_destination=False) == (3, 6)


def test_impossible_arguments_are_refused() -> None:
    for message, arguments in (
        (r"num_sources \(0\) must be at least 1", {"num_sources": 0}),
        (r"itemsize \(0\) must be at least 1", {"itemsize": 0}),
        (r"chunks \(0\) must be at least 1", {"chunks": 0}),
        (r"chunks \(2\) must be 1 for algorithm \(leader\)", {"algorithm": "leader", "chunks": 2}),
        (r"source_lanes \(3\) must be within 1\.\.number of ranks \(2\)", {"source_lanes": 3}),
        (r"destination_lanes \(0\) must be within 1\.\.", {"destination_lanes": 0}),
        (r"source\.dim \(2\) must be within the dimensions", {"source": Sharded(2)}),
        (
            r"source\.dim \(0\) must equal destination\.dim \(1\)",
            {"source": Sharded(0), "destination": Sharded(1)},
        ),
        (r"algorithm \(ring\) must be auto, interval, leader, direct", {"algorithm": "ring"}),
    ):
        defaults: dict[str, Any] = {"num_sources": 2, "num_destinations": 2}
        with pytest.raises(ValueError, match=message):
            plan_transfer((4, 4), **(defaults | arguments))
    with pytest.raises(ValueError, match=r"shape \(\(4, -1\)\) must not be negative"):
        plan_transfer((4, -1), num_sources=1, num_destinations=1)
