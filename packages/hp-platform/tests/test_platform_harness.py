"""Ranks in threads, the slow link and the comparison."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import all_gather_uneven, all_to_all_lazy, reduce_scatter_uneven, wait_tensor
from hp_platform.testing import RankError, compare, run_in_threads, slow_group


def test_ranks_in_threads_are_real_ranks() -> None:
    def rank_main(group: ProcessGroup) -> tuple[int, int, float, list[int]]:
        total = torch.tensor([float(group.rank())])
        dist.all_reduce(total, group=group)
        dist.broadcast(total, src=2, group=group)
        return group.rank(), group.size(), total.item(), dist.get_process_group_ranks(group)

    ranks = list(range(4))
    assert run_in_threads(rank_main, world_size=4) == [(rank, 4, 6.0, ranks) for rank in ranks]


def test_a_failing_thread_ends_the_collectives_of_the_others() -> None:
    def rank_main(group: ProcessGroup) -> None:
        if group.rank() == 1:
            raise ZeroDivisionError("the cause")
        dist.barrier(group=group)

    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 3 raised ZeroDivisionError: the cause") as e:
        run_in_threads(rank_main, world_size=3, timeout=600)
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    assert time.monotonic() - start < 200  # not the time-out; 0.1 s on a quiet machine


def test_a_thread_that_does_not_finish_is_named() -> None:
    def rank_main(group: ProcessGroup) -> None:
        time.sleep(0.6 * group.rank())

    with pytest.raises(RankError, match=r"rank 1 did not finish within 0.2 s") as caught:
        run_in_threads(rank_main, world_size=2, timeout=0.2)
    assert caught.value.rank == 1


def test_a_slow_link_costs_latency_and_bytes() -> None:
    def rank_main(group: ProcessGroup) -> tuple[float, float, Tensor]:
        slow = slow_group(group, latency=0.1, bandwidth=4e6)
        start = time.monotonic()
        x = torch.arange(100_000.0).requires_grad_()  # 400 kB: 0.1 s
        y = all_to_all_lazy(x * 1, group=slow)
        launched = time.monotonic() - start
        y = wait_tensor(y)
        waited = time.monotonic() - start
        y.sum().backward()
        assert x.grad is not None
        return launched, waited, wait_tensor(x.grad)

    for launched, waited, grad in run_in_threads(rank_main, world_size=2):
        assert launched < waited
        assert waited >= 0.2
        assert torch.equal(grad, torch.ones(100_000))


def test_compute_hides_a_slow_link() -> None:
    """A transfer gets done while nobody waits for it."""

    def rank_main(group: ProcessGroup) -> bool:
        slow = slow_group(group, latency=0.3)
        work = dist.all_reduce(torch.ones(2), group=slow, async_op=True)
        assert work is not None
        deadline = time.monotonic() + 50
        while not work.is_completed() and time.monotonic() < deadline:
            time.sleep(0.01)  # computing
        return bool(work.is_completed())

    assert run_in_threads(rank_main, world_size=2) == [True, True]


def test_all_operations_pass_through_a_slow_group() -> None:
    def rank_main(group: ProcessGroup) -> list[float]:
        slow = slow_group(group, latency=0.001)
        total = torch.tensor([1.0 + group.rank()])
        dist.all_reduce(total, group=slow)
        dist.broadcast(total, src=0, group=slow)
        dist.barrier(group=slow)
        whole = all_gather_uneven(total[: group.rank()], sizes=[0, 1], group=slow)
        part = reduce_scatter_uneven(torch.ones(3), sizes=[2, 1], group=slow)
        if group.rank() == 0:
            dist.send(total, 1, group=slow)
        else:
            dist.recv(total, 0, group=slow)
        return [*total.tolist(), *whole.tolist(), *part.tolist()]

    first, second = run_in_threads(rank_main, world_size=2)
    assert first == [3.0, 3.0, 2.0, 2.0]
    assert second == [3.0, 3.0, 2.0]


def test_the_ranks_of_a_slow_group_are_those_of_the_group() -> None:
    def rank_main(group: ProcessGroup) -> list[int]:
        return dist.get_process_group_ranks(slow_group(group))

    assert run_in_threads(rank_main, world_size=2) == [[0, 1]] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"latency": -1.0}, "must not be negative"), ({"bandwidth": 0.0}, "must be positive")],
)
def test_impossible_links_are_refused(arguments: dict[str, Any], message: str) -> None:
    def rank_main(group: ProcessGroup) -> None:
        with pytest.raises(ValueError, match=message):
            slow_group(group, **arguments)

    run_in_threads(rank_main, world_size=1)


def test_equal_tensors_compare_equal() -> None:
    x = {"a": torch.tensor([1.0, -math.inf]), "b": torch.empty(0), "c": torch.tensor([1, 2])}
    comparison = compare(x, {name: value.clone() for name, value in x.items()})
    assert comparison.ok
    assert [d.error for d in comparison.differences] == [0.0] * 3


def test_errors_are_relative_to_the_largest_expected_value_and_the_worst_is_first() -> None:
    expected = {"small": torch.tensor([1.0, 100.0]), "large": torch.tensor([1.0, 2.0])}
    actual = {"small": torch.tensor([1.5, 100.0]), "large": torch.tensor([1.5, 2.0])}
    comparison = compare(actual, expected, bound=0.1)
    assert [(d.name, d.error) for d in comparison.differences] == [
        ("large", 0.25),
        ("small", 0.005),
    ]
    assert not comparison.ok
    assert str(comparison).splitlines() == [
        "FAIL  large  2.500e-01",
        "ok    small  5.000e-03",
        "1 of 2 exceed 0.1",
    ]


def test_what_cannot_be_compared_fails() -> None:
    one = torch.ones(2)
    actual = {"shape": one, "extra": one, "nan": one / 0 * 0, "zero": one, "dtype": one.double()}
    expected = {"shape": torch.ones(2, 1), "absent": one, "nan": one, "zero": one * 0, "dtype": one}
    comparison = compare(actual, expected, bound=1.0)
    notes = {d.name: (d.error, d.note) for d in comparison.differences}
    assert notes == {
        "shape": (math.inf, "shape (2,) instead of (2, 1)"),
        "extra": (math.inf, "missing in expected"),
        "absent": (math.inf, "missing in actual"),
        "nan": (math.inf, ""),
        "zero": (math.inf, ""),
        "dtype": (0.0, "torch.float64 instead of torch.float32"),
    }
    assert not comparison.ok


def test_the_same_nan_on_both_sides_is_not_equal() -> None:
    nan = {"x": torch.tensor([math.nan, 1.0])}
    assert not compare(nan, nan).ok
