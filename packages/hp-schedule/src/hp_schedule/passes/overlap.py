"""Pairs of a forward and a backward that run as one step, so that each hides the other's messages.

A pair is atomic: it starts when both inputs are there and hands out both results at its end, so
pairing can close a cycle of waits that single steps do not have. Here the rows are run with all
pairs made; where every rank has come to a stop, a pair whose first half could run is taken apart,
and the run goes on. What is left has run to its end once, in an order that no step contradicts, so
it always does.
"""

from collections.abc import Iterable
from typing import Literal, get_args

from hp_schedule.schedule import Dataflow, DeadlockError, Schedule, dataflow
from hp_schedule.steps import (
    BWD,
    BWD_INPUT,
    FWD,
    KIND_MASK,
    encode_overlap,
    is_compute,
    leaves,
    unpack,
)

PairOrder = Literal["b_f", "f_b"]


def pair_overlap(schedule: Schedule, *, order: PairOrder = "b_f") -> Schedule:
    """Pair each backward with the forward next to it in its row.

    Pairs are made where no half needs the other's result and the rows still run to their end. A
    weight gradient alone is not paired: it waits for nothing that a forward could hide.

    Args:
        schedule: Schedule without communication steps.
        order: ``b_f`` pairs a backward with the forward behind it (OVERLAP_B_F), ``f_b`` a forward
            with the backward behind it (OVERLAP_F_B).

    Raises:
        DeadlockError: If the compute steps contradict each other.
        ValueError: If the schedule has communication steps, or the order is unknown.
    """
    if order not in get_args(PairOrder):
        raise ValueError(f"order ({order}) must be {' or '.join(get_args(PairOrder))}")
    if schedule.has_communication:
        raise ValueError("schedule must have no communication steps; see drop_communication")
    return schedule.with_rows(_Pairing(schedule, order).rows())


class _Pairing:
    """Runs rows with pairs and takes those apart that hold everything up.

    Attributes:
        cells: For each rank its steps, reversed: what is next stands last; a pair has two codes.
    """

    def __init__(self, schedule: Schedule, order: PairOrder) -> None:
        self._flow: Dataflow = dataflow(schedule)
        self._written = bytearray(self._flow.num_values)
        self._waiting: dict[int, int] = {}
        self._done: list[list[int]] = [[] for _ in schedule.steps]
        self.cells = [
            list(reversed(list(_paired(row.codes(), order, self._flow)))) for row in schedule.steps
        ]

    def rows(self) -> list[list[int]]:
        """Return the rows as they ran."""
        runnable = list(range(len(self.cells)))
        while runnable:
            self._advance(runnable.pop(), runnable)
            if not runnable and any(self.cells):
                runnable.append(self._take_apart())
        return self._done

    def _advance(self, rank: int, runnable: list[int]) -> None:
        cells, done = self.cells[rank], self._done[rank]
        while cells:
            halves = [half for code in cells[-1] for half in leaves(code)]
            for half in halves:
                value = self._flow.value_read(half) if is_compute(half) else -1
                if value >= 0 and not self._written[value]:
                    self._waiting[value] = rank
                    return
            cell = cells.pop()
            done.append(encode_overlap(*cell) if len(cell) == 2 else cell[0])
            for half in halves:
                value = self._flow.value_written(half) if is_compute(half) else -1
                if value >= 0:
                    self._written[value] = 1
                    if value in self._waiting:
                        runnable.append(self._waiting.pop(value))

    def _take_apart(self) -> int:
        """Take the pair of the lowest rank apart whose first half can run; return the rank."""
        for rank, cells in enumerate(self.cells):
            if cells and len(cells[-1]) == 2:
                value = self._flow.value_read(cells[-1][0])
                if value < 0 or self._written[value]:
                    first, second = cells.pop()
                    cells.extend([(second,), (first,)])
                    self._waiting = {v: r for v, r in self._waiting.items() if r != rank}
                    return rank
        rank = next(rank for rank, cells in enumerate(self.cells) if cells)
        raise DeadlockError(
            f"rank {rank}, cell {len(self._done[rank])}: {unpack(self.cells[rank][-1][0])} waits "
            "for a value that is never computed; `validate` shows where the order is wrong"
        )


def _paired(codes: list[int], order: PairOrder, flow: Dataflow) -> Iterable[tuple[int, ...]]:
    """Yield the steps of a row, alone or two at a time."""
    position = 0
    while position < len(codes):
        pair = tuple(codes[position : position + 2])
        size = 2 if len(pair) == 2 and _fits(*pair, order, flow) else 1
        yield pair[:size]
        position += size


def _fits(first: int, second: int, order: PairOrder, flow: Dataflow) -> bool:
    """Return whether two steps are a pair whose halves do not need each other."""
    if first < 0 or second < 0:
        return False
    forward, backward = (second, first) if order == "b_f" else (first, second)
    if forward & KIND_MASK != FWD or backward & KIND_MASK not in {BWD, BWD_INPUT}:
        return False
    is_one_place = forward & ~KIND_MASK == backward & ~KIND_MASK
    return not is_one_place and flow.value_written(first) != flow.value_read(second)
