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

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

from hp_schedule.generators.form import ClosedForm, TimedRow, Vee, check_counts, schedule_kind
from hp_schedule.schedule import Dataflow, DeadlockError, dataflow
from hp_schedule.steps import BWD_INPUT, BWD_WEIGHT, FWD, KIND_MASK, PLACE_MASK, encode

_EPSILON = 1e-9
"""Times closer than this are the same moment: sums of floats in different orders."""

Line = dict[int, int]
"""Codes of the forwards and input gradients of a rank by the slot they run in, each step taking one
slot; weight gradients have no place yet."""


def with_weights(line: Line) -> Line:
    """Return a line with each weight gradient in the first free slot behind its input gradient."""
    result: Line = {}
    waiting: deque[int] = deque()
    for slot in range(min(line), max(line) + len(line)):
        if slot in line:
            result[slot] = line[slot]
            if line[slot] & KIND_MASK == BWD_INPUT:
                waiting.append(line[slot] - BWD_INPUT + BWD_WEIGHT)
        elif waiting:
            result[slot] = waiting.popleft()
    return result


def squeeze(lines: Sequence[Line], flow: Dataflow, *, limit: int) -> list[Line]:
    """Move steps to the first free slot in which their input is there and their memory fits.

    In the order of their slots: those before warm up sooner, those at the end finish sooner, the
    steady state between has no free slot (Qi et al. 2024, section 4).

    Args:
        lines: Line of each rank.
        flow: Dataflow of their schedule.
        limit: Activations a rank may hold.
    """
    grids = [with_weights(line) for line in lines]
    made: dict[int, int] = {}
    before: dict[int, int] = {}
    held = [_held(grid) for grid in grids]
    for slot, rank in sorted((slot, rank) for rank, grid in enumerate(grids) for slot in grid):
        grid, code = grids[rank], grids[rank].pop(slot)
        kind = code & KIND_MASK
        if kind == BWD_WEIGHT:
            first = made[flow.value_written(code - BWD_WEIGHT + BWD_INPUT)]
        else:
            first = made.get(flow.value_read(code), 0)
        place = code & PLACE_MASK
        first = max(first, before.get(place, 0))
        while first in grid or (
            kind == FWD and first < slot and max(held[rank][first:slot]) >= limit
        ):
            first += 1
        grid[first] = code
        before[place] = first + 1
        if kind == BWD_WEIGHT:
            _add(held[rank], range(first + 1, slot + 1), -1)
        else:
            made[flow.value_written(code)] = first + 1
            _add(held[rank], range(first, slot) if kind == FWD else (), 1)
    return [
        {slot: code for slot, code in grid.items() if code & KIND_MASK != BWD_WEIGHT}
        for grid in grids
    ]


def _held(grid: Line) -> list[int]:
    """Return the activations held in each slot."""
    result, held = [], 0
    for slot in range(max(grid) + 1):
        kind = grid.get(slot, -1) & KIND_MASK
        held += kind == FWD
        result.append(held)
        held -= kind == BWD_WEIGHT
    return result


def _add(held: list[int], slots: Iterable[int], amount: int) -> None:
    for slot in slots:
        held[slot] += amount


class _Filling:
    """Lines run in their order, each step as soon as it can, every wait filled with weights.

    Args:
        lines: Line of each rank; values go from a rank to itself or to a neighbour.
        flow: Dataflow of their schedule.
        limit: Activations a rank may hold, at least as many as `with_weights` would.
        latency: Slots a message takes.
    """

    def __init__(self, lines: Sequence[Line], flow: Dataflow, limit: int, latency: float) -> None:
        self._next = [deque(code for _, code in sorted(line.items())) for line in lines]
        self._weights: list[deque[int]] = [deque() for _ in lines]
        self._rows: list[TimedRow] = [[] for _ in lines]
        self._held = [0] * len(lines)
        self._made: dict[int, tuple[float, int]] = {}
        self._flow = flow
        self._limit = limit
        self._latency = latency
        self._events = [(0.0, rank) for rank in range(len(lines))]

    def run(self) -> list[TimedRow]:
        """Return the row of each rank.

        Raises:
            DeadlockError: If the limit is too low.
        """
        while self._events:
            now, rank = heappop(self._events)
            row = self._rows[rank]
            if not row or row[-1][0] <= now + _EPSILON:
                self._start(rank, now)
        if any(self._next):
            raise DeadlockError(f"limit ({self._limit}) must be >= what the order of steps holds")
        return self._rows

    def _start(self, rank: int, now: float) -> None:
        """Let a rank start its next step, or else a weight gradient."""
        queue, weights = self._next[rank], self._weights[rank]
        ready = self._ready(rank, queue[0]) if queue else float("inf")
        if ready <= now + _EPSILON:
            code = queue.popleft()
            if code & KIND_MASK == FWD:
                self._held[rank] += 1
            else:
                weights.append(code - BWD_INPUT + BWD_WEIGHT)
            self._made[self._flow.value_written(code)] = (now + 1, rank)
            for neighbour in (rank - 1, rank + 1):
                if 0 <= neighbour < len(self._rows):
                    heappush(self._events, (now + 1 + self._latency, neighbour))
        elif weights:
            code = weights.popleft()
            self._held[rank] -= 1
        else:
            return
        self._rows[rank].append((now + 1, code))
        heappush(self._events, (now + 1, rank))

    def _ready(self, rank: int, code: int) -> float:
        """Return when a step can start, infinity if that is not known."""
        if code & KIND_MASK == FWD and self._held[rank] >= self._limit:
            return float("inf")
        value = self._flow.value_read(code)
        if value < 0:
            return 0.0
        time, source = self._made.get(value, (float("inf"), rank))
        return time if source == rank else time + self._latency


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
        limit = max(max(_held(with_weights(line))) for line in lines)
        if self.squeezed:
            lines = squeeze(lines, flow, limit=limit)
        return _Filling(lines, flow, limit, self.latency).run()


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
