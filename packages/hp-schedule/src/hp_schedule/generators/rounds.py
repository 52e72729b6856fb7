"""Rows in rounds: GPipe, 1F1B, their interleaved and their zero-bubble forms.

Write down the forwards of a rank in a row, its backwards in a second row shifted by its warm-up,
and, where the backward is split, its weight gradients in a third row shifted further by a delay.
Read column by column, that is the order in which the rank runs. Rank 1 of 3, 1F1B, 4 microbatches:

    F0 F1 F2 F3
       B0 B1 B2 B3          -> F0 F1 B0 F2 B1 F3 B2 B3

With several stages on a rank, microbatches go through in rounds: a rank takes a round through its
first stage, then through its second and so on, before the next round enters.

Column x of rank r begins at C x + hop * r, for P ranks, a column of C slots and `hop` slots from a
rank to the next. The result of a forward goes to the same column of the next rank: hop > 0. A
gradient goes to the rank before, `step` columns later, where `step` is how much longer the warm-up
is there: C step > hop. A round of R microbatches that leaves the last rank comes back to the first
R columns later: C R > hop (P - 1), and the other way C R + hop (P - 1) > C step (P - 1). With hop =
C step / 2 all of this holds if 2 R > step (P - 1). Where in a column its steps end is free; as
chosen, messages are due a step or so before they are read.

A round shorter than that must be the only one. While there are forwards, time passes between its
last column in one stage and its first in the next; its backwards turn only where no forward is
left. From there on rows hold backwards only, and are timed as if the round were as long as 2 P, a
column from one to the next and one and a half from a rank to the one before. So are schedules whose
warm-up is all forwards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest

from hp_schedule.generators.form import ClosedForm, TimedRow, check_counts
from hp_schedule.steps import BWD, BWD_INPUT, BWD_WEIGHT, FWD, encode

_COLUMN = 16
_LINES = (0, 6, 15)
"""Slots from the beginning of a column to the ends of its F, B and W."""


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
        fwd = self._through(local_stages, FWD)
        warm_up, bwd, weights = 0, list[int](), list[int]()
        if self.warm_ups is not None:
            warm_up = self.warm_ups[rank]
            bwd = self._through(local_stages[::-1], BWD if self.delays is None else BWD_INPUT)
        if self.delays is not None:
            weights = self._through(local_stages[::-1], BWD_WEIGHT)
        shifts = (0, warm_up, warm_up + (self.delays[rank] if self.delays else 0))
        lines = [
            [-1] * shift + codes for shift, codes in zip(shifts, (fwd, bwd, weights), strict=True)
        ]
        times = self._times(rank, warm_up, max(map(len, lines)))
        return [
            (time + _LINES[line], code)
            for time, column in zip(times, zip_longest(*lines, fillvalue=-1), strict=False)
            for line, code in enumerate(column)
            if code >= 0
        ]

    def _through(self, stages: range, kind: int) -> list[int]:
        """Return the steps of one kind, round by round through some stages."""
        return [
            encode(kind, stage, microbatch)
            for part in self.rounds
            for stage in stages
            for microbatch in part
        ]

    def _times(self, rank: int, warm_up: int, num_columns: int) -> list[int]:
        """Return the logical time of each column of a rank; see the module's note."""
        early, late = self._early, self._late
        times = [_COLUMN * place + self._hop * rank for place in early]
        begin = _COLUMN * (early[-1] + 1) + self._hop * self.num_ranks
        begin += 3 * _COLUMN * (self.num_ranks - rank) // 2
        for index in range(len(early) - warm_up, num_columns - warm_up):
            if self._turns_early:
                times.append(times[-1] + _COLUMN)
                continue
            # Behind the last backward there are weight gradients only.
            inside = min(max(index, 0), len(late) - 1)
            times.append(begin + _COLUMN * (late[inside] + index - inside))
        return times

    @cached_property
    def _step(self) -> int:
        warm_ups = self.warm_ups or (0,)
        return min((before - after for before, after in pairwise(warm_ups)), default=1)

    @property
    def _hop(self) -> int:
        return _COLUMN * self._step // 2 or 3 * _COLUMN // 2

    @cached_property
    def _turns_early(self) -> bool:
        """Tell whether rounds come back in time for the columns to be alike throughout."""
        shortest = min(map(len, self.rounds))
        enough = 2 * shortest > self._step * (self.num_ranks - 1)
        return self._step > 0 and (enough or self.num_stages_per_rank == 1)

    @cached_property
    def _early(self) -> list[int]:
        """Return the place in time of each column with a forward."""
        turn = self._hop * (self.num_ranks - 1) // _COLUMN + 1
        return self._places(1 if self._turns_early else turn)

    @cached_property
    def _late(self) -> list[int]:
        """Return the place in time of each backward that has no forward beside it."""
        return self._places(2 * self.num_ranks)

    def _places(self, turn: int) -> list[int]:
        """Return places one after another, but at least `turn` from one stage to the next."""
        places: list[int] = []
        begin = 0
        for part in self.rounds:
            for _ in range(self.num_stages_per_rank):
                places.extend(range(begin, begin + len(part)))
                begin += max(len(part), turn)
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


def short_rounds(size: int, num_microbatches: int) -> list[range]:
    """Split the microbatches into rounds of at most `size` and, but for the only one, half of it.

    A remainder is a shorter round at the end; one of less than half takes the rest from the round
    before.
    """
    starts = list(range(0, num_microbatches, size))
    half = (size + 1) // 2
    if len(starts) > 1 and num_microbatches - starts[-1] < half:
        starts[-1] = num_microbatches - half
    return [range(start, end) for start, end in pairwise([*starts, num_microbatches])]
