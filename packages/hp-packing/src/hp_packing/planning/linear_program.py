"""Shares of microbatches that are best for a schedule.

Where the order of steps is given, each starts when the last of those has ended that it waits for.
What a step takes and what it keeps is linear in the share of its microbatch: so the shares with
which all of them take least time are a linear program. scipy's HiGHS (Huangfu and Hall, 2018)
solves it in hundredths of a second for four stages, in a second for sixteen of 80 microbatches.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hp_packing.costs import Seconds
from hp_schedule import MetaStep, MetaStepType, Schedule

_SMALLEST = 0.03
"""Least share of a microbatch, by the mean."""
_EVEN = 0.1
"""What the largest share costs, by all work: documents are put more easily into even shares."""
_FEW = 512
"""Steps of all ranks above which inner points are quicker than the simplex."""
_SQUARE, _LONGEST = 7e-7, 1.5
"""Seconds of a program by the square of stages times microbatches; most of one that is solved."""
_HALVES: Mapping[MetaStepType, tuple[int, ...]] = {
    MetaStepType.FWD: (0,),
    MetaStepType.BWD: (1, 2),
    MetaStepType.BWD_INPUT: (1,),
    MetaStepType.BWD_WEIGHT: (2,),
}
"""What a step takes, as places in `Seconds`."""


class Rates(NamedTuple):
    """Seconds and bytes of microbatches for each unit of share, and besides.

    Attributes:
        work: Seconds of a whole share of each microbatch, in each stage.
        each: Seconds that each microbatch takes in each stage besides.
        least: Seconds that each microbatch takes in each stage at least.
        tokens: What a whole share of each microbatch keeps.
        message: Seconds of a message of a whole share of each microbatch.
        memory: What may be kept, in the unit of `tokens`.
    """

    work: Sequence[Sequence[Seconds]]
    each: Sequence[Seconds]
    least: Sequence[Seconds]
    tokens: Sequence[float]
    message: Sequence[float]
    memory: float


def program_seconds(stages: int, microbatches: int) -> float:
    """About what `best_shares` takes."""
    return _SQUARE * (stages * microbatches) ** 2


def best_shares(schedule: Schedule, rates: Rates) -> tuple[float, ...] | None:
    """Find shares of the work with which a schedule takes least time; they sum to 1.

    Args:
        schedule: One stage on each rank; forwards and backwards, whole or split.
        rates: What its microbatches take and keep.

    Returns:
        Share of each microbatch; None if none fit the memory, or the program were too large.
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
    """The linear program: its columns are shares, the largest of them, the end, and each start.

    Args:
        rates: See `best_shares`.
    """

    def __init__(self, rates: Rates) -> None:
        self._rates, self._count = rates, len(rates.tokens)
        self._largest, self._end = self._count, self._count + 1
        self._starts: dict[MetaStep, int] = {}
        # Of each row what it is at most, and its numbers with their places.
        self._most: list[float] = []
        self._values: list[float] = []
        self._places: tuple[list[int], list[int]] = ([], [])
        for share in range(self._count):
            self._row({share: 1.0, self._largest: -1.0}, most=0.0)

    def compute(self, row: Sequence[MetaStep]) -> None:
        """Have a rank take its steps one after the other, with what it keeps in its memory."""
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
        """Have outputs and gradients travel to the stages that need them."""
        sending = [step for step in steps if step.type is not MetaStepType.BWD_WEIGHT]
        columns = {_end_of(step): self._starts[step] for step in sending}
        for step in sending:
            is_forward, stage, microbatch = _end_of(step)
            column = columns.get((is_forward, stage + (1 if is_forward else -1), microbatch))
            if column is not None:
                self._wait(step, column, message=self._rates.message[microbatch])

    def solve(self) -> tuple[float, ...] | None:
        """Find the shares."""
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
        """Have what stands in a column come after a step, and a message of all tokens by share."""
        rates = self._rates
        _, stage, share = _end_of(step)
        ways = [(0.0, message)]  # seconds, and those of a whole share
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
