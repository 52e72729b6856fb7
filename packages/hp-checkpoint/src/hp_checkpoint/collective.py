"""Steps of all ranks around a checkpoint: all ranks go on, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar, cast

from torch.distributed import ProcessGroup

from hp_base.errors import CheckpointError
from hp_base.folder import DamageError
from hp_checkpoint.checkpoint import verify_entries
from hp_checkpoint.manifest import Entry, Manifest
from hp_platform.failures.failures import PeerError
from hp_platform.failures.messages import agree, all_gather_json, on_one_rank
from hp_platform.groups import global_ranks

T = TypeVar("T")


class OnProgress(Protocol):
    """A function that is called as long as a rank makes progress: for heartbeats."""

    def __call__(self, phase: str, *, waiting: bool = False) -> None:
        """Report progress.

        Args:
            phase: Name of the phase that begins or goes on.
            waiting: Whether this rank is about to wait for others.
        """


def silent(phase: str, *, waiting: bool = False) -> None:
    """Report no progress: an `OnProgress` that does nothing."""


def gathered(value: T, *, of: type[T], group: ProcessGroup | None) -> list[T]:
    """Return the values of all ranks, as `all_gather_json`; without a group that of this rank."""
    return [value] if group is None else all_gather_json(value, of=of, group=group)


def on_rank_zero(call: Callable[[], T], *, of: type[T], group: ProcessGroup | None) -> T:
    """Run `call` on the first rank and return its result, of the type `of`, on all ranks.

    Raises:
        CheckpointError: On all ranks, if `call` raised it or an OSError.
    """
    try:
        if group is None:
            return call()
        return on_one_rank(call, of=of, group=group, where="using a checkpoint")
    except (OSError, PeerError) as error:
        raise CheckpointError(str(error)) from None


def on_all_ranks(call: Callable[[], T], *, group: ProcessGroup | None) -> T:
    """Run `call` on every rank; return on all of them or raise on all of them.

    Raises:
        CheckpointError: On all ranks, if one failed; names it and its error.
        BaseException: An interruption of this rank, such as a KeyboardInterrupt; without a group,
            any error of `call`.
    """
    if group is None:
        return call()
    raised: BaseException | None = None
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - told to all ranks, then raised
        raised = error
    errors = all_gather_json(_told(raised), of=str, group=group)
    if raised is not None and not isinstance(raised, Exception):
        raise raised
    failed = next((rank for rank, error in enumerate(errors) if error), None)
    if failed is not None:
        where = f"rank {global_ranks(group)[failed]}"
        cause = None if isinstance(raised, CheckpointError) else raised
        raise CheckpointError(f"{where}: {errors[failed]}") from cause
    return result


def is_first(group: ProcessGroup | None) -> bool:
    """Tell whether this rank is the first of its group; a process without one is."""
    return group is None or group.rank() == 0


def on_first_rank(call: Callable[[], T], *, of: type[T], group: ProcessGroup | None) -> T:
    """Run `call` on the first rank; return its result on all ranks or raise on all of them."""
    made = on_all_ranks(lambda: call() if is_first(group) else None, group=group)
    return on_rank_zero(lambda: cast("T", made), of=of, group=group)


def agree_all(error: CheckpointError | None, *, group: ProcessGroup | None, where: str) -> None:
    """Agree on an error as `hp_platform.agree`, with a CheckpointError on all ranks."""
    try:
        agree(error, group=group, where=where)
    except PeerError as peer:
        raise CheckpointError(str(peer)) from None


def verify_together(
    path: Path, manifest: Manifest, *, group: ProcessGroup | None, on_progress: OnProgress = silent
) -> str:
    """Check all chunks, every rank a share of them.

    Returns:
        Description of the damage; empty if there is none.

    Raises:
        CheckpointError: On all ranks, if one cannot read the checkpoint, or finds damage where the
            first rank finds none: then its access to the storage is at fault.
    """
    rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
    damage, error = "", None
    try:
        share = share_of(manifest, rank=rank, world_size=world_size)
        verify_entries(path, manifest, share, on_entry=partial(on_progress, "verify"))
    except DamageError as found:
        damage = str(found)
    except OSError as raised:
        error = CheckpointError(f"{path}: {raised}")
    on_progress("verify", waiting=True)
    agree_all(error, group=group, where="using a checkpoint")
    reports = gathered(damage, of=str, group=group)
    other = next((rank for rank, report in enumerate(reports) if report), None)
    if other is None:
        return ""
    share = share_of(manifest, rank=other, world_size=world_size)
    on_progress("verify")
    confirmed = on_rank_zero(lambda: _damage(path, manifest, share), of=str, group=group)
    if not confirmed:
        raise CheckpointError(
            f"rank {other if group is None else global_ranks(group)[other]}: {path}: "
            f"{reports[other]}, but not as rank 0 reads it: the directory must be on storage that "
            "all ranks share"
        )
    return confirmed


def _told(error: BaseException | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def share_of(manifest: Manifest, *, rank: int, world_size: int) -> list[Entry]:
    """Return consecutive chunks for one rank to check; all ranks get about as many bytes."""
    entries = [entry for of_file in manifest.entries for entry in of_file]
    total = sum([entry.nbytes for entry in entries])
    mine, before = [], 0
    for entry in entries:
        middle = before + entry.nbytes // 2
        if middle * world_size // total == rank:
            mine.append(entry)
        before += entry.nbytes
    return mine


def _damage(path: Path, manifest: Manifest, entries: list[Entry]) -> str:
    try:
        verify_entries(path, manifest, entries)
    except DamageError as damage:
        return str(damage)
    return ""
