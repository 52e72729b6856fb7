"""Timelines, planned or measured: the times in which steps ran; costs from measured ones."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Self

from hp_schedule.costs import Costs, Latency
from hp_schedule.steps import MetaStep, MetaStepType


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


_Samples = Mapping[tuple[int, int], Sequence[float]]
"""Seconds by stage and microbatch."""


def measured_costs(
    timeline: Timeline,
    *,
    num_stages: int,
    num_microbatches: int,
    per_microbatch: bool = False,
    latency: Latency = 0.0,
) -> Costs:
    """Return the mean durations of a run's steps.

    A full backward is priced as an input gradient and a weight gradient: by the parts that ran
    apart, and where none did, as an input gradient alone, whose sum is the same. Of an overlap each
    half is taken for half of it, unless the halves' stages ran such steps on their own as well. A
    stage of which no forward ran again is priced as if that took as long as the forward.

    Args:
        timeline: Timeline with the spans of all ranks, of one run or several.
        num_stages: Number of stages of the schedule.
        num_microbatches: Number of microbatches of the schedule.
        per_microbatch: Whether microbatches differ, for example in length; otherwise the mean
            over all of a stage stands for each.
        latency: Latency of a message, in the unit of the timeline, which does not tell it; see
            `Costs`.

    Raises:
        ValueError: If a stage has no forward in the timeline.
    """
    size = (num_stages, num_microbatches if per_microbatch else 1)
    forward, full, first, second, again = (
        _table(_samples(timeline, kind), *size)
        for kind in (
            MetaStepType.FWD,
            MetaStepType.BWD,
            MetaStepType.BWD_INPUT,
            MetaStepType.BWD_WEIGHT,
            MetaStepType.RECOMPUTE,
        )
    )
    for stage, row in enumerate(forward):
        if None in row:
            raise ValueError(f"forwards of stage {stage} (0) must be >= 1 in the timeline")
    input_grad = [
        [whole if part is None else part for part, whole in zip(*rows, strict=True)]
        for rows in zip(first, full, strict=True)
    ]
    ran_again = any(value is not None for row in again for value in row)
    repeated = [
        [once if part is None else part for part, once in zip(*rows, strict=True)]
        for rows in zip(again, forward, strict=True)
    ]
    return Costs(
        forward=_filled(forward),
        input_grad=_filled(input_grad),
        weight_grad=_filled(second),
        recompute=_filled(repeated) if ran_again else None,
        latency=latency,
    )


def _samples(timeline: Timeline, kind: MetaStepType) -> _Samples:
    alone: dict[tuple[int, int], list[float]] = {}
    shared: dict[tuple[int, int], list[float]] = {}
    for span in timeline:
        share = (span.end - span.start) / max(1, len(span.step.sub_steps))
        for leaf in span.step.leaves():
            if leaf.type is kind:
                found = shared if span.step.sub_steps else alone
                key = (leaf.stage_index or 0, leaf.microbatch_index or 0)
                found.setdefault(key, []).append(share)
    known = {stage for stage, _ in alone}
    return alone | {key: value for key, value in shared.items() if key[0] not in known}


def _table(samples: _Samples, num_stages: int, width: int) -> list[list[float | None]]:
    """Return the means by stage and, if width is more than 1, microbatch; None for none."""
    table: list[list[float | None]] = []
    for stage in range(num_stages):
        mine = {key[1]: fmean(values) for key, values in samples.items() if key[0] == stage}
        mean = fmean(mine.values()) if mine else None
        table.append([mean if width == 1 else mine.get(index, mean) for index in range(width)])
    return table


def _filled(table: Sequence[Sequence[float | None]]) -> list[float | Sequence[float]]:
    """Return numbers per stage, or per stage and microbatch; 0 where there are none."""
    rows = [[0.0 if value is None else value for value in row] for row in table]
    return [row[0] if len(row) == 1 else row for row in rows]
