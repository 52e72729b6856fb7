"""`agree`: either all ranks continue or all of them raise."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import _internals
from hp_platform.failures.failures import FailureReport, PeerError, mark_agreed
from hp_platform.groups import global_ranks


def agree(
    error: BaseException | None = None,
    *,
    group: ProcessGroup | None,
    where: str = "",
    device: torch.device | str = "cpu",
) -> None:
    """Exchange status before a collective phase; return on all ranks or raise on all ranks.

    Without it, a rank that raises leaves the others blocked in their next collective. It costs one
    all-gather of eight bytes per rank, and a second all-gather after a failure only.

    Args:
        error: Error of this rank, or None.
        group: Process group, usually `Runtime.control`; all its ranks must call. None: a single
            rank.
        where: Words for the phase, for the message.
        device: Device on which the group communicates; a GPU is synchronised.

    Raises:
        BaseException: `error` itself, on the ranks that pass one.
        PeerError: On all other ranks; it names every failed rank with type and message of its
            error.
        RuntimeError: If a rank is gone, so that ranks cannot agree.
    """
    if group is None:
        if error is not None:
            raise error
        return
    at = f" before {where}" if where else ""
    ranks = global_ranks(group)
    mine = ranks[group.rank()]
    text = b"" if error is None else FailureReport.of(error, rank=mine).encode().encode()
    try:
        lengths = _all_gather(torch.tensor([len(text)], device=device), group)
        reports = _reports(text, lengths, group) if bool(lengths.any()) else {}
    except RuntimeError as lost:
        if error is not None:
            error.add_note(f"the other ranks could not be told: {lost}")
            raise error from None
        lost.add_note(f"a rank was lost while all were to agree{at}")
        raise
    if error is not None:
        for rank, report in reports.items():
            if rank != mine:
                error.add_note(f"rank {rank} failed as well: {report.error}")
        mark_agreed(error, ranks)
        raise error
    if reports:
        listed = "; ".join(_listed(report, at) for report in reports.values())
        first = min(reports)
        raised = PeerError(listed, rank=first, report=reports[first])
        mark_agreed(raised, ranks)
        raise raised


@contextmanager
def agreeing(*, group: ProcessGroup | None, where: str) -> Iterator[None]:
    """Run a block on all ranks; at its end either all continue or all raise: see `agree`.

    The block must not contain collectives that a rank could miss by raising.

    Args:
        group: CPU group of the ranks; None: a single rank.
        where: Words for the work of the block, for the message.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001 - sent to all ranks, then raised
        error = raised
    agree(error, group=group, where=where)


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    gathered = x.new_empty((group.size(), *x.shape))
    _internals.all_gather(gathered.flatten(), x.flatten(), group=group)
    return gathered


def _reports(text: bytes, lengths: Tensor, group: ProcessGroup) -> dict[int, FailureReport]:
    """Exchange reports, padded to the longest; return those of failed ranks by global rank."""
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=lengths.device)
    padded[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device=lengths.device)
    gathered = _all_gather(padded, group)
    rows = zip(global_ranks(group), gathered, lengths.flatten().tolist(), strict=True)
    texts = {rank: bytes(row[:length].tolist()) for rank, row, length in rows if length}
    return {
        rank: FailureReport.parse(said) or FailureReport(rank, "", said.decode(errors="replace"))
        for rank, said in texts.items()
    }


def _listed(report: FailureReport, at: str) -> str:
    place = f" (in {report.place})" if report.place else ""
    return f"rank {report.rank} failed{at}: {report.error}{place}"
