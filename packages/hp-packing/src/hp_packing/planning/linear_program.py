"""The shares of microbatches with which a schedule is fastest, by a linear program.

In a given order, each step starts when the last step that it waits for has ended. The seconds and
the memory of a step are linear in the share of its microbatch, so the shares with the shortest
schedule solve a linear program. scipy's HiGHS (Huangfu and Hall, 2018) solves it in hundredths of a
second for four stages, in a second for sixteen stages of 80 microbatches.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hp_packing.costs import Seconds
from hp_schedule import MetaStep, MetaStepType, Schedule

_SMALLEST = 0.03
"""Minimum share of a microbatch, divided by the mean share."""
_EVEN = 0.1
"""Penalty of the largest share, relative to all work: even shares are easier to fill."""
_FEW = 512
"""Steps of all ranks above which an interior-point method is faster than the simplex method."""
_SQUARE, _LONGEST = 7e-7, 1.5
"""Seconds of a program per square of stages times microbatches; seconds of the longest to solve."""
_HALVES: Mapping[MetaStepType, tuple[int, ...]] = {
    MetaStepType.FWD: (0,),
    MetaStepType.BWD: (1, 2),
    MetaStepType.BWD_INPUT: (1,),
    MetaStepType.BWD_WEIGHT: (2,),
}
"""Indices in `Seconds` of the parts of each kind of step."""


class Rates(NamedTuple):
    """Seconds and memory of microbatches per share of the work, and fixed ones.

    Attributes:
        work: Seconds per share of each microbatch, in each stage.
        each: Fixed seconds of each microbatch in each stage.
        least: Minimum seconds of each microbatch in each stage.
        tokens: Tokens in memory per share of each microbatch.
        message: Seconds of a message per share of each microbatch.
        memory: Memory of a rank, in tokens.
    """

    work: Sequence[Sequence[Seconds]]
    each: Sequence[Seconds]
    least: Sequence[Seconds]
    tokens: Sequence[float]
    message: Sequence[float]
    memory: float


def program_seconds(stages: int, microbatches: int) -> float:
    """Return the approximate seconds of `best_shares`."""
    return _SQUARE * (stages * microbatches) ** 2


def best_shares(schedule: Schedule, rates: Rates) -> tuple[float, ...] | None:
    """Find the shares of the work with which a schedule is fastest; they sum to 1.

    Args:
        schedule: Schedule with one stage on each rank; backwards are whole or split.
        rates: Seconds and memory of its microbatches.

    Returns:
        Share of each microbatch; None if no shares fit into memory, or the program is too large.
    """
    if program_seconds(len(rates.work), len(rates.tokens)) > _LONGEST:
        return None
    rows = [[step for step in row if step is not None] for row in schedule.steps]
    program = _Program(rates)
    for row in rows:
        program.compute(row)
    program.send([step for row in rows for step in row])
    return program.solve()


class _Program:
    """The linear program; its columns are the shares, the largest share, the end, and each start.

    Args:
        rates: See `best_shares`.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates, self._count = rates, len(rates.tokens)
        self._largest, self._end = self._count, self._count + 1
        self._starts: dict[MetaStep, int] = {}
        # Upper bound of each row, and its coefficients with their rows and columns.
        self._most: list[float] = []
        self._values: list[float] = []
        self._places: tuple[list[int], list[int]] = ([], [])
        for share in range(self._count):
            self._row({share: 1.0, self._largest: -1.0}, most=0.0)

    def compute(self, row: Sequence[MetaStep]) -> None:
        """Add rows for a rank: its steps run in order, and activations fit its memory."""
        held: dict[int, float] = {}
        for step in row:
            self._starts[step] = self._end + 1 + len(self._starts)
            _, _, microbatch = _end_of(step)
            if step.type is MetaStepType.FWD:
                held[microbatch] = self._rates.tokens[microbatch]
                self._row(held, most=self._rates.memory)
            elif step.type is not MetaStepType.BWD_INPUT:
                held.pop(microbatch)
        for step, after in pairwise(row):
            self._wait(step, self._starts[after])
        self._wait(row[-1], self._end)

    def send(self, steps: Sequence[MetaStep]) -> None:
        """Add rows for messages: outputs and gradients arrive before the steps that need them."""
        sending = [step for step in steps if step.type is not MetaStepType.BWD_WEIGHT]
        columns = {_end_of(step): self._starts[step] for step in sending}
        for step in sending:
            is_forward, stage, microbatch = _end_of(step)
            column = columns.get((is_forward, stage + (1 if is_forward else -1), microbatch))
            if column is not None:
                self._wait(step, column, message=self._rates.message[microbatch])

    def solve(self) -> tuple[float, ...] | None:
        """Solve the program; return the shares, or None if it has no solution."""
        from scipy.optimize import linprog  # noqa: PLC0415 - 50 MiB, for those who plan steps
        from scipy.sparse import csr_array  # noqa: PLC0415

        others = 2 + len(self._starts)
        work = max(sum(each.total for each in stage) for stage in self._rates.work)
        found = linprog(
            [0.0] * self._count + [_EVEN * work / self._count, 1.0] + [0.0] * len(self._starts),
            A_ub=csr_array((self._values, self._places), (len(self._most), self._count + others)),
            b_ub=self._most,
            A_eq=[[1.0] * self._count + [0.0] * others],
            b_eq=[1.0],
            bounds=[(_SMALLEST / self._count, 1.0)] * self._count + [(0.0, None)] * others,
            method="highs-ds" if len(self._starts) <= _FEW else "highs-ipm",
        )
        if not found.success:
            return None
        shares = [float(x) for x in found.x[: self._count]]
        return tuple(share / sum(shares) for share in shares)

    def _wait(self, step: MetaStep, column: int, *, message: float = 0.0) -> None:
        """Add rows by which a column is after a step and its message, in seconds per share."""
        rates = self._rates
        _, stage, share = _end_of(step)
        ways = [(0.0, message)]  # fixed seconds, and seconds per share
        for half in _HALVES[step.type]:
            work, each = rates.work[stage][share][half], rates.each[stage][half]
            more = [(each, work), (rates.least[stage][half], 0.0)]
            ways = [(x + seconds, y + of_share) for x, y in ways for seconds, of_share in more]
        for seconds, of_share in ways:
            self._row({self._starts[step]: 1.0, column: -1.0, share: of_share}, most=-seconds)

    def _row(self, row: Mapping[int, float], *, most: float) -> None:
        self._values += row.values()
        self._places[0].extend([len(self._most)] * len(row))
        self._places[1].extend(row)
        self._most.append(most)


def _end_of(step: MetaStep) -> tuple[bool, int, int]:
    assert step.stage_index is not None
    assert step.microbatch_index is not None
    return step.type is MetaStepType.FWD, step.stage_index, step.microbatch_index
