"""When the steps of a run ran.

Times are seconds since the epoch, by this machine's clock at one moment of the run and a monotonic
one around it; spans of ranks on one machine fit to well below a millisecond, of ranks on several
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
        self._epoch = time.time()

    def add(self, step: MetaStep, start: _Mark) -> None:
        """Record a span of a step that ends now.

        Args:
            step: The step.
            start: What `mark` returned when it began.
        """
        self._marks.append((step, start, self.mark()))

    def timeline(self) -> Timeline:
        """Return the spans so far; on CUDA waits until the device has got there."""
        if self._cuda and self._marks:
            now = self.mark()
            now.synchronize()
            self._epoch = time.time() - self._origin.elapsed_time(now) / 1e3
        spans = []
        for step, *marks in self._marks:
            if self._cuda:
                start, end = (self._origin.elapsed_time(mark) / 1e3 for mark in marks)
            else:
                start, end = marks[0] - self._origin, marks[1] - self._origin
            spans.append(Span(self._rank, step, self._epoch + start, self._epoch + end))
        return Timeline(spans)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
