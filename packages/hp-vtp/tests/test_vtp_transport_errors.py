"""Transfers that cannot work end in an error that says where, never in a hang or wrong data."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hp_platform.testing import RankError, run_distributed
from hp_vtp import PipelineLayout, Sharded, StageLayout
from hp_vtp.transport import TensorMeta, TransferError, Transport

TIMEOUT = timedelta(seconds=600)  # also for connecting; nothing here waits for it


def transfer(transport: Transport, sent: TensorMeta, expected: TensorMeta) -> None:
    """Stage 0 sends, stage 1 receives."""
    if transport.layout.stage_of(transport.rank) == 0:
        x = torch.zeros(sent.shape, dtype=sent.dtype)
        transport.send([x], source=0, destination=1, metas=[sent]).wait()
    else:
        transport.receive([expected], source=0, destination=1).wait()


def disagree(sent: TensorMeta, expected: TensorMeta) -> str:
    """Stage 0 sends what stage 1 does not expect; return what each rank says."""
    with Transport(PipelineLayout.straight([2, 3]), timeout=TIMEOUT) as transport:
        start = time.monotonic()
        with pytest.raises(TransferError) as caught:
            transfer(transport, sent, expected)
        assert time.monotonic() - start < 60  # long before the time-out; 0.1 s on a quiet machine
        assert caught.value.edge == transport.layout.edge(0, 1)
        assert caught.value.peers
        with pytest.raises(TransferError, match=r"edge 0 -> 1 .*failed before: "):
            transfer(transport, sent, sent)
    return str(caught.value)


@pytest.mark.parametrize(
    "other",
    [
        TensorMeta((4, 4), torch.float32),
        TensorMeta((2, 4), torch.bfloat16),
        TensorMeta((4096, 4096), torch.bfloat16),
    ],
    ids=["equal bytes", "short", "another algorithm"],
)
def test_both_ends_raise_when_they_disagree(other: TensorMeta) -> None:
    sent = TensorMeta((4, 8), torch.bfloat16)
    messages = run_distributed(disagree, sent, other, world_size=5)
    assert "bfloat16[4, 8]" in messages[4]
    for rank, message in enumerate(messages):
        assert message.startswith(f"rank {rank}, edge 0 -> 1 (activations, domain 0): ")
        assert "must equal that of ranks" in message


def swap_order() -> str:
    """The receiver takes two transfers in the other order."""
    first, second = TensorMeta((3,), torch.float32), TensorMeta((5,), torch.float32)
    with Transport(PipelineLayout.straight([1, 1]), timeout=TIMEOUT) as transport:
        with pytest.raises(TransferError) as caught:
            transfer(transport, first, second)
        with pytest.raises(TransferError, match="failed before"):
            transfer(transport, second, first)
        return str(caught.value)


def test_transfers_in_another_order_are_an_error_not_a_swap() -> None:
    for message in run_distributed(swap_order, world_size=2):
        assert "float32[3]" in message
        assert "float32[5]" in message


def wait_for_absent_sender() -> str:
    with Transport(PipelineLayout.straight([1, 2]), timeout=timedelta(seconds=4)) as transport:
        if transport.rank == 0:
            dist.barrier()
            return ""
        start = time.monotonic()
        with pytest.raises(TransferError) as caught:
            transport.receive([TensorMeta((4,), torch.float32)], source=0, destination=1).wait()
        assert time.monotonic() - start < 60  # 4 s, if nobody else has the machine
        assert caught.value.peers == (0,)
        dist.barrier()
        return str(caught.value)


def test_a_late_sender_is_named_after_the_timeout() -> None:
    messages = run_distributed(wait_for_absent_sender, world_size=3)
    for rank in (1, 2):
        start = f"rank {rank}, edge 0 -> 1 (activations, domain 0), header: waiting for ranks [0]: "
        assert messages[rank].startswith(start)


def die_before_sending() -> None:
    transport = Transport(PipelineLayout.straight([1, 2]), timeout=TIMEOUT)
    if transport.rank == 0:
        os._exit(7)
    transport.receive([TensorMeta((4,), torch.float32)], source=0, destination=1).wait()


def test_a_dead_sender_fails_the_receivers_before_their_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0"):
        run_distributed(die_before_sending, world_size=3, timeout=600)
    assert time.monotonic() - start < 200  # not the time-out; 2 s on a quiet machine


def misuse() -> None:
    layout = PipelineLayout((StageLayout(((0, 1),), Sharded(0)), StageLayout(((2,),))), (0, 1))
    transport = Transport(layout, timeout=TIMEOUT)
    meta = TensorMeta((5, 2), torch.float32)
    if transport.rank == 2:
        with pytest.raises(
            ValueError, match=r"rank \(2\) must be one of the source ranks \(0, 1\)"
        ):
            transport.send([torch.zeros(5, 2)], source=0, destination=1)
    else:
        with pytest.raises(ValueError, match="must be one of the destination ranks"):
            transport.receive([meta], source=0, destination=1)
        with pytest.raises(ValueError, match=r"metas \(None\) must be given"):
            transport.send([torch.zeros(2, 2)], source=0, destination=1)
        for tensor, message in (
            (torch.zeros(5, 2), r"tensors\[0\]\.shape \(\(5, 2\)\) must equal that of the slice"),
            (
                torch.zeros(2 + transport.rank, 2, dtype=torch.float64),
                r"tensors\[0\]\.dtype \(torch\.float64\) must equal metas\[0\]\.dtype",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                transport.send([tensor], source=0, destination=1, metas=[meta])
        with pytest.raises(ValueError, match=r"len\(tensors\) \(0\) must equal len\(metas\) \(1\)"):
            transport.send([], source=0, destination=1, metas=[meta])
    with pytest.raises(ValueError, match="must be neighbours"):
        transport.send([], source=0, destination=2)
    # None of these mistakes touched the edge: it still works.
    if transport.rank < 2:
        mine = torch.full((2 + transport.rank, 2), float(transport.rank))
        transport.send([mine], source=0, destination=1, metas=[meta])
    else:
        (got,) = transport.receive([meta], source=0, destination=1).wait()
        assert got[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0, 1.0]
    transport.close()
    transport.close()
    with pytest.raises(ValueError, match="the transport is closed"):
        transfer(transport, meta, meta)
    with pytest.raises(ValueError, match=r"layout\.world_size \(2\) must equal .* \(3\)"):
        Transport(PipelineLayout.straight([1, 1]))


def close_late() -> None:
    transport = Transport(PipelineLayout.straight([1, 1]), timeout=TIMEOUT)
    dist.destroy_process_group()
    transport.close()


def test_closing_after_all_groups_are_gone_does_nothing() -> None:
    run_distributed(close_late, world_size=2)


def test_a_wrong_call_is_refused_before_anything_is_sent() -> None:
    run_distributed(misuse, world_size=3)
