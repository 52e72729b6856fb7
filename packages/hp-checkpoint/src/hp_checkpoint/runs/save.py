"""Saving of the state of a run after a step; older checkpoints are removed afterwards."""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_checkpoint.collective import OnProgress, is_first, silent
from hp_checkpoint.json_file import encode_extra
from hp_checkpoint.runs.directory import (
    commit,
    purge,
    remove_leftovers,
    step_name,
)
from hp_checkpoint.save import Source, save, sources_of
from hp_platform.failures.messages import agreeing


def save_checkpoint(
    directory: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, object],
    group: ProcessGroup,
    keep: int,
    keep_every: int = 0,
    on_progress: OnProgress = silent,
) -> Path:
    """Save tensors as `directory/step-<step>`. Every rank of `group` calls; blocking.

    Files are written to a directory of another name, flushed to the disk, read back and compared
    with their hashes; then the directory gets its final name. If anything fails, that directory is
    removed, and older checkpoints are unchanged. A step that is saved again gets a new name with a
    number; nothing is overwritten.

    Args:
        directory: Directory of the run's checkpoints, on storage that all ranks share; made if
            missing, in an existing one. Must not be a symbolic link.
        step: Number of training steps done, at least 0.
        tensors: Tensors of this rank, by global name. A plain tensor with the same name on several
            ranks has the same value on all of them and is saved once; a DTensor (placements Shard
            and Replicate) is saved in parts.
        extra: JSON object for `Loaded.extra`; that of the first rank is saved.
        group: CPU group of all ranks, or of a part of them.
        keep: Number of checkpoints to keep, at least 1; older ones are removed after the save.
        keep_every: Checkpoints of steps that are a multiple of it are kept as well; 0: none.
        on_progress: Function that is called for each chunk.

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
        sources: Function that returns the sources of this rank, by global name.
        step: Number of training steps done, at least 0.
        extra: JSON to save beside the tensors, as `encode_extra` returns it.
        group: CPU group; None: this rank is alone.
        keep: See :func:`save_checkpoint`.
        keep_every: See :func:`save_checkpoint`.
        on_progress: Function that is called for each chunk.

    Returns:
        The path of the checkpoint.

    Raises:
        CheckpointError: On all ranks.
        RuntimeError: If a rank is gone.
    """
    if is_first(group):
        with contextlib.suppress(OSError):  # the save itself will raise
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
    """Check the arguments of a save.

    Raises:
        ValueError: If one is out of range; names it.
    """
    if keep < 1:
        raise ValueError(f"keep ({keep}) must be at least 1")
    if keep_every < 0:
        raise ValueError(f"keep_every ({keep_every}) must be at least 0")
    if step < 0:
        raise ValueError(f"step ({step}) must be at least 0")
