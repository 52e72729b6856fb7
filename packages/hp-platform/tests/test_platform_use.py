"""A group belongs to one thread: see Note [A group belongs to a thread]."""

import _thread
import re
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import (
    ThreadContext,
    all_gather_uneven,
    all_to_all,
    initialize,
    irecv,
    isend,
    isend_irecv,
    launch_all_gather,
    new_group,
    reduce_scatter_uneven,
)
from hp_platform.testing import run_distributed, run_in_threads

REFUSED = (
    r"ValueError: rank \d of 2: thread \(second\) must be the one that used group \S+ first "
    r"\(rank\d\), which is still alive"
)


def in_thread(fn: Callable[[], object]) -> list[str]:
    """Run in a thread and return what it raised."""
    said: list[str] = []

    def run() -> None:
        try:
            fn()
        except (ValueError, RuntimeError) as error:
            said.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    return said


def _group(name: str = "test") -> ProcessGroup:
    initialize()
    ranks = range(dist.get_world_size())
    group = new_group([ranks], name=name, timeout=timedelta(seconds=5))
    assert group is not None
    return group


def _two_threads(num_own_groups: int) -> tuple[list[str], list[float]]:
    """Two threads send rows of two widths, in an order that differs from rank to rank."""
    first = _group("first")
    second = _group("second") if num_own_groups == 2 else first
    size, rank = first.size(), first.rank()
    all_to_all(torch.ones(size, 1), group=first)  # the main thread is the first to use it
    began, said, sums = threading.Barrier(2, timeout=20), list[str](), list[float]()

    def work() -> None:
        began.wait()
        try:
            for _ in range(20):
                all_to_all(torch.ones(size, 1000), group=second)
        except ValueError as error:
            said.append(str(error))

    helper = threading.Thread(target=work, name="second")
    helper.start()
    began.wait()
    if rank == 0:
        helper.join()  # so that here the other thread comes first
    for _ in range(20):
        sums.append(all_to_all(torch.ones(size, 3), group=first).sum().item())
    helper.join()
    return said, sums


def test_a_second_thread_is_refused_on_every_rank_and_the_first_goes_on() -> None:
    for said, sums in run_distributed(_two_threads, 1, world_size=3, timeout=60):
        assert len(said) == 1
        assert "thread (second) must be the one that used group" in said[0]
        assert "first (MainThread), which is still alive" in said[0]
        assert "a group of its own, or run a helper under hp_platform.ThreadContext" in said[0]
        assert sums == [9.0] * 20


def test_threads_with_groups_of_their_own_do_not_meet() -> None:
    for said, sums in run_distributed(_two_threads, 2, world_size=3, timeout=60):
        assert said == []
        assert sums == [9.0] * 20


COLLECTIVES: dict[str, Callable[[Tensor, ProcessGroup], object]] = {
    "all_to_all": lambda x, group: all_to_all(x, group=group),
    "launch_all_gather": lambda x, group: launch_all_gather(x, group=group).wait(),
    "all_gather_uneven": lambda x, group: all_gather_uneven(x, sizes=[2, 2], group=group),
    "reduce_scatter_uneven": lambda x, group: reduce_scatter_uneven(x, sizes=[1, 1], group=group),
    "isend_irecv": lambda x, group: isend_irecv(
        [(x, 1 - group.rank())], [(x.clone(), 1 - group.rank())], group=group
    ).wait(),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_each_collective_counts(name: str) -> None:
    def rank(group: ProcessGroup) -> list[str]:
        x = torch.ones(2, 3)
        all_to_all(x, group=group)
        return in_thread(lambda: COLLECTIVES[name](x, group))

    for said in run_in_threads(rank, world_size=2):
        assert len(said) == 1
        assert re.match(REFUSED, said[0])


def test_a_helper_under_the_context_of_the_owner_may_use_its_groups() -> None:
    def rank(group: ProcessGroup) -> list[str]:
        def inner(context: ThreadContext) -> None:
            with context.apply():
                all_to_all(torch.ones(2, 3), group=group)

        def helper(context: ThreadContext) -> None:
            with context.apply():
                all_to_all(torch.ones(2, 3), group=group)
                nested = ThreadContext.capture()
                assert in_thread(lambda: inner(nested)) == []

        context = ThreadContext.capture()
        said = in_thread(lambda: helper(context))  # it comes first, for the thread that started it
        all_to_all(torch.ones(2, 3), group=group)
        return said + in_thread(lambda: helper(context))

    assert run_in_threads(rank, world_size=2) == [[], []]


def test_a_thread_that_has_ended_leaves_its_groups_to_the_next() -> None:
    def rank(group: ProcessGroup) -> list[str]:
        def work() -> None:
            all_to_all(torch.ones(2, 3), group=group)

        said = in_thread(work) + in_thread(work)
        work()
        return said + [text.partition(":")[0] for text in in_thread(work)]

    assert run_in_threads(rank, world_size=2) == [["ValueError"], ["ValueError"]]


def test_messages_may_come_from_any_thread() -> None:
    def rank(group: ProcessGroup) -> list[str]:
        other, x = 1 - group.rank(), torch.zeros(3)
        all_to_all(torch.ones(2, 3), group=group)
        sent = isend(torch.ones(3), other, group=group)
        said = in_thread(lambda: irecv(x, other, group=group).wait())
        sent.wait()
        assert x.tolist() == [1.0] * 3
        return said

    assert run_in_threads(rank, world_size=2) == [[], []]


def test_a_thread_that_python_did_not_start_passes() -> None:
    """As those in which the autograd engine runs the nodes of another device."""

    def rank(group: ProcessGroup) -> list[str]:
        def foreign() -> None:
            try:
                all_to_all(torch.ones(2, 3), group=group)
            except ValueError as error:
                said.append(str(error))
            done.set()

        all_to_all(torch.ones(2, 3), group=group)
        said, done = list[str](), threading.Event()
        _thread.start_new_thread(foreign, ())
        assert done.wait(timeout=20)
        return said

    assert run_in_threads(rank, world_size=2) == [[], []]
