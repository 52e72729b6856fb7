"""`agree`: all ranks go on together, or all of them raise."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import _internals
from hp_platform.groups import global_ranks

_MAX_MESSAGE_BYTES = 4096


class PeerError(RuntimeError):
    """Another rank failed before a collective phase that this rank was about to enter.

    Attributes:
        rank: Global rank of the first one that failed.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def agree(error: BaseException | None = None, *, group: ProcessGroup, where: str = "") -> None:
    """Exchange status before a collective phase; return on all ranks or raise on all of them.

    Without it, a rank that raises leaves the others blocked in their next collective. Costs one
    all-gather of eight bytes per rank, and a second one only after a failure.

    Args:
        error: What went wrong on this rank, or None.
        group: CPU group, usually `Runtime.control`. Every rank of it must call.
        where: What was about to happen, for the message.

    Raises:
        BaseException: `error` itself, on the ranks that pass one.
        PeerError: On all others; names every rank that failed, and type and message of its error.
        RuntimeError: If a rank is gone, so that no agreement can be reached.
    """
    text = b"" if error is None else _describe(error)
    try:
        lengths = _all_gather(torch.tensor([len(text)], device="cpu"), group)
        messages = _messages(text, lengths, group) if any(lengths.tolist()) else {}
    except RuntimeError as lost:
        if error is not None:
            error.add_note(f"the other ranks could not be told: {lost}")
            raise error from None
        lost.add_note(f"a rank was lost while all were to agree{_at(where)}")
        raise
    if error is not None:
        _note_others(error, messages, mine=global_ranks(group)[group.rank()])
        raise error
    if messages:
        listed = "; ".join(f"rank {rank} failed{_at(where)}: {m}" for rank, m in messages.items())
        raise PeerError(listed, rank=min(messages))


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    gathered = x.new_empty((group.size(), *x.shape))
    _internals.all_gather(gathered.flatten(), x.flatten(), group)
    return gathered


def _messages(text: bytes, lengths: Tensor, group: ProcessGroup) -> dict[int, str]:
    """Exchange messages, padded to the longest; by global rank, failed ranks alone."""
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device="cpu")
    padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
    gathered = _all_gather(padded, group)
    return {
        rank: bytes(row[:length].tolist()).decode(errors="replace")
        for rank, row, length in zip(
            global_ranks(group), gathered, lengths.flatten().tolist(), strict=True
        )
        if length
    }


def _describe(error: BaseException) -> bytes:
    text = f"{type(error).__name__}: {error}"
    return text.encode(errors="replace")[:_MAX_MESSAGE_BYTES]


def _note_others(error: BaseException, messages: dict[int, str], *, mine: int) -> None:
    for rank, message in messages.items():
        if rank != mine:
            error.add_note(f"rank {rank} failed as well: {message}")


def _at(where: str) -> str:
    return f" before {where}" if where else ""
