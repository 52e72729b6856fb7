"""Timelines: the spans of time in which steps ran, planned or measured."""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Self

from hp_schedule.ir import MetaStep


@dataclass(frozen=True, slots=True)
class Span:
    """One step of one rank on the clock.

    Attributes:
        rank: Rank of the pipeline that runs the step.
        step: A compute step, or the step that the rank stood waiting for: a receive or a send, the
            gathering of parameters (UNSHARD), the last reduction of gradients (REDUCE_GRAD), a copy
            from the host (RELOAD).
        start: Seconds from any origin common to all spans of a timeline.
        end: Not before start.
    """

    rank: int
    step: MetaStep
    start: float
    end: float


class Timeline(tuple[Span, ...]):
    """The spans of one run of a schedule, by rank and then by time.

    Args:
        spans: Spans in any order, of any number of ranks.
    """

    __slots__ = ()

    def __new__(cls, spans: Iterable[Span] = ()) -> Self:
        """Sort the spans."""
        return super().__new__(cls, sorted(spans, key=attrgetter("rank", "start")))

    @property
    def num_ranks(self) -> int:
        """Return one more than the highest rank with a span."""
        return 1 + max((span.rank for span in self), default=-1)

    @property
    def start(self) -> float:
        """Return the earliest start, 0 without spans."""
        return min((span.start for span in self), default=0.0)

    @property
    def end(self) -> float:
        """Return the latest end, 0 without spans."""
        return max((span.end for span in self), default=0.0)

    @property
    def makespan(self) -> float:
        """Return the seconds from the first start to the last end."""
        return self.end - self.start

    @property
    def bubble(self) -> tuple[float, ...]:
        """Return for each rank the share of the makespan in which it computed nothing, 0 to 1."""
        busy = [0.0] * self.num_ranks
        for span in self:
            if span.step.type.is_compute:
                busy[span.rank] += span.end - span.start
        whole = self.makespan
        return tuple(1 - part / whole if whole > 0 else 0.0 for part in busy)
