"""Profiles of single steps, on request: where the time goes, and where the memory.

A step of `train.profile` leaves in `profile/` of the run directory, for each rank of
`train.profile_ranks` a packed trace for Perfetto or chrome://tracing, and on a GPU a snapshot of
CUDA memory for pytorch.org/memory_viz. On a CPU allocations are in the trace. Whatever goes wrong
with it is told and does not end the run.
"""

import gzip
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from hp_base.errors import HpError
from hp_platform import _internals
from hp_trainer.config import TrainConfig
from hp_trainer.launch.task import Worker

FOLDER = "profile"
_MOST_BYTES = 1 << 30
"""Largest trace or snapshot, before it is packed, that is kept."""
_MOST_ALLOCATIONS = 100_000
_PIECE = 1 << 20

T = TypeVar("T")


class Profiler:
    """Profiles those steps that the config names, on those ranks.

    Args:
        train: The `train` section of the config.
        worker: This process.
        device: Device on which this rank computes.
        tell: Function that shows a person a line of text.
    """

    def __init__(
        self,
        train: TrainConfig,
        worker: Worker,
        device: torch.device,
        *,
        tell: Callable[[str], object],
    ) -> None:
        is_chosen = worker.info.rank in (train.profile_ranks or (0,))
        self._steps = frozenset(train.profile if is_chosen else ())
        self._worker, self._device, self._tell = worker, device, tell

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Profile a step of training, if that was asked for.

        Args:
            step: Number of the step, counted from 1.
        """
        recording = None
        if step in self._steps:
            recording = self._tried(step, lambda: _Recording(self._device))
        try:
            yield
        except BaseException:
            if recording is not None:
                self._tried(step, recording.stop)
            raise
        if recording is not None:
            self._tried(step, lambda: self._write(step, recording))

    def _write(self, step: int, recording: "_Recording") -> None:
        self._worker.heartbeats.beat(step=step, phase="write profile")
        name = f"step-{step:08d}-rank-{self._worker.info.rank}"
        with tempfile.TemporaryDirectory(prefix="hp-profile-") as scratch:
            trace = Path(scratch, "trace.json")
            with recording.stopped() as traced:
                traced.export_chrome_trace(str(trace))
                self._keep(f"{name}.json.gz", trace)
                if recording.has_memory:
                    snapshot = Path(scratch, "memory.pickle")
                    _internals.dump_memory_history(str(snapshot))
                    self._keep(f"{name}-memory.pickle.gz", snapshot)

    def _keep(self, name: str, file: Path) -> None:
        """Pack a file into the run directory, unless it is too large."""
        size = file.stat().st_size
        if size > _MOST_BYTES:
            raise HpError(f"{name} ({size} bytes unpacked) must not exceed {_MOST_BYTES} bytes")
        folder = self._worker.folder.sub(FOLDER, make=True)
        with (
            folder,
            file.open("rb") as source,
            folder.replacing(name) as target,
            gzip.GzipFile(fileobj=target, mode="wb", compresslevel=1, mtime=0) as packed,
        ):
            shutil.copyfileobj(source, packed, _PIECE)
        target.close()

    def _tried(self, step: int, action: Callable[[], T]) -> T | None:
        try:
            return action()
        except Exception as error:  # noqa: BLE001 - a profile is no reason to end a run
            rank = self._worker.info.rank
            self._tell(f"warning: step {step} of rank {rank} was not profiled: {error}")
            return None


class _Recording:
    """A step that is being profiled."""

    def __init__(self, device: torch.device) -> None:
        self.has_memory = device.type == "cuda"
        self._device = device
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self.has_memory]
        # Every allocation on the host of a GPU's step would be noise.
        self._profile = profile(
            activities=activities, profile_memory=not self.has_memory, acc_events=True
        )
        if self.has_memory:
            _internals.record_memory_history(most=_MOST_ALLOCATIONS)
        try:
            self._profile.start()
        except BaseException:
            self._forget()
            raise

    def stop(self) -> None:
        """Drop what was recorded."""
        with self.stopped():
            pass

    @contextmanager
    def stopped(self) -> Iterator[profile]:
        """Return what was recorded; forgotten at the end."""
        try:
            if self.has_memory:
                torch.cuda.synchronize(self._device)  # what a step has launched belongs to it
            self._profile.stop()
            yield self._profile
        finally:
            self._forget()

    def _forget(self) -> None:
        if self.has_memory:
            _internals.end_memory_history()
