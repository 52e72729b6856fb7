"""What GPipe, 1F1B, their interleaved and their zero-bubble forms have in common.

Write down the forwards of a rank in a row, its backwards in a second row shifted by its warm-up,
and, where the backward is split, its weight gradients in a third row shifted further by a delay.
Read column by column, that is the order in which the rank runs. Rank 1 of 3, 1F1B, 4 microbatches:

    F0 F1 F2 F3
       B0 B1 B2 B3          -> F0 F1 B0 F2 B1 F3 B2 B3

With several stages on a rank, microbatches go through in rounds: a rank takes a round through its
first stage, then through its second and so on, before the next round enters.

[Note: Logical time of rounds] With P ranks, `hop` slots from a rank to the next and 4 slots from
a column to the next, a step in column x of rank r ends at 4 x + hop * r (+ 1 for B, + 2 for W). The
result of a forward goes to the same column of the next rank: hop > 0. A gradient goes to the rank
before, `step` columns later, where `step` is how much longer the warm-up is there: 4 step > hop. A
round of R microbatches that leaves the last rank comes back to the first R columns later:
4 R > hop (P - 1), and the other way 4 R + hop (P - 1) > 4 step (P - 1). With hop = 2 step all of
this holds if 2 R > step (P - 1).

A shorter round may only be the last, behind rounds of at least P. While there are forwards its
columns are stretched; its backwards turn only where no forward is left. From there on rows hold
backwards only, and are timed as if every round were at least as long as P: 2 slots from one to the
next, and 2 from a rank to the one before. So are schedules whose warm-up is all forwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest

from hp_schedule.generators.closed_form import ClosedForm, TimedRow
from hp_schedule.generators.common import backwards, check_counts, forwards
from hp_schedule.packing import BWD, BWD_INPUT, BWD_WEIGHT

_COLUMN = 4


@dataclass(frozen=True)
class Rounds(ClosedForm):
    """The closed form; see the module.

    Attributes:
        rounds: The microbatches of each round.
        warm_ups: For each rank the forwards before the first column with a backward; None for
            schedules without backwards.
        delays: For each rank the backwards before the first column with a weight gradient; None
            where backwards are whole.
    """

    rounds: Sequence[range] = field(kw_only=True)
    warm_ups: Sequence[int] | None = field(kw_only=True)
    delays: Sequence[int] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_counts(
            num_ranks=self.num_ranks,
            num_microbatches=self.num_microbatches,
            num_stages_per_rank=self.num_stages_per_rank,
        )

    def timed_row(self, rank: int) -> TimedRow:
        """Return the compute steps of a rank with their logical times."""
        local_stages = range(rank, self.num_stages, self.num_ranks)
        fwd = [f for part in self.rounds for stage in local_stages for f in forwards(stage, part)]
        warm_up, bwd, weights = 0, list[int](), list[int]()
        if self.warm_ups is not None:
            warm_up = self.warm_ups[rank]
            bwd = [
                b
                for part in self.rounds
                for stage in reversed(local_stages)
                for b in backwards(stage, part)
            ]
        if self.delays is not None:
            weights = [b - BWD + BWD_WEIGHT for b in bwd]
            bwd = [b - BWD + BWD_INPUT for b in bwd]
        shifts = (0, warm_up, warm_up + (self.delays[rank] if self.delays else 0))
        lines = [
            [-1] * shift + codes for shift, codes in zip(shifts, (fwd, bwd, weights), strict=True)
        ]
        times = self._times(rank, warm_up, max(map(len, lines)))
        return [
            (time + line, code)
            for time, column in zip(times, zip_longest(*lines, fillvalue=-1), strict=False)
            for line, code in enumerate(column)
            if code >= 0
        ]

    def _times(self, rank: int, warm_up: int, num_columns: int) -> list[int]:
        """Return the logical time of each column of a rank; see the module's note."""
        early, late = self._early, self._late
        times = [time + self._hop * rank for time in early]
        begin = early[-1] + _COLUMN + self._hop * self.num_ranks + 2 * (self.num_ranks - 1 - rank)
        for index in range(len(early) - warm_up, num_columns - warm_up):
            if self._turns_early:
                times.append(times[-1] + _COLUMN)
                continue
            # Behind the last backward there are weight gradients only.
            inside = min(max(index, 0), len(late) - 1)
            times.append(begin + 2 * (late[inside] + index - inside))
        return times

    @cached_property
    def _step(self) -> int:
        warm_ups = self.warm_ups or ()
        return min((before - after for before, after in pairwise(warm_ups)), default=1)

    @property
    def _hop(self) -> int:
        return 2 * max(1, self._step)

    @cached_property
    def _turns_early(self) -> bool:
        """Whether the last round comes back in time for the columns to be alike throughout."""
        enough = 2 * len(self.rounds[-1]) > self._step * (self.num_ranks - 1)
        return self._step > 0 and (enough or self.num_stages_per_rank == 1)

    @cached_property
    def _early(self) -> list[int]:
        """Where each column begins on rank 0 while there are forwards."""
        widths = []
        for part in self.rounds:
            stretch = self._hop * (self.num_ranks - 1) // (_COLUMN * len(part)) + 1
            width = _COLUMN if self._turns_early else _COLUMN * stretch
            widths.extend([width] * (len(part) * self.num_stages_per_rank))
        return list(accumulate(widths[:-1], initial=0))

    @cached_property
    def _late(self) -> list[int]:
        """Where each backward would stand if every round were at least as long as the pipeline."""
        places: list[int] = []
        begin = 0
        for part in self.rounds:
            for _ in range(self.num_stages_per_rank):
                places.extend(range(begin, begin + len(part)))
                begin += max(len(part), self.num_ranks)
        return places


def equal_rounds(size: int, num_microbatches: int) -> list[range]:
    """Split the microbatches into rounds of at least `size`, as equal as possible.

    A remainder makes earlier rounds longer instead of adding a short one. Fewer microbatches than
    `size` are one round.
    """
    num_rounds = max(1, num_microbatches // size)
    quotient, longer = divmod(num_microbatches, num_rounds)
    sizes = [quotient + (index < longer) for index in range(num_rounds)]
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]


def full_rounds(size: int, num_microbatches: int) -> list[range]:
    """Split the microbatches into rounds of `size`; a remainder is a short round at the end."""
    starts = range(0, num_microbatches, size)
    return [range(start, min(start + size, num_microbatches)) for start in starts]
