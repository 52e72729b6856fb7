"""The fourteen ways in which a leader that sends, and a broadcast inside `wait()`, went wrong.

Each ends here in the right answer or in an error that says where. The names are those of the
measurements: order_swap, order_swap_shapes, double_wait, skip_wait, drop_isend,
drop_isend_keep_tensor, reuse_after_isend, requires_grad, use_before_wait, noncontig,
dtype_mismatch, size_mismatch, list_groups and error_propagation.
"""

import gc
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform.testing import RankError, run_distributed
from hp_vtp import PipelineLayout
from hp_vtp.transport import TensorMeta, TransferError, TransferTimeoutError, Transport

TIMEOUT = timedelta(seconds=30)
SMALL = TensorMeta((4,), torch.float32)
LARGE = TensorMeta((1024,), torch.float32)
HUGE = TensorMeta((4 << 20,), torch.float32)  # more than a socket takes


def send(transport: Transport, meta: TensorMeta, value: float, microbatch: int) -> None:
    """Start a transfer from stage 0 and drop handle and tensor."""
    x = torch.full(meta.shape, value, dtype=meta.dtype)
    transport.send([x], source=0, destination=1, microbatch=microbatch)


def order_swap(transport: Transport) -> None:
    """The ranks of a stage wait in different orders, for tensors of one shape and of two."""
    for second in (SMALL, LARGE):
        if transport.rank == 0:
            send(transport, SMALL, 1.0, 0)
            send(transport, second, 2.0, 1)
            continue
        handles = [
            transport.receive([meta], source=0, destination=1, microbatch=i)
            for i, meta in enumerate((SMALL, second))
        ]
        found: dict[int, Tensor] = {}
        for i in (0, 1) if transport.rank == 1 else (1, 0):
            (found[i],) = handles[i].wait()
        assert found[0].tolist() == [1.0] * 4
        assert set(found[1].tolist()) == {2.0}


def two_threads(transport: Transport) -> None:
    """Two threads wait at once, for both directions, in whichever order they come."""
    if transport.rank == 0:
        send(transport, SMALL, 1.0, 0)
        (gradient,) = transport.receive([SMALL], source=1, destination=0, microbatch=0).wait()
        assert gradient.tolist() == [3.0] * 4
        return
    handle = transport.receive([SMALL], source=0, destination=1, microbatch=0)
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.extend(handle.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    transport.send([torch.full((4,), 3.0)], source=1, destination=0, microbatch=0)
    for thread in threads:
        thread.join(10)
    assert len(results) == 3
    assert all(x is results[0] for x in results)


def double_wait(transport: Transport) -> None:
    """One rank waits twice."""
    if transport.rank == 0:
        send(transport, SMALL, 5.0, 0)
        return
    handle = transport.receive([SMALL], source=0, destination=1, microbatch=0)
    (x,) = handle.wait()
    if transport.rank == 2:
        assert handle.wait()[0] is x
        assert handle.done()
    assert x.tolist() == [5.0] * 4


def skip_wait(transport: Transport) -> None:
    """One rank never waits; the other one gets its tensor all the same."""
    if transport.rank == 0:
        send(transport, SMALL, 6.0, 0)
        return
    handle = transport.receive([SMALL], source=0, destination=1, microbatch=0)
    if transport.rank == 2:
        assert handle.wait()[0].tolist() == [6.0] * 4  # or its time-out would have raised


def drop_isend(transport: Transport) -> None:
    """Handle and tensor are dropped, and their memory used again, before anybody receives."""
    if transport.rank == 0:
        send(transport, HUGE, 7.0, 0)
        gc.collect()
        junk = [torch.full(HUGE.shape, -1.0) for _ in range(3)]
        dist.barrier()
        assert junk[0][0] == -1
        return
    dist.barrier()
    (x,) = transport.receive([HUGE], source=0, destination=1, microbatch=0).wait()
    assert torch.equal(x, torch.full(HUGE.shape, 7.0))


def requires_grad(transport: Transport) -> None:
    """Activations become leaves when they are handed over; there is no tensor before."""
    metas = [SMALL, TensorMeta((2,), torch.int64), TensorMeta((4,), torch.float32, False, False)]
    if transport.rank == 0:
        tensors = [torch.full((4,), 5.0), torch.ones(2, dtype=torch.int64), torch.ones(4)]
        dist.barrier()
        transport.send(tensors, metas=metas, source=0, destination=1)
        (gradient,) = transport.receive([SMALL], source=1, destination=0).wait()
        assert not gradient.requires_grad
        assert gradient.tolist() == [10.0] * 4
        return
    handle = transport.receive(metas, source=0, destination=1)
    assert not handle.done()
    assert not any(isinstance(value, Tensor) for value in vars(handle).values())
    dist.barrier()
    x, tokens, plain = handle.wait()
    assert x.is_leaf
    assert (x.requires_grad, tokens.requires_grad, plain.requires_grad) == (True, False, False)
    (x * x).sum().backward()
    assert x.grad is not None
    transport.send([x.grad], source=1, destination=0)


def noncontig(transport: Transport) -> None:
    """A transposed view is sent as it is."""
    meta = TensorMeta((4, 3), torch.float32)
    if transport.rank == 0:
        transport.send([torch.arange(12.0).view(3, 4).t()], source=0, destination=1)
    else:
        (x,) = transport.receive([meta], source=0, destination=1).wait()
        assert torch.equal(x, torch.arange(12.0).view(3, 4).t())


def one_after_another(transport: Transport) -> None:
    """list_groups: several outstanding receives of one shape each have a buffer of their own."""
    if transport.rank == 0:
        for i in range(5):
            send(transport, SMALL, float(i), i)
        transport.finish()
        return
    handles = [transport.receive([SMALL], source=0, destination=1, microbatch=i) for i in range(5)]
    assert [handle.wait()[0][0].item() for handle in reversed(handles)] == [4, 3, 2, 1, 0]


def progress_without_wait(transport: Transport) -> None:
    """Hop and exchange go on while nobody waits: the transfer ends by itself."""
    if transport.rank == 0:
        send(transport, HUGE, 9.0, 0)
        return
    handle = transport.receive([HUGE], source=0, destination=1, microbatch=0)
    deadline = time.monotonic() + 60
    while not handle.done():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert handle.wait(timeout=0)[0][-1] == 9


def a_late_peer(transport: Transport) -> None:
    """A wait with a time of its own names edge, microbatch and peer, and may be tried again."""
    if transport.rank == 0:
        dist.barrier()
        send(transport, SMALL, 8.0, 3)
        return
    handle = transport.receive([SMALL], source=0, destination=1, microbatch=3)
    with pytest.raises(TransferTimeoutError) as caught:
        handle.wait(timeout=0.3)
    start = f"rank {transport.rank}, edge 0 -> 1 (activations, domain 0), microbatch 3: not done"
    assert str(caught.value).startswith(start)
    assert caught.value.peers == (0,)
    dist.barrier()
    assert handle.wait()[0].tolist() == [8.0] * 4


RIGHT = (
    *(order_swap, two_threads, double_wait, skip_wait, drop_isend, requires_grad, noncontig),
    *(one_after_another, progress_without_wait, a_late_peer),
)


def right_answers(cases: tuple[Callable[[Transport], None], ...]) -> list[str]:
    for case in cases:
        with Transport(PipelineLayout.straight([1, 2]), timeout=TIMEOUT) as transport:
            case(transport)
    return sorted(thread.name for thread in threading.enumerate() if "vtp" in thread.name)


def test_what_went_wrong_goes_right_and_leaves_no_thread() -> None:
    assert run_distributed(right_answers, RIGHT, world_size=3, timeout=90) == [[], [], []]


def fails(act: Callable[[Transport], None]) -> str:
    """Run on all ranks what must fail on all of them; return what each says."""
    transport = Transport(PipelineLayout.straight([1, 2]), timeout=TIMEOUT)
    start = time.monotonic()
    with pytest.raises(TransferError) as caught:
        act(transport)
    assert time.monotonic() - start < 100  # 1 s on a quiet machine
    transport.close()
    return str(caught.value)


def reuse_after_isend(transport: Transport) -> None:
    if transport.rank == 0:
        x = torch.full(HUGE.shape, 7.0)
        handle = transport.send([x], source=0, destination=1, microbatch=2)
        x.fill_(-1.0)
        dist.barrier()
        handle.wait()
    dist.barrier()
    transport.receive([HUGE], source=0, destination=1, microbatch=2).wait()
    time.sleep(1)
    transport.receive([HUGE], source=0, destination=1, microbatch=3).wait()


def mismatch(sent: TensorMeta, expected: TensorMeta) -> Callable[[Transport], None]:
    def act(transport: Transport) -> None:
        if transport.rank == 0:
            x = torch.ones(sent.shape, dtype=sent.dtype)
            transport.send([x], source=0, destination=1, microbatch=1).wait()
        else:
            transport.receive([expected], source=0, destination=1, microbatch=1).wait()

    return act


def one_rank_differs(transport: Transport) -> None:
    """Only rank 2 expects something else: ranks 0 and 1 fail with it."""
    mismatch(SMALL, SMALL if transport.rank == 1 else LARGE)(transport)
    transport.receive([SMALL], source=0, destination=1).wait()  # rank 1 may have had its part


def other_microbatch(transport: Transport) -> None:
    if transport.rank == 0:
        transport.send([torch.ones(4)], source=0, destination=1, microbatch=1).wait()
    else:
        transport.receive([SMALL], source=0, destination=1, microbatch=0).wait()


def raises_elsewhere(transport: Transport) -> None:
    """A rank that fails at something else tells the others, whatever they wait for."""
    if transport.rank == 2:
        transport.abort("rank 2, stage 1: ValueError: no such token")
        transport.receive([SMALL], source=0, destination=1).wait()
    elif transport.rank == 1:
        transport.receive([SMALL], source=0, destination=1).wait()
    else:
        transport.receive([SMALL], source=1, destination=0).wait()


def failures() -> dict[str, str]:
    bfloat16, float32 = TensorMeta((8,), torch.bfloat16), TensorMeta((4,), torch.float32)
    return {
        "reuse_after_isend": fails(reuse_after_isend),
        "dtype_mismatch": fails(mismatch(bfloat16, float32)),
        "size_mismatch": fails(mismatch(SMALL, LARGE)),
        "size_mismatch the other way": fails(mismatch(LARGE, SMALL)),
        "one_rank_differs": fails(one_rank_differs),
        "other_microbatch": fails(other_microbatch),
        "raises_elsewhere": fails(raises_elsewhere),
    }


def test_what_cannot_go_right_is_an_error_on_every_rank_within_seconds() -> None:
    reports = run_distributed(failures, world_size=3, timeout=120)
    for rank, report in enumerate(reports):
        for name, message in report.items():
            assert message.startswith(f"rank {rank}, edge "), name
        for name in ("dtype_mismatch", "size_mismatch", "size_mismatch the other way"):
            assert "must equal that of ranks" in report[name]
        assert "microbatch 0: float32[4]" in report["other_microbatch"]
        assert "microbatch 1: float32[4]" in report["other_microbatch"]
        assert "changed in place" in report["reuse_after_isend"]
        assert "no such token" in report["raises_elsewhere"]
        assert "float32[1024]" in report["one_rank_differs"]


def die() -> None:
    """Rank 0 dies; rank 1 stays alive after it has seen that, as in an exception handler."""
    transport = Transport(PipelineLayout.straight([1, 2]), timeout=timedelta(seconds=600))
    if transport.rank == 0:
        os._exit(0)
    start = time.monotonic()
    with pytest.raises(TransferError, match=r"waiting for ranks \[.*\]"):
        transport.receive([SMALL], source=0, destination=1).wait()
    assert time.monotonic() - start < 60  # not the time-out; 0.1 s on a quiet machine
    time.sleep(1)


def test_all_ranks_of_a_stage_learn_of_a_dead_peer() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0"):
        run_distributed(die, world_size=3, timeout=600)
    assert time.monotonic() - start < 200  # not the time-out; 2 s on a quiet machine


def leave_early() -> None:
    """A rank that sends less than the other expects is found out at the end."""
    transport = Transport(PipelineLayout.straight([1, 1]), timeout=TIMEOUT)
    if transport.rank == 0:
        send(transport, SMALL, 1.0, 0)
        with pytest.raises(TransferError, match=r"transfer 1: close.* must equal .*transfer 1"):
            transport.close()
    else:
        transport.receive([SMALL], source=0, destination=1, microbatch=0)
        handle = transport.receive([SMALL], source=0, destination=1, microbatch=1)
        with pytest.raises(TransferError, match="transfer 1: close"):
            handle.wait()
        transport.close()


def transfer(transport: Transport, meta: TensorMeta, value: float, microbatch: int) -> None:
    if transport.rank == 0:
        send(transport, meta, value, microbatch)
    else:
        handle = transport.receive([meta], source=0, destination=1, microbatch=microbatch)
        assert set(handle.wait()[0].tolist()) == {value}


def agree_once() -> None:
    with Transport(PipelineLayout.straight([1, 1]), timeout=TIMEOUT, check="once") as transport:
        for i in range(3):
            transfer(transport, SMALL, float(i), i)
        with pytest.raises(ValueError, match=r'must be those of the first transfer .*"once"'):
            transfer(transport, LARGE, 1.0, 3)


def test_a_missing_transfer_is_found_when_the_transport_is_closed() -> None:
    run_distributed(leave_early, world_size=2)


def test_tensors_may_be_agreed_on_once() -> None:
    run_distributed(agree_once, world_size=2)
