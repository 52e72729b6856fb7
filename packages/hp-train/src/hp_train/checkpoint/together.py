"""What ranks do together around a checkpoint, so that all of them go on or all of them raise."""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hp_platform import PeerError, agree, all_gather_json, on_one_rank
from hp_train.checkpoint.manifest import Manifest, Part, parts_of
from hp_train.checkpoint.verify import share_of, verify_parts
from hp_train.errors import CheckpointError
from hp_train.folder import DamageError

T = TypeVar("T")


class OnProgress(Protocol):
    """Is told what a rank does, again and again while it gets on: for heartbeats."""

    def __call__(self, phase: str, *, waiting: bool = False) -> None:
        """Take note.

        Args:
            phase: What begins, or goes on.
            waiting: Whether this rank is about to wait for others.
        """


def silent(phase: str, *, waiting: bool = False) -> None:
    """Tell nobody."""


def on_rank_zero(call: Callable[[], T], *, of: type[T], group: ProcessGroup) -> T:
    """Run `call` on the first rank and return its result, which is of the form `of`, on all.

    Raises:
        CheckpointError: On all ranks, if it raised that or an OSError.
    """
    try:
        return on_one_rank(call, of=of, group=group, where="using a checkpoint")
    except OSError as error:
        raise CheckpointError(str(error)) from None
    except PeerError as peer:
        raise CheckpointError(str(peer)) from None


def run_together(call: Callable[[], T], *, group: ProcessGroup) -> T:
    """Run `call` on every rank; return on all of them or raise on all of them.

    Raises:
        CheckpointError: On all ranks, naming one that failed and its error.
        BaseException: What interrupted this rank, such as a KeyboardInterrupt.
    """
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
        where = f"rank {dist.get_global_rank(group, failed)}"
        cause = None if isinstance(raised, CheckpointError) else raised
        raise CheckpointError(f"{where}: {errors[failed]}") from cause
    return result


def on_first_rank(call: Callable[[], T], *, of: type[T], group: ProcessGroup) -> T:
    """`run_together` of what the first rank alone does; return its result on all."""
    made = run_together(lambda: call() if group.rank() == 0 else None, group=group)
    return on_rank_zero(lambda: cast("T", made), of=of, group=group)


def _told(error: BaseException | None) -> str:
    if error is None or isinstance(error, CheckpointError):
        return "" if error is None else str(error)
    return f"{type(error).__name__}: {error}"


def verify_together(
    path: Path, manifest: Manifest, *, group: ProcessGroup, on_progress: OnProgress = silent
) -> str:
    """Check all chunks, every rank a share of them.

    Returns:
        What is damaged; empty if nothing is.

    Raises:
        CheckpointError: On all ranks, if one cannot read the checkpoint, or finds damage where the
            first rank finds none: then the reader is at fault, not the checkpoint.
    """
    parts = parts_of(manifest)
    damage = ""
    error: CheckpointError | None = None
    try:
        share = share_of(parts, rank=group.rank(), world_size=group.size())
        verify_parts(path, manifest, share, on_part=lambda: on_progress("verify"))
    except DamageError as found:
        damage = str(found)
    except OSError as raised:
        error = CheckpointError(f"{path}: {raised}")
    on_progress("verify", waiting=True)
    agree_all(error, group=group, where="using a checkpoint")
    reports = all_gather_json(damage, of=str, group=group)
    for rank, report in enumerate(reports):
        if report:
            share = share_of(parts, rank=rank, world_size=group.size())
            on_progress("verify")
            confirmed = on_rank_zero(lambda: _damage(path, manifest, share), of=str, group=group)  # noqa: B023
            if not confirmed:
                raise CheckpointError(
                    f"rank {dist.get_global_rank(group, rank)}: {path}: {report}, but not as rank "
                    "0 reads it: the directory must be on storage that all ranks share"
                )
            return confirmed
    return ""


def agree_all(error: CheckpointError | None, *, group: ProcessGroup, where: str) -> None:
    """`hp_platform.agree`, with the same kind of error on all ranks."""
    try:
        agree(error, group=group, where=where)
    except PeerError as peer:
        raise CheckpointError(str(peer)) from None


def _damage(path: Path, manifest: Manifest, parts: list[Part]) -> str:
    try:
        verify_parts(path, manifest, parts)
    except DamageError as damage:
        return str(damage)
    return ""
