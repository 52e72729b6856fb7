"""Recording of the times at which the steps of a run run.

Times are seconds since the epoch, by this machine's clock at the end of the run and a monotonic one
before it; spans of ranks on one machine fit to well below a millisecond, of ranks on several
machines as well as their clocks are synchronised. On CUDA the times are those of the device: events
mark the steps, so that recording never holds up the host; reading the timeline does.
"""

import operator
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from hp_schedule.steps import MetaStep
from hp_schedule.timeline import Span, Timeline

Mark: TypeAlias = float | torch.cuda.Event
"""A moment: seconds of the monotonic clock on a host, an event on CUDA."""

_READINGS = 5
"""How often the two clocks are compared; the earliest result was disturbed the least."""


class Recorder:
    """Collects the spans of one rank's run.

    Attributes:
        mark: Function that returns the moment at which the device gets here.

    Args:
        rank: Rank in the pipeline.
        device: Device of the stages.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._spans: list[tuple[MetaStep, Mark, Mark]] = []
        self.mark: Callable[[], Mark] = _event if device.type == "cuda" else time.perf_counter
        self._origin = self.mark()

    def add(self, step: MetaStep, start: Mark) -> None:
        """Record a span of a step that ends now.

        Args:
            step: The step.
            start: Return value of `mark` when the step began.
        """
        self._spans.append((step, start, self.mark()))

    def timeline(self) -> Timeline:
        """Return the spans so far; on CUDA wait until the device has got there."""
        if not self._spans:
            return Timeline()
        nows, walls = self._read_clocks()
        marks = [mark for _, *both in self._spans for mark in both]
        seconds = _seconds_since(self._origin, [*nows, *marks])
        # The origin by the wall clock: too late by however long this thread is kept waiting
        # between two readings.
        epoch = min(map(operator.sub, walls, seconds))
        times = iter(seconds[_READINGS:])
        return Timeline(
            [
                Span(self._rank, step, epoch + start, epoch + end)
                for (step, *_), start, end in zip(self._spans, times, times, strict=True)
            ]
        )

    def _read_clocks(self) -> tuple[list[Mark], list[float]]:
        """Read both clocks several times: marks, and seconds since the epoch."""
        nows, walls = list[Mark](), list[float]()
        for _ in range(_READINGS):
            nows.append(now := self.mark())
            if isinstance(now, torch.cuda.Event):
                now.synchronize()
            walls.append(time.time())
        return nows, walls


def _seconds_since(origin: Mark, marks: Sequence[Mark]) -> list[float]:
    """Return the seconds from a mark to others, which the device has passed."""
    if isinstance(origin, torch.cuda.Event):
        events = [mark for mark in marks if isinstance(mark, torch.cuda.Event)]
        return [float(origin.elapsed_time(event)) / 1e3 for event in events]
    return [mark - origin for mark in marks if not isinstance(mark, torch.cuda.Event)]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
