"""DualPipeV (DeepSeek 2025): forwards and backwards of the two arms of a V, run in pairs."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from hp_schedule.generators.form import TimedRow, Vee, check_counts, schedule_kind
from hp_schedule.steps import BWD, BWD_INPUT, BWD_WEIGHT, FWD, encode, encode_overlap

_Step = tuple[int, int]
"""Kind, and 0 or 1 for the first or the second stage of the rank."""
_F0, _B0, _I0 = ((kind, 0) for kind in (FWD, BWD, BWD_INPUT))
_F1, _B1, _I1 = ((kind, 1) for kind in (FWD, BWD, BWD_INPUT))
_W = (BWD_WEIGHT, 0)
"""The oldest weight gradient that was put off, of either stage."""
_SLOTS = {FWD: 2, BWD: 4, BWD_INPUT: 2, BWD_WEIGHT: 3}
"""How far logical time goes on: a step is as long as it is where all are alike, a weight gradient
longer, or the last input gradients would end with those that they wait for."""


@schedule_kind(
    purpose="forwards and backwards as one step, for expert parallelism",
    source="DeepSeek 2025 (DualPipeV)",
    order=11,
    pairs="overlap_f_b",
)
def dualpipe_v(num_ranks: int, *, num_microbatches: int, overlap_f_b: bool = True) -> "DualPipeV":
    """Return the DualPipeV schedule: two stages on each rank in a V.

    In the steady state every forward of one stage runs as one step with a backward of the other, so
    that each hides the other's messages, those within a stage (expert parallelism) included.

    Args:
        num_ranks: Ranks of the pipeline, at least 1; rank r has stages r and
            2 * num_ranks - 1 - r.
        num_microbatches: Any number from 1. Fewer than the 2 * num_ranks that fill the pipeline
            leave out the steps of the others; a half whose other half is left out runs alone.
        overlap_f_b: Whether those pairs are steps of their own (OVERLAP_F_B); otherwise their
            halves follow each other.

    Raises:
        ValueError: If a count is below 1.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    return DualPipeV(num_ranks, num_microbatches, overlap_f_b=overlap_f_b)


@dataclass(frozen=True)
class DualPipeV(Vee):
    """Rows in the eight phases of the original; see `dualpipe_v`.

    Attributes:
        overlap_f_b: Whether pairs are steps of their own.
    """

    overlap_f_b: bool = field(default=True, kw_only=True)

    def timed_row(self, rank: int) -> TimedRow:
        """Return the compute steps of a rank with their logical times."""
        stages = self.arms(rank)
        count = Counter[tuple[bool, int]]()  # by direction and stage of the rank
        put_off = deque[tuple[int, int]]()
        row: TimedRow = []
        time = 2 * rank
        for steps in self._phases(rank):
            timed: TimedRow = []
            for kind, place in steps:
                time += _SLOTS[kind]
                if kind == BWD_WEIGHT and not put_off:
                    continue
                if kind == BWD_WEIGHT:
                    arm, microbatch = put_off.popleft()
                else:
                    arm, microbatch = place, count[kind == FWD, place]
                    count[kind == FWD, place] += 1
                if kind == BWD_INPUT:
                    put_off.append((arm, microbatch))
                # Steps of microbatches that are not there are left out.
                if microbatch < self.num_microbatches:
                    timed.append((time, encode(kind, stages[arm], microbatch)))
            if len(timed) == 2 and self.overlap_f_b:
                timed = [(time, encode_overlap(timed[0][1], timed[1][1]))]
            row.extend(timed)
        return row

    def _phases(self, rank: int) -> Iterator[tuple[_Step, ...]]:
        """Yield the steps of a rank, two at a time where they are a pair."""
        behind = self.num_ranks - 1 - rank
        yield from [(_F0,)] * (2 * behind)
        yield from [(_F0,), (_F1,)] * (rank + 1)
        yield from [(_I1,), (_W,), (_F1,)] * behind
        more = max(0, self.num_microbatches - 2 * self.num_ranks)
        steady: list[tuple[_Step, ...]] = [(_F0, _B1), (_F1, _B0)] * (more + rank + 1)
        if behind == 0:
            # The last rank has nothing to hide yet; apart, its backward can start sooner.
            steady[:1] = [(_F0,), (_B1,)]
        yield from steady
        yield from [(_B1,), (_F1, _B0)] * behind
        # Half of the last backwards are split, and their weight gradients put off to the end.
        for index in range(2 * (rank + 1)):
            split = index > rank
            yield ((BWD_INPUT if split else BWD, 1 - index % 2),)
        yield from [(_W,), (_I0,)] * behind
        yield from [(_W,)] * (rank + 1)
