"""Saving: written beside, read back, then renamed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict_saver import save

from hp_platform import agree
from hp_train.checkpoint.directory import commit, purge, remove_leftovers
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
    error = _argument_error(step, keep) or _extra_error(extra)
    agree(error, group=group, where="saving a checkpoint")
    writer = ManifestWriter(directory, step=step, extra=extra)
    if group.rank() == 0:
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


def _argument_error(step: int, keep: int) -> ValueError | None:
    if keep < 1:
        return ValueError(f"keep ({keep}) must be at least 1")
    if step < 0:
        return ValueError(f"step ({step}) must be at least 0")
    return None


def _extra_error(extra: Mapping[str, Any]) -> ValueError | None:
    """Say why JSON would not give back what it is given: NaN, keys that are no strings.

    Tuples come back as lists, which is let pass.
    """
    try:
        restored = msgspec.json.decode(msgspec.json.encode(extra))
    except (msgspec.MsgspecError, TypeError, OverflowError, RecursionError) as error:
        return ValueError(f"extra must be JSON: {error}")
    if not _same(extra, restored):
        return ValueError("extra must be JSON: string keys, finite numbers, no other types")
    return None


def _same(value: object, restored: object) -> bool:
    if isinstance(value, Mapping) and isinstance(restored, dict):
        return value.keys() == restored.keys() and all(
            _same(value[key], restored[key]) for key in restored
        )
    if isinstance(value, list | tuple) and isinstance(restored, list):
        return len(value) == len(restored) and all(map(_same, value, restored))
    return type(value) is type(restored) and value == restored
