"""Recording of the times at which the steps of a run run.

Times are seconds since the epoch, by this machine's clock at the end of the run and a monotonic one
before it; spans of ranks on one machine fit to well below a millisecond, of ranks on several
machines as well as their clocks are synchronised. On CUDA the times are those of the device: events
mark the steps, so that recording never holds up the host; reading the timeline does.
"""

import time
from collections.abc import Callable

import torch

from hp_schedule.ir import MetaStep
from hp_schedule.timeline import Span, Timeline

Mark = Callable[[], float]
"""Returns seconds since the start of the run; on CUDA once the device has got there."""

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
        self.mark = _marks_of_device() if device.type == "cuda" else _marks_of_host()

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
        epoch = min(self._origin_by_wall_clock() for _ in range(_READINGS))
        return Timeline(
            [
                Span(self._rank, step, epoch + start(), epoch + end())
                for step, start, end in self._spans
            ]
        )

    def _origin_by_wall_clock(self) -> float:
        """Read both clocks: too late by however long this thread waits between them."""
        seconds = self.mark()()
        return time.time() - seconds


def _marks_of_host() -> Callable[[], Mark]:
    origin = time.perf_counter()

    def mark() -> Mark:
        seconds = time.perf_counter() - origin
        return lambda: seconds

    return mark


def _marks_of_device() -> Callable[[], Mark]:
    def event() -> torch.cuda.Event:
        made = torch.cuda.Event(enable_timing=True)
        made.record()
        return made

    def mark() -> Mark:
        now = event()

        def seconds() -> float:
            now.synchronize()
            return float(origin.elapsed_time(now)) / 1e3

        return seconds

    origin = event()
    return mark
