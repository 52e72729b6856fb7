"""U-shaped pipelines: the first rank has the first stage and the last.

The owner of the data keeps inputs, labels and both ends of the model; the ranks between hold the
middle. With one stage more than ranks, the chain 0, 1, .., P - 1, 0 is a ring.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, zip_longest

from hp_schedule.costs import Costs
from hp_schedule.generators.closed_form import ClosedForm, TimedRow
from hp_schedule.generators.common import backwards, build, check_counts, forwards
from hp_schedule.passes.clock import ComputeClock
from hp_schedule.placement import PlacementStyle
from hp_schedule.schedule import Schedule


def u_shape(
    num_ranks: int,
    *,
    num_microbatches: int,
    warm_up: int | None = None,
    turns: int | None = None,
    extra: int = 0,
) -> Schedule:
    """Return a 1F1B schedule of num_ranks + 1 stages, the first and the last of them on rank 0.

    Rank 0 runs `warm_up` forwards of its first stage; then `turns` times forward and backward of
    its last stage; then, in turn, a forward of the first, forward and backward of the last and a
    backward of the first. The other ranks run 1F1B, rank r with num_ranks - r + extra forwards
    before the first pair of a forward and a backward. The defaults are MindSpeed-MM's; more of each
    hide more latency between rank 0 and its neighbours and hold more activations.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1.
        warm_up: At least 1; default num_ranks + 1.
        turns: From 0 to warm_up; default (4 * num_ranks + 5) // 6.
        extra: At least 0.

    Raises:
        DeadlockError: If the numbers contradict each other: ranks may wait for more microbatches
            than rank 0 has begun.
        ValueError: If a number is out of its range.
    """
    return u_shape_form(
        num_ranks, num_microbatches=num_microbatches, warm_up=warm_up, turns=turns, extra=extra
    ).schedule()


def u_shape_form(
    num_ranks: int,
    *,
    num_microbatches: int,
    warm_up: int | None = None,
    turns: int | None = None,
    extra: int = 0,
) -> "UShape":
    """Return the form of `u_shape`; the times of its rows are found together."""
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    warm_up = num_ranks + 1 if warm_up is None else warm_up
    turns = min(warm_up, (4 * num_ranks + 5) // 6) if turns is None else turns
    if warm_up < 1:
        raise ValueError(f"warm_up ({warm_up}) must be >= 1")
    if not 0 <= turns <= warm_up:
        raise ValueError(f"turns ({turns}) must be >= 0 and <= warm_up ({warm_up})")
    if extra < 0:
        raise ValueError(f"extra ({extra}) must be >= 0")
    return UShape(num_ranks, num_microbatches, warm_up=warm_up, turns=turns, extra=extra)


@dataclass(frozen=True)
class UShape(ClosedForm):
    """Rows of a ring; see `u_shape`."""

    style: PlacementStyle = "u"
    warm_up: int = field(kw_only=True)
    turns: int = field(kw_only=True)
    extra: int = field(kw_only=True)

    @property
    def num_stages(self) -> int:
        """One more than ranks."""
        return self.num_ranks + 1

    def timed_row(self, rank: int) -> TimedRow:
        """Return the compute steps of a rank with the times at which they end."""
        return self._rows[rank]

    @cached_property
    def _rows(self) -> list[TimedRow]:
        rows = [self._first_row(), *map(self._row, range(1, self.num_ranks))]
        schedule = build(
            rows,
            num_stages=self.num_stages,
            num_microbatches=self.num_microbatches,
            style=self.style,
        )
        finish = ComputeClock(schedule, Costs()).finish
        return [list(zip(times, row, strict=True)) for times, row in zip(finish, rows, strict=True)]

    def _first_row(self) -> list[int]:
        microbatches, last = range(self.num_microbatches), self.num_ranks
        starts, ends = forwards(0, microbatches), backwards(0, microbatches)
        turns = list(zip(forwards(last, microbatches), backwards(last, microbatches), strict=True))
        first_turns = chain.from_iterable(turns[: self.turns])
        steady = zip_longest(starts[self.warm_up :], turns[self.turns :], ends, fillvalue=None)
        row = [*starts[: self.warm_up], *first_turns]
        for start, turn, end in steady:
            row.extend([start] if start is not None else [])
            row.extend(turn or ())
            row.extend([end] if end is not None else [])
        return row

    def _row(self, rank: int) -> list[int]:
        microbatches = range(self.num_microbatches)
        warm_up = self.num_ranks - rank + self.extra
        shifted = [-1] * warm_up + backwards(rank, microbatches)
        columns = zip_longest(forwards(rank, microbatches), shifted, fillvalue=-1)
        return [code for code in chain.from_iterable(columns) if code >= 0]
