"""ZB-V: zero bubble in the memory of 1F1B (Qi et al. 2023, figure 5)."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from hp_schedule.generators.building_blocks import FilledBlocks, full_block
from hp_schedule.generators.form import ClosedForm, TimedRow, Vee, check_counts
from hp_schedule.generators.registry import schedule_kind
from hp_schedule.packing import BWD_INPUT, BWD_WEIGHT, FWD, encode

_F0, _I0, _W0 = ((kind, 0) for kind in (FWD, BWD_INPUT, BWD_WEIGHT))
_F1, _I1, _W1 = ((kind, 1) for kind in (FWD, BWD_INPUT, BWD_WEIGHT))


@schedule_kind(
    purpose="no bubble but the ramp",
    source="Qi et al. 2023, figure 5 (ZB-V)",
    order=8,
)
def zbv(num_ranks: int, *, num_microbatches: int, latency: float = 0.0) -> ClosedForm:
    """Return the ZB-V schedule: two stages on each rank in a V, no bubble but the ramp.

    With forwards, input gradients and weight gradients of one length it takes
    3 M + (P - 1) / 2 for M >= P, in units of one of them for a rank's share of the model, and holds
    min(P, M) activations of that share.

    Args:
        num_ranks: Ranks of the pipeline, at least 1; rank r has stages r and
            2 * num_ranks - 1 - r.
        num_microbatches: Any number from 1. Below 1.5 * num_ranks the published order would leave
            gaps; building blocks with filled waits take its place.
        latency: Time a message takes, in units of one step (F, I or W of one stage). Above 0
            building blocks are used for any number of microbatches, with weight gradients to cover
            the messages, which pays from about a quarter of a step.

    Raises:
        ValueError: If a count is below 1, or the latency below 0.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    if latency == 0 and 2 * num_microbatches >= 3 * num_ranks - 1:
        return ZeroBubbleV(num_ranks, num_microbatches)
    return FilledBlocks(num_ranks, num_microbatches, block=full_block, latency=latency)


@dataclass(frozen=True)
class ZeroBubbleV(Vee):
    """Rows without a gap: a step's logical time is its place in the row, behind a ramp of r.

    Fewer microbatches than the 2 P - 1 that fill the pipeline leave out the steps of the others.
    """

    def timed_row(self, rank: int) -> TimedRow:
        """Return the compute steps of a rank with their logical times."""
        stages = self.arms(rank)
        count: Counter[tuple[int, int]] = Counter()
        row: TimedRow = []
        for time, step in enumerate(self._steps(rank), start=rank + 1):
            kind, place = step
            if count[step] < self.num_microbatches:
                row.append((time, encode(kind, stages[place], count[step])))
            count[step] += 1
        return row

    def _steps(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield kind and place (first or second stage of the rank) of each step."""
        behind = self.num_ranks - rank
        more = max(0, self.num_microbatches - (2 * self.num_ranks - 1))
        # Warm-up: fill the pipeline until the first microbatch has come back down the V.
        yield from [_F0] * (2 * behind - 1)
        yield from [_F1, _F0] * rank
        yield from [_F1, _I1, _W1] * behind
        # Steady state, at the end without new microbatches.
        yield from [_F0, _I0, _W0, _F1, _I1, _W1] * (more + rank)
        yield from [_I0, _W0, _F1, _I1, _W1] * (behind - 1)
        # Cool-down: input gradients first, then the weight gradients put off for them.
        yield from [_I0, _I1] * rank
        yield from [_I0, _W0] * behind
        yield from [_W1] * rank
        yield from [_W0] * rank
