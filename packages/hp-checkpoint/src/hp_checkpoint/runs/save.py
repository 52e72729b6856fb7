"""Saving the state of a run after a step; what is older is removed when it is in place."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_checkpoint.collective import OnProgress, is_first, silent
from hp_checkpoint.extra import encode_extra
from hp_checkpoint.runs.directory import (
    commit,
    purge,
    remove_leftovers,
    step_name,
)
from hp_checkpoint.save import Source, save, sources_of
from hp_platform.failures.agreement import agreeing


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
        directory: Directory of the run's checkpoints, on storage that all ranks share; made if
            missing, in one that is there. No symbolic link.
        step: Number of training steps done, at least 0.
        tensors: What this rank holds, by global name. A plain tensor with the same name on several
            ranks has the same value on all of them and is saved once; a DTensor (placements Shard
            and Replicate) is saved in parts.
        extra: JSON for `Loaded.extra`; that of the first rank is saved.
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
    on_progress("plan", waiting=True)
    with agreeing(group=group, where="saving a checkpoint"):
        check_arguments(step=step, keep=keep, keep_every=keep_every)
        text = encode_extra(extra)
    return save_step(
        directory,
        lambda: sources_of(tensors),
        step=step,
        extra=text,
        group=group,
        keep=keep,
        keep_every=keep_every,
        on_progress=on_progress,
    )


def save_step(
    directory: Path,
    sources: Callable[[], Mapping[str, Source]],
    *,
    step: int,
    extra: bytes,
    group: ProcessGroup | None,
    keep: int,
    keep_every: int = 0,
    on_progress: OnProgress = silent,
) -> Path:
    """Write, read back and commit one checkpoint, then remove older ones; see `save_checkpoint`.

    Args:
        directory: Directory of the run's checkpoints.
        sources: Says what this rank can save, by global name.
        step: Number of training steps done, at least 0.
        extra: JSON to save beside the tensors, as `encode_extra` returns it.
        group: CPU group; None: this rank is alone.
        keep: See :func:`save_checkpoint`.
        keep_every: See :func:`save_checkpoint`.
        on_progress: Told what this rank does, chunk by chunk.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: On all ranks.
        RuntimeError: If a rank is gone.
    """
    if is_first(group):
        with contextlib.suppress(OSError):  # the save itself will say what is wrong
            remove_leftovers(directory)
    path = save(
        directory,
        step_name(step),
        sources,
        commit=lambda staging: commit(staging, step),
        group=group,
        step=step,
        extra=extra,
        on_progress=on_progress,
    )
    if is_first(group):
        purge(path, keep=keep, keep_every=keep_every)
    return path


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
