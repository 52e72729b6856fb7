"""Saving: written beside, read back, then renamed."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict_saver import save

from hp_platform import agree
from hp_train.checkpoint.directory import commit, purge, remove_leftovers
from hp_train.checkpoint.extra import encode_extra
from hp_train.checkpoint.manifest import DamageError
from hp_train.checkpoint.planners import StrictSavePlanner
from hp_train.checkpoint.together import agree_all, on_rank_zero, run_planned, verify_together
from hp_train.checkpoint.verify import read_manifest
from hp_train.checkpoint.writer import ManifestWriter
from hp_train.errors import CheckpointError


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    group: ProcessGroup,
    keep: int,
) -> Path:
    """Save tensors as `directory/step-<step>`. Every rank of `group` calls; blocking.

    Files are written to a directory of another name, put on the disk, read back and compared with
    their hashes, and only then given their final name. If anything fails, what was there before is
    as it was and the other directory is removed. A step that is saved again gets a new name with a
    number; nothing is overwritten.

    Args:
        directory: Of the run's checkpoints, on storage that all ranks share; made if missing.
        step: Of the training run.
        tensors: What this rank holds, by global name. A plain tensor with the same name on several
            ranks has the same value on all of them and is saved once; a DTensor (placements Shard
            and Replicate) is saved in parts.
        extra: JSON for :attr:`Loaded.extra`; that of the first rank is saved.
        group: CPU group. One of the default group's or a part of it.
        keep: Checkpoints to keep, at least 1; older ones are removed when this one is in place.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: On all ranks, in one line: the storage failed, or a tensor cannot be saved.
        ValueError: If `keep`, `step` or `extra` is wrong on this rank.
        RuntimeError: If a rank is gone, or such an argument is wrong on another rank.
    """
    error: ValueError | None = None
    text = b""
    try:
        _check_arguments(step=step, keep=keep)
        text = encode_extra(extra)
    except ValueError as raised:
        error = raised
    agree(error, group=group, where="saving a checkpoint")
    writer = ManifestWriter(directory, step=step, extra=text)
    if group.rank() == 0:
        with contextlib.suppress(OSError):  # the save itself will say what is wrong
            remove_leftovers(directory)
    try:
        with torch.no_grad():
            run_planned(
                lambda: save(
                    dict(tensors),
                    storage_writer=writer,
                    planner=StrictSavePlanner(),
                    process_group=group,
                ),
                group=group,
            )
        path = _commit(writer, step, group)
    finally:
        writer.discard()
    if group.rank() == 0:
        purge(path, keep=keep)
    return path


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
    if manifest is not None and (damage := verify_together(staging, manifest, group=group)):
        raise CheckpointError(f"{staging} was not written well: {damage}")
    return on_rank_zero(lambda: commit(staging, step), group=group)


def _check_arguments(*, step: int, keep: int) -> None:
    if keep < 1:
        raise ValueError(f"keep ({keep}) must be at least 1")
    if step < 0:
        raise ValueError(f"step ({step}) must be at least 0")
