"""Precedence of the steps of a schedule, found once to be priced with many costs.

Where nothing but other steps holds a step up, a schedule takes as long as its longest path. A path
is a sum of costs: the longest with some costs is a bound with all others, and a few of them tell
most layouts of a search apart without a visit to every step.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from hp_schedule.costs import Costs, per_step
from hp_schedule.schedule import DeadlockError, Schedule, dataflow
from hp_schedule.steps import (
    BWD,
    BWD_INPUT,
    BWD_WEIGHT,
    FSDP_REDUCE_GRAD,
    FSDP_RESHARD,
    FSDP_UNSHARD,
    FWD,
    KIND_MASK,
    STAGE_MASK,
    STAGE_SHIFT,
)

_COMPUTE = (FWD, BWD, BWD_INPUT, BWD_WEIGHT)
_PRICED = {kind: at for at, kind in enumerate((*_COMPUTE, FSDP_UNSHARD, FSDP_REDUCE_GRAD))}
_Step = tuple[int, int, int, int, int]
"""Where the cost of a step is; the steps that it starts after: the one in front of it and the one
that computed what it reads; where the latency of that is; the one that gathers its parameters."""
Path = tuple[tuple[int, int], ...]
"""Indices of the costs that a path consists of, each with the number of times."""


class Precedence:
    """The steps of a schedule, each behind those that it starts after.

    Args:
        schedule: Schedule of single steps without communication: messages take their latency.

    Attributes:
        peaks: For each rank how many microbatches it holds at once in each stage: the times at
            which it never holds as many at another.
        edges: Pairs of ranks whose latencies matter, as `Schedule.edges`.

    Raises:
        DeadlockError: If the schedule cannot run to its end.
        ValueError: If it has communication steps or overlaps.
    """

    def __init__(self, schedule: Schedule) -> None:
        if not schedule.kinds <= {*_PRICED, FSDP_RESHARD}:
            raise ValueError("schedule must have neither communication steps nor overlaps")
        rows = [[code for code in row.codes() if code >= 0] for row in schedule.steps]
        self._num_stages = schedule.num_stages
        self.edges = schedule.edges
        self._steps, self._last = _in_order(schedule, rows)
        self.peaks = tuple(_peaks(row, schedule.num_stages) for row in rows)

    def flat(self, costs: Costs) -> list[float]:
        """Return costs as paths and steps look them up.

        Raises:
            ValueError: If they do not fit the schedule, or differ between microbatches.
        """
        num = self._num_stages
        columns = costs.durations(num, 1)
        found = [cost for kind in _COMPUTE for cost in columns[kind]]
        found += per_step("unshard", costs.unshard, num)
        found += per_step("reduce_grad", costs.reduce_grad, num)
        found += [costs.latency_of(*edge) for edge in self.edges]
        return [*found, 0.0]  # of what has no message

    def longest(self, costs: Sequence[float]) -> tuple[float, Path]:
        """Return the time that the schedule takes with costs from `flat`, and a path as long as it.

        The time is `simulate`'s makespan, but for the last bits.
        """
        ends = [0.0] * (len(self._steps) + 1)  # the last one is the start of all
        for index, (cost, before, source, latency, gather) in enumerate(self._steps):
            start = max(ends[before], ends[source] + costs[latency], ends[gather])
            ends[index] = start + costs[cost]
        return max((ends[last] for last in self._last), default=0.0), self._path(ends, costs)

    def _path(self, ends: list[float], costs: Sequence[float]) -> Path:
        """Follow the step that each step started after, from the last end back to the start."""
        found: Counter[int] = Counter()
        at = max(self._last, key=ends.__getitem__, default=-1)
        while at >= 0:
            cost, before, source, latency, gather = self._steps[at]
            found[cost] += 1
            arrival = ends[source] + costs[latency]
            at = before if ends[before] >= ends[gather] else gather
            if arrival > ends[at]:
                found[latency] += 1
                at = source
        return tuple(found.items())


def length(path: Path, costs: Sequence[float]) -> float:
    """Return how long a path takes with costs from `Precedence.flat`: no schedule of it less."""
    return sum([costs[index] * times for index, times in path])


def _in_order(schedule: Schedule, rows: list[list[int]]) -> tuple[list[_Step], list[int]]:
    """Walk all rows as far as they go, in turns; returns the steps, and the last ones of queues."""
    steps: list[_Step] = []
    last: list[int] = []
    waiting: dict[int, int] = {}
    runnable = list(range(schedule.num_ranks))
    written: dict[int, int] = {}
    walks = [
        _walk(
            schedule,
            rank,
            row,
            steps=steps,
            last=last,
            written=written,
            waiting=waiting,
            runnable=runnable,
        )
        for rank, row in enumerate(rows)
    ]
    while runnable:
        next(walks[runnable.pop()], None)
    if waiting:
        raise DeadlockError(f"no rank can go on: {sorted(waiting.values())} wait for messages")
    return steps, last


def _walk(
    schedule: Schedule,
    rank: int,
    row: list[int],
    *,
    steps: list[_Step],
    last: list[int],
    written: dict[int, int],
    waiting: dict[int, int],
    runnable: list[int],
) -> Iterator[None]:
    """Add the steps of a row; yield where another rank has to compute a value first.

    Args:
        schedule: Its placement and its chains.
        rank: Rank whose row it is.
        row: Codes of its steps.
        steps: Gets the steps of all rows, in an order in which they can run.
        last: Gets the last steps of each queue.
        written: Gets the step that computes each value.
        waiting: Gets the rank that waits for a value.
        runnable: Gets the ranks whose value was computed.
    """
    num, flow, place = schedule.num_stages, dataflow(schedule), schedule.stage_to_rank
    first_edge = len(_PRICED) * num
    edges = {edge: first_edge + index for index, edge in enumerate(schedule.edges)}
    nothing = first_edge + len(edges)
    computed = collected = -1
    gathered: dict[int, int] = {}
    for code in row:
        kind, stage = code & KIND_MASK, code >> STAGE_SHIFT & STAGE_MASK
        if kind == FSDP_RESHARD:
            continue
        index = len(steps)
        cost = _PRICED[kind] * num + stage
        if kind in (FSDP_UNSHARD, FSDP_REDUCE_GRAD):
            # Collectives of a rank go one after the other, beside what it computes.
            steps.append((cost, computed, collected, nothing, -1))
            collected = index
            if kind == FSDP_UNSHARD:
                gathered[stage] = index
            continue
        source, latency, reads = -1, nothing, flow.value_read(code)
        if reads >= 0:
            if reads not in written:
                waiting[reads] = rank
                yield
                index = len(steps)
            source = written[reads]
            before = (schedule.upstream if kind == FWD else schedule.downstream)[stage]
            if before >= 0 and place[before] != rank:
                latency = edges[place[before], rank]
        steps.append((cost, computed, source, latency, gathered.get(stage, -1)))
        computed = index
        writes = flow.value_written(code)
        if writes >= 0:
            written[writes] = index
            if writes in waiting:
                runnable.append(waiting.pop(writes))
    last += [index for index in (computed, collected) if index >= 0]


def _peaks(row: list[int], num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Return how many microbatches a row holds of each stage just before it frees one."""
    held = [0] * num_stages
    found: dict[tuple[int, ...], None] = {}
    grows = False
    for code in row:
        kind, stage = code & KIND_MASK, code >> STAGE_SHIFT & STAGE_MASK
        if kind == FWD:
            held[stage] += 1
            grows = True
        elif kind in (BWD, BWD_WEIGHT):
            if grows:
                found[tuple(held)] = None
                grows = False
            held[stage] -= 1
    if grows:
        found[tuple(held)] = None
    return tuple(
        one
        for one in found
        if not any(
            other != one and all(b >= a for a, b in zip(one, other, strict=True)) for other in found
        )
    )
