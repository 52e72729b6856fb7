"""Saving in the background: a copy is made at the step, and a thread writes the copy."""

import threading
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hp_base.errors import CheckpointError
from hp_checkpoint.collective import OnProgress, agree_all, silent
from hp_checkpoint.json_file import encode_extra
from hp_checkpoint.runs.save import check_arguments, save_step
from hp_checkpoint.save import sources_of
from hp_platform import Event

_LOOK_SECONDS = 0.05


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
