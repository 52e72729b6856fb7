"""Saving: written beside, read back, then renamed."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import agree
from hp_train.checkpoint.directory import commit, purge, remove_leftovers
from hp_train.checkpoint.extra import encode_extra
from hp_train.checkpoint.planned import save_planned
from hp_train.checkpoint.planners import StrictSavePlanner
from hp_train.checkpoint.together import (
    OnProgress,
    agree_all,
    on_rank_zero,
    silent,
    verify_together,
)
from hp_train.checkpoint.verify import read_manifest
from hp_train.checkpoint.writer import ManifestWriter
from hp_train.errors import CheckpointError
from hp_train.folder import DamageError


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    group: ProcessGroup,
    keep: int,
    keep_every: int = 0,
    on_progress: OnProgress = silent,
) -> Path:
    """Save tensors as `directory/step-<step>`. Every rank of `group` calls; blocking.

    Files are written to a directory of another name, put on the disk, read back and compared with
    their hashes, and only then given their final name. If anything fails, what was there before is
    as it was and the other directory is removed. A step that is saved again gets a new name with a
    number; nothing is overwritten.

    Args:
        directory: Of the run's checkpoints, on storage that all ranks share; made if missing, in
            one that is there. No symbolic link.
        step: Of the training run.
        tensors: What this rank holds, by global name. A plain tensor with the same name on several
            ranks has the same value on all of them and is saved once; a DTensor (placements Shard
            and Replicate) is saved in parts.
        extra: JSON for :attr:`Loaded.extra`; that of the first rank is saved.
        group: CPU group. One of the default group's or a part of it.
        keep: Checkpoints to keep, at least 1; older ones are removed when this one is in place.
        keep_every: Those of steps that are a multiple of it are kept besides. 0: none.
        on_progress: Told what this rank does, chunk by chunk.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: On all ranks, in one line: the storage failed, or a tensor cannot be saved.
        ValueError: If `keep`, `keep_every`, `step` or `extra` is wrong on this rank.
        RuntimeError: If a rank is gone, or such an argument is wrong on another rank.
    """
    error: ValueError | None = None
    text = b""
    try:
        check_arguments(step=step, keep=keep, keep_every=keep_every)
        text = encode_extra(extra)
    except ValueError as raised:
        error = raised
    on_progress("plan", waiting=True)
    agree(error, group=group, where="saving a checkpoint")
    writer = ManifestWriter(directory, step=step, extra=text, on_progress=on_progress)
    path = write_checkpoint(writer, StrictSavePlanner(), tensors, step=step, group=group)
    if group.rank() == 0:
        purge(path, keep=keep, keep_every=keep_every)
    return path


def write_checkpoint(
    writer: ManifestWriter,
    planner: StrictSavePlanner,
    tensors: Mapping[str, Tensor],
    *,
    step: int,
    group: ProcessGroup,
) -> Path:
    """Write, read back and commit one checkpoint; see :func:`save_checkpoint`.

    Args:
        writer: New.
        planner: New.
        tensors: What this rank holds, by global name.
        step: Of the training run.
        group: CPU group.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: On all ranks.
        RuntimeError: If a rank is gone.
    """
    if group.rank() == 0:
        with contextlib.suppress(OSError):  # the save itself will say what is wrong
            remove_leftovers(writer.directory)
    try:
        with torch.no_grad():
            save_planned(tensors, writer, planner, group=group)
        return _commit(writer, step, group)
    finally:
        writer.discard()


def check_arguments(*, step: int, keep: int, keep_every: int) -> None:
    """Refuse impossible ones.

    Raises:
        ValueError: Naming the first.
    """
    if keep < 1:
        raise ValueError(f"keep ({keep}) must be at least 1")
    if keep_every < 0:
        raise ValueError(f"keep_every ({keep_every}) must be at least 0")
    if step < 0:
        raise ValueError(f"step ({step}) must be at least 0")


def _commit(writer: ManifestWriter, step: int, group: ProcessGroup) -> Path:
    """Read back what was written, then rename it."""
    staging = writer.staging
    if staging is None:
        raise CheckpointError("a staging directory must exist before a checkpoint is committed")
    error = None
    manifest = None
    try:
        manifest = read_manifest(staging)
    except (DamageError, OSError) as raised:
        error = CheckpointError(f"{staging}: {raised}")
    agree_all(error, group=group, where="reading a new checkpoint back")
    if manifest is not None:
        damage = verify_together(staging, manifest, group=group, on_progress=writer.on_progress)
        if damage:
            raise CheckpointError(f"{staging} was not written well: {damage}")
    return Path(on_rank_zero(lambda: str(commit(staging, step)), of=str, group=group))
