"""Closed forms: schedules whose rows can be made one by one, and helpers to make rows.

A closed form says for every step in which order it runs on its rank and at which logical time it
ends. Logical time is no duration, it is a proof: it grows along every row, and from the step that
makes a value to the step that reads it. `add_send_recv` needs no more than that, so a rank that
knows the logical times of its own steps and of its neighbours' lays out its own sends and receives
exactly as it would in a pass over all ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from hp_schedule.costs import Costs
from hp_schedule.packing import BWD, FWD, MICROBATCH_MASK, encode
from hp_schedule.passes.communication import add_send_recv, lay_out
from hp_schedule.placement import PlacementStyle, generate_stage_to_rank_mapping
from hp_schedule.schedule import Row, Schedule
from hp_schedule.simulation.recurrence import compute_clock


def forwards(stage: int, microbatches: Iterable[int]) -> list[int]:
    """Return the forward steps of a stage for some microbatches."""
    return [encode(FWD, stage, microbatch) for microbatch in microbatches]


def backwards(stage: int, microbatches: Iterable[int]) -> list[int]:
    """Return the full backward steps of a stage for some microbatches."""
    return [encode(BWD, stage, microbatch) for microbatch in microbatches]


def check_counts(**counts: int) -> None:
    """Raise ValueError unless every count is at least 1, and no more than steps can name."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} ({value}) must be >= 1")
        if value > MICROBATCH_MASK + 1:
            raise ValueError(f"{name} ({value}) must be <= {MICROBATCH_MASK + 1}")


TimedRow = list[tuple[float, int]]
"""One rank's steps in order: the logical time at which each ends, and its code."""


@dataclass(frozen=True)
class ClosedForm(ABC):
    """A rule for the row of any rank.

    Attributes:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of a step.
        num_stages_per_rank: Stages on every rank.
        style: Placement of the stages.
    """

    num_ranks: int
    num_microbatches: int
    num_stages_per_rank: int = 1
    style: PlacementStyle = "loop"

    @abstractmethod
    def timed_row(self, rank: int) -> TimedRow:
        """Return the compute steps of a rank with their logical times."""

    @property
    def num_stages(self) -> int:
        """Return the number of stages of all ranks, one more in a U."""
        return self.num_ranks * self.num_stages_per_rank + (self.style == "u")

    def row(self, rank: int, *, communication: bool = True) -> Row:
        """Return the row of one rank, made from the rules of its own row and its neighbours'.

        Args:
            rank: Rank of the pipeline.
            communication: Whether to insert sends and receives.

        Raises:
            ValueError: If the rank does not exist.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank ({rank}) must be >= 0 and < num_ranks ({self.num_ranks})")
        if not communication:
            return Row(code for _, code in self.timed_row(rank))
        neighbours = {source for source, target in self._empty.edges if target == rank}
        schedule, times = self._timed({rank, *neighbours})
        return Row(next(lay_out(schedule, times, [rank])))

    def schedule(self, *, communication: bool = False) -> Schedule:
        """Return all rows.

        Args:
            communication: Whether to insert sends and receives, laid out along logical time, so
                that every row equals `row`'s.
        """
        schedule, times = self._timed(range(self.num_ranks))
        return add_send_recv(schedule, times=times) if communication else schedule

    def _timed(self, ranks: Iterable[int]) -> tuple[Schedule, list[list[float]]]:
        """Return the schedule with the rows of some ranks, the others empty, and their times."""
        rows = [Row()] * self.num_ranks
        times: list[list[float]] = [[] for _ in rows]
        for rank in ranks:
            timed = self.timed_row(rank)
            rows[rank] = Row(code for _, code in timed)
            times[rank] = [time for time, _ in timed]
        return replace(self._empty, steps=tuple(rows)), times

    @cached_property
    def _empty(self) -> Schedule:
        places = generate_stage_to_rank_mapping(self.num_ranks, self.num_stages, self.style)
        return Schedule(
            steps=(Row(),) * self.num_ranks,
            stage_to_rank=tuple(places.values()),
            num_microbatches=self.num_microbatches,
        )


@dataclass(frozen=True)
class Vee(ClosedForm):
    """A rule for two stages on each rank, the second ones in reverse order."""

    num_stages_per_rank: int = 2
    style: PlacementStyle = "v"

    def arms(self, rank: int) -> tuple[int, int]:
        """Return a rank's stage on the way to the last rank and its stage on the way back."""
        return rank, self.num_stages - 1 - rank


@dataclass(frozen=True)
class GivenRows(ClosedForm):
    """Rows that are known without their times; a simulated run of all rows finds the times.

    Attributes:
        rows: The packed compute steps of each rank, in order.

    Raises:
        DeadlockError: From the first row or schedule on, if the order contradicts itself.
    """

    rows: Sequence[Sequence[int]] = field(kw_only=True)

    def timed_row(self, rank: int) -> TimedRow:
        """Return the compute steps of a rank with the times at which they end."""
        return list(zip(self._finish[rank], self.rows[rank], strict=True))

    @cached_property
    def _finish(self) -> list[list[float]]:
        _, finish = compute_clock(self._empty.with_rows(self.rows), Costs())
        return finish
