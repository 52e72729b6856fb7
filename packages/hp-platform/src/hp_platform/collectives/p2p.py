"""Sends and receives between ranks, staged through the host where the backend cannot do it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import _internals
from hp_platform.collectives.pending import Pending
from hp_platform.groups import global_ranks
from hp_platform.threads.use import note_use


def isend(x: Tensor, dst: int, *, group: ProcessGroup, tag: int = 0) -> Pending[None]:
    """Start to send `x` to the global rank `dst`.

    `x` must not be written before the result was waited for; it is kept alive until then.
    Autograd sees nothing of it, as in `torch.distributed`.

    Args:
        x: Any shape and dtype; copied first if it is not contiguous.
        dst: Global rank, a member of `group`.
        group: The group whose connection is used.
        tag: Matches that of the receive; NCCL matches by order alone.

    Raises:
        ValueError: If `dst` is not another rank of `group`.
    """
    message = _outgoing(x, dst, group)
    return Pending(None, works=[message.post(group, tag)], buffers=message.buffers)


def irecv(buffer: Tensor, src: int, *, group: ProcessGroup, tag: int = 0) -> Pending[Tensor]:
    """Start to receive into `buffer` from the global rank `src`; waiting returns `buffer`.

    What was received has no gradient, as in `torch.distributed`.

    Args:
        buffer: Contiguous, of the sender's shape and dtype.
        src: Global rank, a member of `group`.
        group: The group whose connection is used.
        tag: Matches that of the send; NCCL matches by order alone.

    Raises:
        ValueError: If `src` is not another rank of `group` or `buffer` is not contiguous.
    """
    message = _incoming(buffer, src, group)
    works = [message.post(group, tag)]
    return Pending(buffer, works=works, buffers=message.buffers, finish=message.finish)


def isend_irecv(
    sends: Sequence[tuple[Tensor, int]],
    receives: Sequence[tuple[Tensor, int]],
    *,
    group: ProcessGroup,
    tag: int = 0,
) -> Pending[list[Tensor]]:
    """Start several sends and receives as one operation; waiting returns the received buffers.

    What was received has no gradient, as in `torch.distributed`.

    NCCL runs what is posted one after the other in that order, on each rank: two ranks that both
    post their send first would wait for each other. Here all are handed over together.

    Args:
        sends: Tensors to send, each with the global rank of its receiver, as in `isend`.
        receives: Buffers to fill, each with the global rank of its sender, as in `irecv`.
        group: The group whose connections are used. With NCCL all its ranks must have run a
            collective on it before.
        tag: Matches that of the other side. Messages of one tag between two ranks match in order.

    Returns:
        The buffers of `receives`, in order; both lists may be empty.

    Raises:
        ValueError: As `isend` and `irecv`, before anything is posted; or another thread has used
            the group before and is still alive.
    """
    note_use(group)
    messages = [_incoming(buffer, src, group) for buffer, src in receives]
    messages += [_outgoing(x, dst, group) for x, dst in sends]
    if messages and _internals.coalesces(group, messages[0].tensor.device):
        works = dist.batch_isend_irecv([message.operation(group, tag) for message in messages])
    else:
        works = [message.post(group, tag) for message in messages]

    def finish() -> None:
        for message in messages:
            if message.finish is not None:
                message.finish()

    buffers = [buffer for message in messages for buffer in message.buffers]
    return Pending([b for b, _ in receives], works=works, buffers=buffers, finish=finish)


class _Message(NamedTuple):
    """One tensor on its way to or from a rank of the group, before it is posted."""

    tensor: Tensor
    peer: int
    outgoing: bool
    buffers: list[Tensor]
    finish: Callable[[], None] | None = None

    def post(self, group: ProcessGroup, tag: int) -> dist.Work:
        post = group.send if self.outgoing else group.recv
        work: dist.Work = post([self.tensor], self.peer, tag)
        return work

    def operation(self, group: ProcessGroup, tag: int) -> dist.P2POp:
        what = dist.isend if self.outgoing else dist.irecv
        return dist.P2POp(what, self.tensor, group=group, tag=tag, group_peer=self.peer)


def _outgoing(x: Tensor, dst: int, group: ProcessGroup) -> _Message:
    peer = _peer(dst, group, name="dst")
    x = x.detach().contiguous()
    if _needs_host(x, group):
        x = x.cpu()
    return _Message(x, peer, outgoing=True, buffers=[x])


def _incoming(buffer: Tensor, src: int, group: ProcessGroup) -> _Message:
    peer = _peer(src, group, name="src")
    if not buffer.is_contiguous():
        raise ValueError(f"buffer.stride() ({buffer.stride()}) must be contiguous")
    target = buffer.detach()
    if not _needs_host(buffer, group):
        return _Message(target, peer, outgoing=False, buffers=[target])
    host = torch.empty_like(target, device="cpu", pin_memory=target.is_cuda)

    def copy() -> None:
        target.copy_(host)

    return _Message(host, peer, outgoing=False, buffers=[target, host], finish=copy)


def _needs_host(x: Tensor, group: ProcessGroup) -> bool:
    """Gloo would hand the device pointer to the socket; other backends take device tensors."""
    return x.device.type != "cpu" and _internals.backend_name(group, x.device) in (None, "gloo")


def _peer(rank: int, group: ProcessGroup, *, name: str) -> int:
    note_use(group, ordered=False)
    ranks = global_ranks(group)
    if rank not in ranks or ranks.index(rank) == group.rank():
        others = [r for i, r in enumerate(ranks) if i != group.rank()]
        raise ValueError(f"{name} ({rank}) must be another rank of the group ({others})")
    return ranks.index(rank)
