import pytest

from hp_base.messages import size
from hp_vtp import (
    Links,
    PipelineLayout,
    Sharded,
    bound_seconds,
    explain,
    plan_edge,
    plan_transfer,
    predicted_seconds,
)
from hp_vtp.plan.explain import format_seconds

MIB = 2**20
PLAIN = Links(cross_bandwidth=MIB, cross_latency=0.0, local_bandwidth=1024 * MIB, local_latency=0.0)


@pytest.mark.parametrize(("a", "b"), [(2, 4), (4, 2), (4, 8), (8, 4), (4, 4)])
def test_leader_is_slower_by_the_number_of_links(a: int, b: int) -> None:
    interval, leader = (
        plan_transfer((16 * MIB,), num_sources=a, num_destinations=b, algorithm=algorithm)
        for algorithm in ("interval", "leader")
    )
    ratio = predicted_seconds(leader, PLAIN) / predicted_seconds(interval, PLAIN)
    assert ratio == pytest.approx(min(a, b), rel=0.01)
    assert predicted_seconds(interval, PLAIN) == pytest.approx(bound_seconds(interval, PLAIN), 0.01)


def test_no_plan_is_predicted_below_the_bound() -> None:
    for a in range(1, 7):
        for b in range(1, 7):
            plan = plan_transfer((4 * MIB,), num_sources=a, num_destinations=b, itemsize=2)
            assert predicted_seconds(plan, Links()) >= bound_seconds(plan, Links())


def test_auto_is_never_predicted_slower_than_another_by_more_than_its_tolerance() -> None:
    links = Links()
    for elements in (1, 4096, MIB, 64 * MIB):
        auto = plan_transfer((elements,), num_sources=3, num_destinations=4, links=links)
        for algorithm in ("interval", "leader", "direct"):
            other = plan_transfer(
                (elements,), num_sources=3, num_destinations=4, algorithm=algorithm
            )
            assert predicted_seconds(auto, links) <= 1.02 * predicted_seconds(other, links)


def test_auto_takes_the_interval_plan_for_large_tensors_on_own_links() -> None:
    plan = plan_transfer((64 * MIB,), num_sources=2, num_destinations=4, itemsize=2)
    assert plan.algorithm == "interval"


def test_auto_sends_one_copy_of_large_tensors_over_a_shared_link() -> None:
    slow = Links(cross_bandwidth=50e6, cross_latency=1e-2)
    plan = plan_transfer(
        (16 * MIB,),
        num_sources=2,
        num_destinations=4,
        source_lanes=1,
        destination_lanes=1,
        links=slow,
    )
    assert plan.algorithm == "leader"
    assert plan.num_messages == 1


def test_auto_prefers_few_messages_for_tiny_tensors() -> None:
    far = Links(cross_latency=5e-3)
    plan = plan_transfer((8,), num_sources=4, num_destinations=8, links=far)
    assert plan.num_messages == 1


def test_nothing_costs_nothing() -> None:
    plan = plan_transfer((0, 4), num_sources=2, num_destinations=3)
    assert predicted_seconds(plan, Links()) == bound_seconds(plan, Links()) == 0.0
    assert "nothing to send" in explain(plan)


def test_links_must_be_possible() -> None:
    with pytest.raises(ValueError, match=r"cross_bandwidth \(0\) must be greater than 0"):
        Links(cross_bandwidth=0)
    with pytest.raises(ValueError, match=r"local_latency \(-1\) must be at least 0"):
        Links(local_latency=-1)


def test_an_edge_plans_with_its_boundaries_unless_the_tensor_is_replicated() -> None:
    layout = PipelineLayout.from_dict(
        {
            "stages": [
                {"replicas": [[0, 1]], "boundary": {"sharded": 1}},
                {"replicas": [[2, 3, 4]], "lanes": 1},
            ]
        }
    )
    plan = plan_edge(layout.edge(0, 1), [2, 6, 8], itemsize=4)
    assert plan.source == Sharded(1)
    assert plan.lanes == 1
    mask = plan_edge(layout.edge(0, 1), [2, 6], itemsize=1, replicated=True)
    assert mask.dim is None


def test_explain_names_messages_links_time_and_bound() -> None:
    plan = plan_transfer(
        (4096, 1024), num_sources=2, num_destinations=3, itemsize=2, algorithm="interval"
    )
    text = explain(plan)
    assert text.splitlines()[:3] == [
        "2 -> 3 ranks, 4096x1024 of 2 B = 8.00 MiB, replicated -> replicated: interval",
        "hop 0: 4 messages, 8.00 MiB",
        "  S0 -> D0  [0, 1398101)  2.67 MiB",
    ]
    assert "received 2.67 MiB, 2.67 MiB, 2.67 MiB" in text
    assert "busiest link: 4.00 MiB, bound 4.00 MiB (N / 2 links); 4 messages over the cut" in text
    assert "bound 1.36 ms" in text
    assert "alternatives: leader 3.42 ms, direct 5.41 ms" in text


def test_sizes_and_times_have_fitting_units() -> None:
    assert [size(number) for number in (0, 1023, 1024, 3 * 2**20, 5 * 2**40)] == [
        *("0", "1023 B", "1.00 KiB", "3.00 MiB", "5.00 TiB")
    ]
    assert [format_seconds(t) for t in (2.0, 0.0015, 2e-5)] == ["2.00 s", "1.50 ms", "20.0 us"]
