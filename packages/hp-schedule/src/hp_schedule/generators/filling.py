"""Weight gradients in the gaps between other steps, and steps moved into gaps.

Every step here takes one slot of time. A line gives the forwards and input gradients of a rank by
the slot they run in; weight gradients have no place yet.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from hp_schedule.errors import DeadlockError
from hp_schedule.generators.form import TimedRow
from hp_schedule.schedule import Dataflow
from hp_schedule.steps import BWD_INPUT, BWD_WEIGHT, FWD, KIND_MASK, PLACE_MASK

_EPSILON = 1e-9
"""Times closer than this are the same moment: sums of floats in different orders."""

Line = dict[int, int]
"""Codes by slot."""


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


def peak(line: Line) -> int:
    """Return the most activations a rank holds at once; the line has its weight gradients."""
    return max(_held(line))


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


def fill(
    lines: Sequence[Line], flow: Dataflow, *, limit: int, latency: float = 0.0
) -> list[TimedRow]:
    """Run lines in their order, each step as soon as it can, and fill every wait with weights.

    Args:
        lines: Line of each rank; values go from a rank to itself or to a neighbour.
        flow: Dataflow of their schedule.
        limit: Activations a rank may hold, at least as many as `with_weights` would.
        latency: Slots a message takes.

    Raises:
        DeadlockError: If the limit is too low.
    """
    return _Filling(lines, flow, limit, latency).run()


class _Filling:
    """The ranks' clocks, memory and steps in waiting."""

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
