"""Saving of the state of a run after a step, at once or by a thread that writes a copy of it.

Older checkpoints are removed afterwards.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hp_base.errors import CheckpointError
from hp_checkpoint.collective import OnProgress, agree_all, is_first, silent
from hp_checkpoint.json_file import encode_extra
from hp_checkpoint.runs.directory import (
    commit,
    purge,
    remove_leftovers,
    step_name,
)
from hp_checkpoint.save import Source, save, sources_of
from hp_platform import Event
from hp_platform.failures.messages import agreeing

_LOOK_SECONDS = 0.05


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


class BackgroundSaver:
    """A thread that saves copies of tensors, one save at a time.

    It gives the guarantees of :func:`save_checkpoint`, but errors are raised by :meth:`finish`. All
    ranks call :meth:`start` and :meth:`finish` together, in the same order.

    Args:
        directory: Directory of the run's checkpoints, on storage that all ranks share; made if
            missing, in an existing one. Must not be a symbolic link.
        group: CPU group over all ranks, with no other use during a save.
        keep: See :func:`save_checkpoint`.
        keep_every: See :func:`save_checkpoint`.

    Raises:
        ValueError: If `keep` or `keep_every` is wrong.
    """

    def __init__(
        self, directory: Path, *, group: ProcessGroup, keep: int, keep_every: int = 0
    ) -> None:
        check_arguments(step=0, keep=keep, keep_every=keep_every)
        self._directory, self._group = directory, group
        self._keep, self._keep_every = keep, keep_every
        self._copies: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._place = ("", False, 0)

    @property
    def is_under_way(self) -> bool:
        """Tell whether a save was started that was not finished."""
        return self._thread is not None

    @property
    def is_written(self) -> bool:
        """Tell whether :meth:`finish` would return at once on this rank."""
        return self._thread is not None and not self._thread.is_alive()

    def start(
        self, *, step: int, tensors: Mapping[str, Tensor], extra: Mapping[str, object]
    ) -> None:
        """Copy the tensors and begin to write; tensors may change when this returns.

        Args:
            step: Number of training steps done, at least 0.
            tensors: See :func:`save_checkpoint`. The values are copied now; names, shapes and
                placements are read later.
            extra: See :func:`save_checkpoint`.

        Raises:
            ValueError: If `step` or `extra` is wrong, which must be the same on all ranks: other
                ranks would wait for the time-out of the group.
            RuntimeError: If the previous save was not finished.
        """
        if self._thread is not None:
            raise RuntimeError("a save must be finished before another one is started")
        check_arguments(step=step, keep=self._keep, keep_every=self._keep_every)
        text = encode_extra(extra)
        copied, error = [], None
        try:
            copied = self._copy(tensors)
        except (RuntimeError, MemoryError) as raised:  # out of memory, on this rank only
            error = CheckpointError(f"cannot copy the state to host memory: {raised}")
        # The plan needs shapes and placements only, which steps do not change.
        named = dict(tensors)

        def work() -> None:
            try:
                agree_all(error, group=self._group, where="saving a checkpoint")
                for event in copied:
                    event.synchronize()
                self._path = save_step(
                    self._directory,
                    lambda: sources_of(named, self._copies),
                    step=step,
                    extra=text,
                    group=self._group,
                    keep=self._keep,
                    keep_every=self._keep_every,
                    on_progress=self._note_progress,
                )
            except BaseException as raised:  # noqa: BLE001 - `finish` raises it
                self._error = raised

        self._path = self._error = None
        self._place = ("plan", True, 0)
        self._thread = threading.Thread(target=work, name=f"save step {step}", daemon=True)
        self._thread.start()

    def finish(self, *, on_progress: OnProgress = silent) -> Path:
        """Wait for the end of the save.

        Args:
            on_progress: Function that is called as long as the thread makes progress.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: On all ranks, if the save failed; older checkpoints are intact.
            RuntimeError: If no save was started, or a rank is gone.
        """
        thread, told = self._thread, None
        if thread is None:
            raise RuntimeError("a save must be started before it is finished")
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            if self._place != told:
                told = self._place
                on_progress(told[0], waiting=told[1])
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        assert self._path is not None, "a save ends with a path or an error"
        return self._path

    def _note_progress(self, phase: str, *, waiting: bool = False) -> None:
        self._place = (phase, waiting, self._place[2] + 1)

    def _copy(self, tensors: Mapping[str, Tensor]) -> list[Event]:
        """Queue copies of all local parts.

        A thread that read the live tensors would save a mixture of two steps. So it writes copies
        in host memory, which precede all later changes of the tensors: on the CPU because copying
        blocks, on CUDA because the copies are queued on the stream of the next update of the
        weights. The memory of the copies is reused by the next save.

        Returns:
            Events to wait for before the copies are read.
        """
        devices: set[torch.device] = set()
        copies: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            local = tensor.detach()
            local = local.to_local() if isinstance(local, DTensor) else local
            copy = self._copies.get(name)
            if copy is None or copy.shape != local.shape or copy.dtype != local.dtype:
                copy = torch.empty(
                    local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda
                )
            copies[name] = copy.copy_(local, non_blocking=True)
            devices.add(local.device)
        self._copies = copies
        events = [Event(device) for device in devices]
        for event in events:
            event.record()
        return events
