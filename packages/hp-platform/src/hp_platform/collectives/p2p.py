"""Sends and receives between ranks, through the host where the backend needs it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import _internals
from hp_platform.collectives.pending import Pending
from hp_platform.groups import global_ranks
from hp_platform.threads import note_use


def isend(x: Tensor, dst: int, *, group: ProcessGroup, tag: int = 0) -> Pending[None]:
    """Start to send `x` to the global rank `dst`.

    Wait for the result before writing to `x`, which stays alive until then. Autograd does not
    record the send, as in `torch.distributed`.

    Args:
        x: Tensor of any shape and dtype; copied first if it is not contiguous.
        dst: Global rank of the receiver, a member of `group`.
        group: Process group of the message.
        tag: Tag of the message, the same at the receive; NCCL ignores tags and matches by order.

    Raises:
        ValueError: If `dst` is not another rank of `group`.
    """
    message = _outgoing(x, dst, group)
    return Pending(None, works=[message.post(group, tag)], buffers=message.buffers)


def irecv(buffer: Tensor, src: int, *, group: ProcessGroup, tag: int = 0) -> Pending[Tensor]:
    """Start to receive into `buffer` from the global rank `src`; waiting returns `buffer`.

    The received tensor has no gradient, as in `torch.distributed`.

    Args:
        buffer: Contiguous tensor of the shape and dtype of the sent tensor.
        src: Global rank of the sender, a member of `group`.
        group: Process group of the message.
        tag: Tag of the message, the same at the send; NCCL ignores tags and matches by order.

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

    The received tensors have no gradient, as in `torch.distributed`.

    NCCL runs separate operations of a rank in their order, so that two ranks which both begin with
    a send would wait for each other. Here NCCL gets all operations as one group.

    Args:
        sends: Tensors to send, each with the global rank of its receiver, as in `isend`.
        receives: Buffers to fill, each with the global rank of its sender, as in `irecv`.
        group: Process group of the messages. With NCCL all its ranks must have run a collective on
            it before.
        tag: Tag of all messages, the same on the other ranks. Messages with one tag between two
            ranks match in order.

    Returns:
        The buffers of `receives`, in order; both lists may be empty.

    Raises:
        ValueError: As in `isend` and `irecv`, before any operation starts; or if another thread
            has used the group before and is still alive.
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
    """Tensor to send to, or to receive from, a rank of the group."""

    tensor: Tensor
    peer: int
    outgoing: bool
    buffers: list[Tensor]
    finish: Callable[[], object] | None = None

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
    finish = partial(target.copy_, host)
    return _Message(host, peer, outgoing=False, buffers=[target, host], finish=finish)


def _needs_host(x: Tensor, group: ProcessGroup) -> bool:
    """Tell whether a message goes through the host: Gloo takes no tensors of a device."""
    return x.device.type != "cpu" and _internals.backend_name(group, x.device) in (None, "gloo")


def _peer(rank: int, group: ProcessGroup, *, name: str) -> int:
    note_use(group, ordered=False)
    ranks = global_ranks(group)
    if rank not in ranks or ranks.index(rank) == group.rank():
        others = [r for i, r in enumerate(ranks) if i != group.rank()]
        raise ValueError(f"{name} ({rank}) must be another rank of the group ({others})")
    return ranks.index(rank)
