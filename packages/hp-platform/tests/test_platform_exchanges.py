"""What a rank sends to others is recorded, whichever way it goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import _functional_collectives as functional

from hp_platform import all_to_all, irecv, isend
from hp_platform.testing import Exchange, record_exchanges, run_distributed

FLOAT, WORD = 4, 8


def ring(group: ProcessGroup) -> None:
    x, y = torch.zeros(5), torch.empty(5)
    after, before = (group.rank() + 1) % 3, (group.rank() - 1) % 3
    sent, received = isend(x, dst=after, group=group), irecv(y, src=before, group=group)
    sent.wait()
    received.wait()


def uneven(group: ProcessGroup) -> None:
    x, y = torch.zeros(6, 2), torch.empty(3 * (group.rank() + 1), 2)
    dist.all_to_all_single(y, x, [group.rank() + 1] * 3, [1, 2, 3], group=group)


OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)

# Each with its kind and the bytes that rank 1 of 3 sends.
CASES: dict[str, tuple[Callable[[ProcessGroup], Any], list[tuple[str, int]]]] = {
    "all_to_all": (
        lambda g: dist.all_to_all_single(torch.empty(3, 2), torch.zeros(3, 2), group=g),
        [("all_to_all", 2 * 2 * FLOAT)],
    ),
    "all_to_all, uneven": (uneven, [("all_to_all", 4 * 2 * FLOAT)]),
    "all_to_all, lists": (
        lambda g: dist.all_to_all(
            [torch.empty(2) for _ in range(3)], [torch.zeros(2) for _ in range(3)], group=g
        ),
        [("all_to_all", 4 * FLOAT)],
    ),
    "all_to_all, differentiable": (
        lambda g: all_to_all(torch.zeros(3, 2, requires_grad=True), group=g).sum().backward(),
        [("all_to_all", 2 * 2 * FLOAT)] * 2,
    ),
    "all_gather": (
        lambda g: dist.all_gather([torch.empty(2) for _ in range(3)], torch.zeros(2), group=g),
        [("all_gather", 2 * 2 * FLOAT)],
    ),
    "all_gather, functional": (
        lambda g: functional.all_gather_tensor(torch.zeros(2), 0, g).sum().item(),
        [("all_gather", 2 * 2 * FLOAT)],
    ),
    "all_reduce": (
        lambda g: dist.all_reduce(torch.zeros(3, dtype=torch.int64), group=g),
        [("all_reduce", 2 * 2 * WORD)],
    ),
    "all_reduce, functional": (
        lambda g: functional.all_reduce(torch.zeros(1), "sum", g).item(),
        [("all_reduce", 6)],  # 2 * 4 * 2 / 3, rounded up
    ),
    "reduce_scatter, functional": (
        lambda g: functional.reduce_scatter_tensor(torch.zeros(6), "sum", 0, g).sum().item(),
        [("reduce_scatter", 4 * FLOAT)],
    ),
    "broadcast": (lambda g: dist.broadcast(torch.zeros(2), 0, group=g), [("broadcast", 0)]),
    "barrier": (lambda g: dist.barrier(group=g), [("barrier", 0)]),
    "send and receive": (ring, [("send", 5 * FLOAT), ("recv", 0)]),
}
if OLD_TORCH:  # whose Gloo has no all_to_all of lists
    del CASES["all_to_all, lists"]


def recorded() -> dict[str, list[Exchange]]:
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for name, (run, _) in CASES.items():
        with record_exchanges() as exchanges:
            run(group)
            torch.ones(2).exp()
        found[name] = exchanges
    return found


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_kind_is_recorded_with_the_bytes_that_leave_the_rank() -> None:
    _, found, _ = run_distributed(recorded, world_size=3)
    for name, (_, expected) in CASES.items():
        assert [(e.kind, e.num_bytes) for e in found[name]] == expected, name
    assert len({e.group for exchanges in found.values() for e in exchanges}) == 1
    assert found["all_reduce"][0].dtype == torch.int64


def gathered() -> None:
    group = dist.group.WORLD
    assert group is not None
    parts = [torch.empty(1) for _ in range(2)] if group.rank() == 0 else None
    with (
        record_exchanges(),
        pytest.raises(ValueError, match=r"operator \(c10d::gather_\) must be one of those known"),
    ):
        dist.gather(torch.zeros(1), parts, group=group)


def test_an_exchange_that_is_not_known_is_refused_instead_of_left_out() -> None:
    run_distributed(gathered, world_size=2)
