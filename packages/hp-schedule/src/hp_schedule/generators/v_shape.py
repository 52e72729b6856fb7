"""V-shaped schedules: zero bubble (Qi et al. 2023) and controllable memory (Qi et al. 2024).

Two stages on each rank, the second in reverse order, so that what a rank holds long in one it holds
short in the other. A building block says in which slots a rank runs the two forwards and the two
input gradients of a microbatch; microbatch m repeats it 6 m slots later, for a rank has six steps
per microbatch. How far a block is drawn out decides how much memory it takes:

              slots from a rank to the next      activations, in units of 1F1B's
    V-min     1 for all                          1/3
    V-half    2 for F0 and I1, 1 for F1 and I0   1/2
    ZB-V      3 for all                          1

No two steps of a rank fall on the same slot modulo 6; the two weight gradients take the slots that
are left. With enough microbatches ZB-V has a published order of its own (figure 5 of 2023).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from hp_schedule.generators.filling import Line, fill, peak, squeeze, with_weights
from hp_schedule.generators.form import ClosedForm, TimedRow, Vee, check_counts, schedule_kind
from hp_schedule.schedule import dataflow
from hp_schedule.steps import BWD_INPUT, BWD_WEIGHT, FWD, encode

_PERIOD = 6


Block = tuple[int, int, int, int]
"""The slots of a rank's steps for microbatch 0: the forwards of its first and its second stage, the
input gradients of the second and the first."""


@dataclass(frozen=True)
class BuildingBlocks(Vee):
    """Rows made of building blocks, with weight gradients in the free slots.

    Attributes:
        block: Function of the number of ranks and a rank; returns the block of that rank.
    """

    block: Callable[[int, int], Block] = field(kw_only=True)

    def __post_init__(self) -> None:
        check_counts(num_ranks=self.num_ranks, num_microbatches=self.num_microbatches)

    def timed_row(self, rank: int) -> TimedRow:
        """Return the compute steps of a rank with the slots in which they end."""
        return [(slot + 1, code) for slot, code in with_weights(self.line(rank)).items()]

    def line(self, rank: int) -> Line:
        """Return the forwards and input gradients of a rank by slot."""
        there, back = self.arms(rank)
        steps = ((FWD, there), (FWD, back), (BWD_INPUT, back), (BWD_INPUT, there))
        return {
            slot + _PERIOD * microbatch: encode(kind, stage, microbatch)
            for slot, (kind, stage) in zip(self.block(self.num_ranks, rank), steps, strict=True)
            for microbatch in range(self.num_microbatches)
        }


@dataclass(frozen=True)
class FilledBlocks(BuildingBlocks):
    """Building blocks whose waits are filled; a row depends on all ranks.

    Attributes:
        latency: Slots a message takes.
        squeezed: Whether steps move into free slots first.
    """

    latency: float = field(default=0.0, kw_only=True)
    squeezed: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.latency >= 0:
            raise ValueError(f"latency ({self.latency}) must be >= 0")

    def timed_row(self, rank: int) -> TimedRow:
        """Return the compute steps of a rank with the times at which they end."""
        return self._rows[rank]

    @cached_property
    def _rows(self) -> list[TimedRow]:
        flow = dataflow(self._empty)
        lines = [self.line(rank) for rank in range(self.num_ranks)]
        limit = max(peak(with_weights(line)) for line in lines)
        if self.squeezed:
            lines = squeeze(lines, flow, limit=limit)
        return fill(lines, flow, limit=limit, latency=self.latency)


@schedule_kind(
    purpose="a third of 1F1B's activations",
    source="Qi et al. 2024 (V-min)",
    order=10,
)
def v_min(num_ranks: int, *, num_microbatches: int) -> BuildingBlocks:
    """Return the V-shaped schedule of least memory, about a third of 1F1B's.

    Every step follows its input at once, so nothing is held longer than it must be, and every
    message is waited for: the schedule is sensitive to latency.

    Args:
        num_ranks: Ranks of the pipeline, at least 1; rank r has stages r and
            2 * num_ranks - 1 - r.
        num_microbatches: Any number from 1.

    Raises:
        ValueError: If a count is below 1.
    """
    return BuildingBlocks(num_ranks, num_microbatches, block=_thin_block)


@schedule_kind(
    purpose="half of 1F1B's activations",
    source="Qi et al. 2024 (V-half)",
    order=9,
)
def v_half(num_ranks: int, *, num_microbatches: int, latency: float = 0.0) -> FilledBlocks:
    """Return the V-shaped schedule of half the memory.

    Where 1F1B holds num_ranks activations of a rank's share of the model, it holds half of them and
    one more, half a one more if the number of ranks is odd.

    Args:
        num_ranks: Ranks of the pipeline, at least 1; rank r has stages r and
            2 * num_ranks - 1 - r.
        num_microbatches: Any number from 1.
        latency: Time a message takes, in units of one step (F, I or W of one stage): weight
            gradients then cover messages instead of waiting for the end.

    Raises:
        ValueError: If a count is below 1, or the latency below 0.
    """
    return FilledBlocks(
        num_ranks, num_microbatches, block=_half_block, latency=latency, squeezed=True
    )


def _thin_block(num_ranks: int, rank: int) -> Block:
    shift = 2 if num_ranks % 3 == 0 else 0
    return (
        rank,
        2 * num_ranks - 1 - rank,
        2 * num_ranks + shift + rank,
        4 * num_ranks + shift - 1 - rank,
    )


def _half_block(num_ranks: int, rank: int) -> Block:
    shift = 3 if num_ranks % 2 == 0 else 0
    return (
        2 * rank,
        3 * num_ranks - 2 - rank,
        3 * num_ranks + shift - 1 + 2 * rank,
        6 * num_ranks + shift - 2 - rank,
    )


def full_block(num_ranks: int, rank: int) -> Block:
    """Return the block of ZB-V."""
    turn = 6 * (num_ranks - 1)
    return (3 * rank, turn + 1 - 3 * rank, turn + 2 + 3 * rank, 2 * turn + 3 - 3 * rank)


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
