"""When the steps of a run ran.

Times are seconds since the epoch, by this machine's clock at one moment of the run and a monotonic
one around it; spans of ranks on one machine fit to well below a millisecond, of ranks on several
machines as well as their clocks are synchronised. On CUDA the times are those of the device: events
mark the steps, so that recording never holds up the host; reading the timeline does.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hp_schedule.ir import MetaStep
from hp_schedule.timeline import Span, Timeline

_Mark = Any
"""Seconds as a float, or a CUDA event."""


class Recorder:
    """Collects the spans of one rank's run.

    Args:
        rank: Rank in the pipeline.
        device: Where the stages compute.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[MetaStep, _Mark, _Mark]] = []
        self._origin = self._mark()
        self._epoch = time.time()

    @contextmanager
    def span(self, step: MetaStep) -> Iterator[None]:
        """Record what runs inside as one span of a step."""
        start = self._mark()
        yield
        self._marks.append((step, start, self._mark()))

    def timeline(self) -> Timeline:
        """Return the spans so far; on CUDA waits until the device has got there."""
        if self._cuda and self._marks:
            now = self._mark()
            now.synchronize()
            self._epoch = time.time() - self._origin.elapsed_time(now) / 1e3
        return Timeline(
            Span(self._rank, step, self._seconds(start), self._seconds(end))
            for step, start, end in self._marks
        )

    def _mark(self) -> _Mark:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark: _Mark) -> float:
        if isinstance(mark, float):
            elapsed: float = mark - self._origin
            return self._epoch + elapsed
        milliseconds: float = self._origin.elapsed_time(mark)
        return self._epoch + milliseconds / 1e3
