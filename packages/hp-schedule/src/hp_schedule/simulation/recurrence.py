"""The simulator without a clock, for compute steps on a machine without contention.

There a step starts at the latest of the ends it depends on, so one visit per step is enough, in any
order that visits no step before its inputs. The machine of `hp_schedule.simulation.simulate`
finds the same numbers and the timeline too; this finds them some ten times sooner, for searches.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hp_schedule.costs import ActivationMemory, Costs
from hp_schedule.schedule import DeadlockError, Schedule, dataflow
from hp_schedule.simulation.channels import transmission_by_value
from hp_schedule.steps import (
    BWD,
    BWD_WEIGHT,
    FIRST_COMMUNICATION,
    FIRST_OVERLAP,
    FWD,
    KIND_MASK,
    MICROBATCH_MASK,
    MICROBATCH_SHIFT,
    OFFLOAD,
    OVERLAP_B_F,
    OVERLAP_F_B,
    RECOMPUTE,
    RELOAD,
    SEND_OF,
    STAGE_MASK,
    STAGE_SHIFT,
    TYPES,
    encode,
    halves,
    is_compute,
    leaves,
    unpack,
)

_ABSENT: Final = -1.0

# An overlap is two waits, two runs and, after the second run has handed out its own result, the
# first one's. Each act is a step with part of an entry; its code has the act in the bits above a
# step's.
_ACT_SHIFT: Final = 33
_WAIT, _RUN, _RUN_AND_WRITE, _WRITE = (act << _ACT_SHIFT for act in range(1, 5))
_LAST_RUN: Final = _RUN_AND_WRITE >> _ACT_SHIFT
_KEY_MASK: Final = ~(MICROBATCH_MASK << MICROBATCH_SHIFT)

_Entry = tuple[int, int, list[float], list[float], list[float], "_Channel | None"]
"""What a kind of step does in a stage: the values of microbatch 0 that it reads and writes; by
microbatch, how long what it reads was on its way, its duration, and how long its rank then stands
still; what a message with its result occupies, if it has one that takes time."""


@dataclass(slots=True)
class _Free:
    """The time at which a channel is free again."""

    at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Channel:
    """A channel, and how long a value of each microbatch occupies it."""

    free: _Free
    sending: list[float]

    def waits(self, microbatch: int, now: float) -> float:
        """Queue a message that could leave now, and return how long it waits for others."""
        free = self.free
        start = max(now, free.at)
        free.at = start + self.sending[microbatch]
        return start - now


@dataclass(slots=True)
class Numbers:
    """Numbers of a simulation; lists are by rank, see `Simulation`."""

    makespan: float
    busy: list[float]
    exposed: list[float]
    peak: list[float]


def recurrence(schedule: Schedule, costs: Costs, *, blocking: bool = False) -> Numbers | None:
    """Return the numbers of a schedule of compute steps, None if it cannot be run to its end.

    Empty cells, FSDP steps and copies are skipped.

    Args:
        schedule: A schedule, without overlaps if it is blocking or messages have sizes.
        costs: What its steps cost.
        blocking: Whether a rank stands still until what it sends has arrived.
    """
    rows = [row.codes() for row in schedule.steps]
    durations = costs.durations(schedule.num_stages, schedule.num_microbatches)
    sending = transmission_by_value(schedule, costs)
    walk = Walk(schedule, durations, costs.latency_of, sending=sending, blocking=blocking)
    if not walk.run(rows):
        return None
    num = schedule.num_microbatches
    held = costs.activation_memory(schedule.num_stages, num)
    return Numbers(
        makespan=max((ends[-1] for ends in walk.ends if ends), default=0.0),
        busy=walk.busy,
        exposed=walk.exposed,
        peak=[peak_memory(row, held, num) for row in rows],
    )


def compute_clock(
    schedule: Schedule, costs: Costs | None
) -> tuple[list[list[int]], list[list[float]]]:
    """Run the compute steps of all ranks in list order, each as soon as its inputs exist.

    Args:
        schedule: Its communication steps, its FSDP steps and its empty cells are skipped.
        costs: Durations of the compute steps, and the latency between ranks; None counts cells
            instead: every step takes one, an overlap two.

    Returns:
        The compute steps of each rank, and the time at which each of them ends.

    Raises:
        DeadlockError: If the order of the compute steps contradicts itself.
    """
    compute = (*range(FIRST_COMMUNICATION), *range(FIRST_OVERLAP, len(TYPES)))
    rows = [
        [code for code in row.codes() if code >= 0 and code & KIND_MASK in compute]
        for row in schedule.steps
    ]
    sizes = (schedule.num_stages, schedule.num_microbatches)
    same = [[1.0] * math.prod(sizes)] * FIRST_COMMUNICATION
    durations = costs.durations(*sizes) if costs else same
    walk = Walk(schedule, durations, (costs or Costs()).latency_of)
    walk.run(rows)
    for rank, (codes, finish) in enumerate(zip(rows, walk.ends, strict=True)):
        if len(finish) < len(codes):
            raise DeadlockError(
                f"rank {rank}, compute step {len(finish)}: {unpack(codes[len(finish)])} waits "
                "for a value that is never computed; `validate` shows where the order is wrong"
            )
    return rows, walk.ends


class Walk:
    """Visits the compute steps of all ranks, each once and after its inputs.

    Args:
        schedule: Its placement and its counts.
        durations: Durations of each kind of compute step; see `Costs.durations`.
        latency_of: Function that returns the latency of the edge from one rank to another.
        sending: How long each value occupies its channel, that of a directed edge; None: messages
            are as long as their latency.
        blocking: Whether a rank stands still while it sends.

    Attributes:
        ends: For each rank the end of each of its compute steps.
        busy: Time spent in steps, by rank.
        exposed: Time each rank spent waiting for values that were computed already.
    """

    def __init__(
        self,
        schedule: Schedule,
        durations: Sequence[list[float]],
        latency_of: Callable[[int, int], float],
        *,
        sending: Sequence[float] | None = None,
        blocking: bool = False,
    ) -> None:
        self.ends: list[list[float]] = [[] for _ in schedule.steps]
        self.busy, self.exposed = ([0.0] * schedule.num_ranks for _ in range(2))
        self._runnable = list(range(schedule.num_ranks))
        self._table = _table(schedule, durations, latency_of, sending, blocking=blocking)
        # By value: when it was computed, -1 before; -2 - rank where that rank waits for it.
        num_values = 2 * schedule.num_stages * schedule.num_microbatches
        self._written = [_ABSENT] * num_values
        # By value: how long it waits for others on its channel.
        self._late = [0.0] * num_values

    def run(self, rows: Sequence[list[int]]) -> bool:
        """Visit all steps of packed rows; returns whether each row could be walked to its end."""
        acts = [_acts(row) for row in rows]
        ranks = [self._run(rank, row) for rank, row in enumerate(acts)]
        left = len(ranks)
        while self._runnable:
            left -= next(ranks[self._runnable.pop()], True)
        for rank, (row, row_acts) in enumerate(zip(rows, acts, strict=True)):
            if row_acts is not row:
                self.ends[rank] = _ends_of_steps(row_acts, self.ends[rank])
        return left == 0

    def _run(self, rank: int, codes: Iterable[int]) -> Generator[bool, None, None]:
        """Walk a row; yields False where a value is lacking that another rank is to write."""
        entry_of, written, runnable = self._table.get, self._written, self._runnable
        late = self._late
        ended = self.ends[rank].append
        now = busy = exposed = 0.0
        for code in codes:
            entry = entry_of(code & _KEY_MASK)
            if entry is None:
                continue
            reads, writes, gaps, durations, pauses, channel = entry
            microbatch = code >> MICROBATCH_SHIFT & MICROBATCH_MASK
            if reads >= 0:
                produced = written[reads + microbatch]
                if produced < 0:
                    written[reads + microbatch] = -2 - rank
                    yield False
                    produced = written[reads + microbatch]
                arrival = produced + gaps[microbatch] + late[reads + microbatch]
                if arrival > now:
                    exposed += arrival - max(now, produced)
                    now = arrival
            duration = durations[microbatch]
            busy += duration
            now += duration
            ended(now)
            if writes >= 0:
                waiter = written[writes + microbatch]
                written[writes + microbatch] = now
                if channel is not None:
                    late[writes + microbatch] = channel.waits(microbatch, now)
                if waiter < _ABSENT:
                    runnable.append(int(-2 - waiter))
                pause = pauses[microbatch]
                if pause:
                    now += pause
                    exposed += pause
        self.busy[rank], self.exposed[rank] = busy, exposed


def _table(
    schedule: Schedule,
    durations: Sequence[list[float]],
    latency_of: Callable[[int, int], float],
    sending: Sequence[float] | None,
    *,
    blocking: bool,
) -> dict[int, _Entry]:
    num, flow = schedule.num_microbatches, dataflow(schedule)
    nothing = [0.0] * num
    table: dict[int, _Entry] = {}
    channels: defaultdict[tuple[int, int], _Free] = defaultdict(_Free)

    def on_the_way(source: int, target: int, value: int) -> list[float]:
        """Return how long a value travels between two ranks, by microbatch."""
        latency = latency_of(source, target)
        if sending is None:
            return [latency] * num
        return [sent + latency for sent in sending[value : value + num]]

    for stage, rank in enumerate(schedule.stage_to_rank):
        for kind in range(FIRST_COMMUNICATION):
            source = (schedule.upstream if kind == FWD else schedule.downstream)[stage]
            place = rank if source < 0 else schedule.stage_to_rank[source]
            reads, writes = flow.reads[kind][stage], flow.writes[kind][stage]
            gaps = nothing if place == rank else on_the_way(place, rank, reads)
            pauses, channel = nothing, None
            peer = flow.peer[SEND_OF[kind]][stage] if writes >= 0 else -1
            if sending is not None and peer >= 0:
                if blocking:
                    pauses = on_the_way(rank, peer, writes)
                elif any(sent := list(sending[writes : writes + num])):
                    channel = _Channel(channels[rank, peer], sent)
            cells = durations[kind][stage * num : (stage + 1) * num]
            code = encode(kind, stage)
            table[code] = (reads, writes, gaps, cells, pauses, channel)
            table[code | _WAIT] = (reads, -1, gaps, nothing, nothing, None)
            table[code | _RUN] = (-1, -1, nothing, cells, nothing, None)
            table[code | _RUN_AND_WRITE] = (-1, writes, nothing, cells, nothing, channel)
            table[code | _WRITE] = (-1, writes, nothing, nothing, nothing, channel)
    return table


def _acts(codes: list[int]) -> list[int]:
    """Return a row with its overlaps taken apart."""
    if not {code & KIND_MASK for code in codes if code >= 0} & {OVERLAP_F_B, OVERLAP_B_F}:
        return codes
    return [act for code in codes for act in _acts_of(code)]


def _forwards_first(codes: list[int]) -> Iterator[int]:
    """Yield the steps of a row, of each overlap the one that takes memory first."""
    for code in codes:
        yield from sorted(leaves(code), key=lambda leaf: leaf & KIND_MASK != FWD)


def _acts_of(code: int) -> tuple[int, ...]:
    if code < 0 or code & KIND_MASK < FIRST_OVERLAP:
        return (code,)
    first, second = halves(code)
    return first | _WAIT, second | _WAIT, first | _RUN, second | _RUN_AND_WRITE, first | _WRITE


def _ends_of_steps(acts: list[int], ends: list[float]) -> list[float]:
    """Return one end for each step from one for each compute act of a row."""
    compute = (act for act in acts if is_compute(act))
    return [
        end for act, end in zip(compute, ends, strict=False) if act >> _ACT_SHIFT in {0, _LAST_RUN}
    ]


def peak_memory(codes: list[int], held: ActivationMemory, num_microbatches: int) -> float:
    """Return the most memory that a row holds: more from every F, less after every B or W.

    An F whose microbatch is run again takes its input only, the RECOMPUTE the rest. OFFLOAD gives
    back what it moves, RELOAD takes it again.
    """
    kinds = {code & KIND_MASK for code in codes if code >= 0}
    again = {code >> STAGE_SHIFT for code in codes if code & KIND_MASK == RECOMPUTE}
    now = peak = 0.0
    for code in _forwards_first(codes) if kinds & {OVERLAP_F_B, OVERLAP_B_F} else codes:
        kind = code & KIND_MASK
        if kind not in _TAKES and kind not in _GIVES:
            continue
        stage = code >> STAGE_SHIFT & STAGE_MASK
        index = stage * num_microbatches + (code >> MICROBATCH_SHIFT)
        if kind == FWD:
            now += (held.input if code >> STAGE_SHIFT in again else held.all)[index]
        elif kind == RECOMPUTE:
            now += held.all[index] - held.input[index]
        elif kind == RELOAD:
            now += held.moved[index]
        else:
            now -= (held.moved if kind == OFFLOAD else held.all)[index]
        peak = max(peak, now)
    return peak


_TAKES: Final = frozenset({FWD, RECOMPUTE, RELOAD})
_GIVES: Final = frozenset({BWD, BWD_WEIGHT, OFFLOAD})
