"""Sends, receives and the results under way that they return."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import (
    Pending,
    irecv,
    isend,
    isend_irecv,
    launch_all_gather,
    launch_all_to_all,
    new_group,
    shutdown,
)
from hp_platform.collectives import p2p
from hp_platform.collectives.pending import release_completed
from hp_platform.testing import run_distributed, run_in_threads, slow_group


def test_tensors_go_both_ways_at_once() -> None:
    def rank_main(group: ProcessGroup) -> list[float]:
        other = 1 - group.rank()
        x = torch.arange(6.0).reshape(2, 3).t() + 10 * group.rank()  # not contiguous
        received = irecv(torch.empty(3, 2), other, group=group)
        sent = isend(x, other, group=group)
        result = received.wait()
        sent.wait()
        return result.flatten().tolist()

    first, second = run_in_threads(rank_main, world_size=2)
    assert first == [10, 13, 11, 14, 12, 15]
    assert second == [0, 3, 1, 4, 2, 5]


def test_tensors_that_the_backend_cannot_send_go_through_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(p2p, "_needs_host", lambda *_: True)

    def rank_main(group: ProcessGroup) -> tuple[list[float], list[float]]:
        if group.rank() == 0:
            isend(torch.arange(3.0), 1, group=group).wait()
            return [], []
        buffer = torch.full((3,), -1.0)
        received = irecv(buffer, 0, group=group)
        before = buffer.tolist()
        assert received.wait() is buffer
        return before, buffer.tolist()

    assert run_in_threads(rank_main, world_size=2)[1] == ([-1.0] * 3, [0.0, 1.0, 2.0])


@pytest.mark.parametrize("through_host", [False, True])
def test_several_messages_are_one_operation(
    through_host: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(p2p, "_needs_host", lambda *_: through_host)

    def rank_main(group: ProcessGroup) -> list[list[float]]:
        rank, size = group.rank(), group.size()
        to_next, to_all = torch.full((2,), float(rank)), torch.full((1,), 10.0 + rank)
        others = [other for other in range(size) if other != rank]
        sends = [(to_next, (rank + 1) % size), *((to_all, other) for other in others)]
        receives = [(torch.empty(2), (rank - 1) % size), *((torch.empty(1), o) for o in others)]
        pending = isend_irecv(sends, receives, group=group)
        return [x.tolist() for x in pending.wait()]

    first, second, third = run_in_threads(rank_main, world_size=3)
    assert first == [[2, 2], [11], [12]]
    assert second == [[0, 0], [10], [12]]
    assert third == [[1, 1], [10], [11]]


def test_no_messages_are_an_operation_too() -> None:
    assert run_in_threads(_nothing, world_size=1) == [[]]


def _nothing(group: ProcessGroup) -> list[Tensor]:
    return isend_irecv([], [], group=group).wait()


def test_nothing_is_posted_where_one_of_several_peers_is_wrong() -> None:
    def rank_main(group: ProcessGroup) -> float:
        other = 1 - group.rank()
        with pytest.raises(ValueError, match=r"dst \(7\) must be another rank of the group"):
            isend_irecv([(torch.ones(1), 7)], [(torch.empty(1), other)], group=group)
        right = isend_irecv([(torch.ones(1), other)], [(torch.empty(1), other)], group=group)
        return right.wait()[0].item()

    assert run_in_threads(rank_main, world_size=2) == [1.0, 1.0]


def test_a_gather_is_under_way_until_it_is_waited_for() -> None:
    def rank_main(group: ProcessGroup) -> tuple[bool, list[float]]:
        x = torch.full((1, 2), float(group.rank()))
        pending = launch_all_gather(x, group=slow_group(group, latency=0.1))
        before = pending.done()
        with pytest.raises(ValueError, match=r"x.ndim \(0\) must be at least 1"):
            launch_all_gather(torch.ones(()), group=group)
        return before, pending.wait()[:, 0].tolist()

    assert run_in_threads(rank_main, world_size=3) == [(False, [0.0, 1.0, 2.0])] * 3


def test_tags_tell_messages_apart() -> None:
    def rank_main(group: ProcessGroup) -> list[float]:
        if group.rank() == 0:
            sends = [isend(torch.full((1,), float(t)), 1, group=group, tag=t) for t in (1, 2)]
            for send in sends:
                send.wait()
            return []
        second = irecv(torch.empty(1), 0, group=group, tag=2)
        first = irecv(torch.empty(1), 0, group=group, tag=1)
        return [second.wait().item(), first.wait().item()]

    assert run_in_threads(rank_main, world_size=2)[1] == [2.0, 1.0]


def _ranks_of_the_world() -> list[float]:
    group = new_group([[1, 2]], name="edge")
    if group is None:
        return []
    if dist.get_rank() == 1:
        isend(torch.ones(1), 2, group=group).wait()
        return []
    return irecv(torch.empty(1), 1, group=group).wait().tolist()


def test_peers_are_global_ranks() -> None:
    assert run_distributed(_ranks_of_the_world, world_size=3) == [[], [], [1.0]]


def test_an_empty_tensor_can_be_sent() -> None:
    def rank_main(group: ProcessGroup) -> int:
        if group.rank() == 0:
            isend(torch.empty(0, 3), 1, group=group).wait()
            return 0
        return irecv(torch.empty(0, 3), 0, group=group).wait().numel()

    assert run_in_threads(rank_main, world_size=2) == [0, 0]


def test_wrong_peers_and_buffers_are_refused() -> None:
    def rank_main(group: ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"dst \(0\) must be another rank of the group"):
            isend(torch.ones(1), 0, group=group)
        with pytest.raises(ValueError, match=r"src \(5\) must be another rank of the group"):
            irecv(torch.ones(1), 5, group=group)

    run_in_threads(rank_main, world_size=1)


def test_a_strided_buffer_is_refused() -> None:
    def rank_main(group: ProcessGroup) -> None:
        with pytest.raises(ValueError, match="must be contiguous"):
            irecv(torch.empty(2, 3).t(), 1 - group.rank(), group=group)

    run_in_threads(rank_main, world_size=2)


def test_a_result_is_handed_out_once() -> None:
    pending = Pending(3)
    assert pending.done()
    assert pending.wait() == 3
    assert pending.done()
    with pytest.raises(RuntimeError, match="once"):
        pending.wait()


def test_finish_runs_after_the_operation_and_before_the_result() -> None:
    order: list[str] = []

    class Work(dist.Work):
        def wait(self, timeout: object = None) -> bool:
            del timeout
            order.append("operation")
            return True

    pending = Pending("result", works=[Work()], finish=lambda: order.append("finish"))
    order.append(pending.wait())
    assert order == ["operation", "finish", "result"]


def test_done_becomes_true_by_itself_for_a_collective() -> None:
    def rank_main(group: ProcessGroup) -> tuple[bool, float]:
        pending = launch_all_to_all(torch.ones(2), group=slow_group(group, latency=0.1))
        before = pending.done()
        deadline = time.monotonic() + 30
        while not pending.done():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return before, pending.wait().sum().item()

    assert run_in_threads(rank_main, world_size=2) == [(False, 2.0)] * 2


class _Work(dist.Work):
    """An operation that ends when told to."""

    ended = False

    def is_completed(self) -> bool:
        return self.ended


def test_buffers_of_a_dropped_operation_live_until_it_has_finished() -> None:
    release_completed(everything=True)
    work, buffer = _Work(), torch.ones(2)
    alive = weakref.ref(buffer)
    pending = Pending(None, works=[work], buffers=[buffer])
    assert not pending.done()
    del pending, buffer
    gc.collect()
    assert release_completed() == 1
    assert alive() is not None
    work.ended = True
    assert release_completed() == 0
    gc.collect()
    assert alive() is None


def test_a_dropped_send_arrives_and_is_released_by_shutdown() -> None:
    def rank_main(group: ProcessGroup) -> Tensor | None:
        if group.rank() == 0:
            isend(torch.arange(100_000.0), 1, group=group)
            return None
        gc.collect()
        return irecv(torch.empty(100_000), 0, group=group).wait()

    result = run_in_threads(rank_main, world_size=2)[1]
    assert result is not None
    assert torch.equal(result, torch.arange(100_000.0))
    shutdown()
    assert release_completed() == 0
