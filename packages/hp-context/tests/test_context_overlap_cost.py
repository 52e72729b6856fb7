"""The cost decides whether an exchange is launched; settings that cannot be are refused."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from context_block import (
    BATCH,
    LOCAL,
    SIZE,
    Block,
    Case,
    gradients,
    overlapped,
    same,
    since,
    synchronous,
)
from torch.distributed import ProcessGroup

from hp_context import AsyncContextParallel, Fallback, OverlapRates
from hp_context.checks import Dims
from hp_context.methods import in_flight
from hp_platform.testing import run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (OverlapRates(link=1e9, compute=1e9, overhead=1e-9), (3, 3, {})),
        (OverlapRates(link=1e15, compute=1e9, overhead=1e-9), (0, 0, {Fallback.COST: 3})),
        (OverlapRates(link=1e9, compute=1e18, overhead=1e-9), (0, 0, {Fallback.COST: 3})),
        (None, (0, 0, {Fallback.COST: 3})),
    ],
)
def test_the_cost_decides_by_bytes_and_operations(
    rates: OverlapRates | None, expected: Any
) -> None:
    original = Block(Case())

    def rank(group: ProcessGroup) -> tuple[bool, Any]:
        reference = gradients(synchronous(original, group), group)
        block, parallel = overlapped(original, group, overlap="auto", rates=rates)
        gradients(block, group)
        before = parallel.counts
        return same(gradients(block, group), reference), since(before, parallel.counts)

    assert run_in_threads(rank, world_size=2) == [(True, expected)] * 2


def test_an_exchange_pays_if_the_shorter_of_the_two_exceeds_the_overhead() -> None:
    rates = OverlapRates(link=100.0, compute=1000.0, overhead=1.0)
    assert rates.pays(101, 1001)
    assert not rates.pays(100, 1001)
    assert not rates.pays(101, 1000)


@pytest.mark.parametrize(
    ("heads", "index", "sent"),
    [(4, None, 2), (2, (0, 0, 1, 1), 2), (1, (0, 0), 1)],
    ids=["divided", "some shared", "one shared"],
)
def test_bytes_are_those_that_leave_the_rank(
    heads: int, index: tuple[int, ...] | None, sent: int
) -> None:
    """Of two ranks, each sends `sent` heads of its positions to the other."""

    def rank(group: ProcessGroup) -> float:
        exchange = in_flight.Exchange(group, Dims(1, 2), index)
        return exchange.num_bytes(torch.zeros(BATCH, LOCAL, heads, SIZE))

    assert run_in_threads(rank, world_size=2) == [4.0 * BATCH * LOCAL * sent * SIZE] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AsyncContextParallel(overlap=cast("bool", "yes")),
            r"overlap \('yes'\) must be True, False or",
        ),
        (lambda: OverlapRates(0, 1, 1), r"link \(0\) must be > 0"),
        (lambda: OverlapRates(1, -1, 1), r"compute \(-1\) must be > 0"),
        (lambda: OverlapRates(1, 1, -1), r"overhead \(-1\) must be >= 0"),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
