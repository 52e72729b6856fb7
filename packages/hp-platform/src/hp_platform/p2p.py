"""Sends and receives between two ranks, staged through the host where the backend cannot do it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import _internals
from hp_platform.groups import global_ranks
from hp_platform.pending import Pending


def isend(x: Tensor, dst: int, *, group: ProcessGroup, tag: int = 0) -> Pending[None]:
    """Start to send `x` to the global rank `dst`.

    `x` must not be written before the result was waited for; it is kept alive until then.

    Args:
        x: Any shape and dtype; copied first if it is not contiguous.
        dst: Global rank, a member of `group`.
        group: The group whose connection is used.
        tag: Matches that of the receive; NCCL matches by order alone.

    Raises:
        ValueError: If `dst` is not another rank of `group`.
    """
    peer = _peer(dst, group, name="dst")
    x = x.detach().contiguous()
    if _needs_host(x, group):
        x = x.cpu()
    work = group.send([x], peer, tag)
    return Pending(None, works=[work], buffers=[x])


def irecv(buffer: Tensor, src: int, *, group: ProcessGroup, tag: int = 0) -> Pending[Tensor]:
    """Start to receive into `buffer` from the global rank `src`; waiting returns `buffer`.

    Args:
        buffer: Contiguous, of the sender's shape and dtype.
        src: Global rank, a member of `group`.
        group: The group whose connection is used.
        tag: Matches that of the send; NCCL matches by order alone.

    Raises:
        ValueError: If `src` is not another rank of `group` or `buffer` is not contiguous.
    """
    peer = _peer(src, group, name="src")
    if not buffer.is_contiguous():
        raise ValueError(f"buffer.stride() ({buffer.stride()}) must be contiguous")
    target = buffer.detach()
    if not _needs_host(buffer, group):
        work = group.recv([target], peer, tag)
        return Pending(buffer, works=[work], buffers=[target])
    host = torch.empty_like(target, device="cpu", pin_memory=target.is_cuda)
    work = group.recv([host], peer, tag)

    def copy() -> None:
        target.copy_(host)

    return Pending(buffer, works=[work], buffers=[target, host], finish=copy)


def _needs_host(x: Tensor, group: ProcessGroup) -> bool:
    """Gloo would hand the device pointer to the socket; other backends take device tensors."""
    if x.device.type == "cpu":
        return False
    return _internals.backend_name(group, x.device) in (None, "gloo")


def _peer(rank: int, group: ProcessGroup, *, name: str) -> int:
    ranks = global_ranks(group)
    if rank not in ranks or ranks.index(rank) == group.rank():
        others = [r for i, r in enumerate(ranks) if i != group.rank()]
        raise ValueError(f"{name} ({rank}) must be another rank of the group ({others})")
    return ranks.index(rank)
