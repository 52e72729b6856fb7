"""When the steps of a run ran.

Times are seconds since the epoch, by this machine's clock at the end of the run and a monotonic one
before it; spans of ranks on one machine fit to well below a millisecond, of ranks on several
machines as well as their clocks are synchronised. On CUDA the times are those of the device: events
mark the steps, so that recording never holds up the host; reading the timeline does.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from hp_schedule.ir import MetaStep
from hp_schedule.timeline import Span, Timeline

_Mark = Any
"""Seconds as a float, or a CUDA event."""

_READINGS = 5
"""How often the two clocks are compared; the earliest result was disturbed the least."""


class Recorder:
    """Collects the spans of one rank's run.

    Attributes:
        mark: Function that returns the moment at which the device gets here.

    Args:
        rank: Rank in the pipeline.
        device: Where the stages compute.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._cuda = device.type == "cuda"
        self.mark: Callable[[], _Mark] = _event if self._cuda else time.perf_counter
        self._marks: list[tuple[MetaStep, _Mark, _Mark]] = []
        self._origin: _Mark = self.mark()

    def add(self, step: MetaStep, start: _Mark) -> None:
        """Record a span of a step that ends now.

        Args:
            step: The step.
            start: What `mark` returned when it began.
        """
        self._marks.append((step, start, self.mark()))

    def timeline(self) -> Timeline:
        """Return the spans so far; on CUDA waits until the device has got there."""
        if not self._marks:
            return Timeline()
        epoch = min(self._origin_by_wall_clock() for _ in range(_READINGS))
        marks, origin = self._marks, self._origin
        if self._cuda:
            seconds = self._seconds
            marks = [(step, seconds(start), seconds(end)) for step, start, end in marks]
            origin = 0.0
        return Timeline(
            [
                Span(self._rank, step, epoch + (start - origin), epoch + (end - origin))
                for step, start, end in marks
            ]
        )

    def _origin_by_wall_clock(self) -> float:
        """Read both clocks: too late by however long this thread is kept waiting between them."""
        now = self.mark()
        if self._cuda:
            now.synchronize()
        return time.time() - self._seconds(now)

    def _seconds(self, mark: _Mark) -> float:
        if self._cuda:
            return float(self._origin.elapsed_time(mark)) / 1e3
        return float(mark - self._origin)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
