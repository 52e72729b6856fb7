"""The rules that show only when all rows run together: freedom from deadlock.

The machine is the least helpful one a schedule must survive: a send holds up its rank until its
receive is posted, each directed pair of ranks has one channel, a receive is posted when its step is
reached, and a compute step waits until its inputs have arrived.
"""

from hp_schedule.dataflow import Dataflow, dataflow
from hp_schedule.packing import (
    BWD_SEND,
    FIRST_COMMUNICATION,
    FIRST_FSDP,
    FIRST_OVERLAP,
    FWD_SEND,
    KIND_MASK,
    STAGE_MASK,
    STAGE_SHIFT,
    halves,
    unpack,
)
from hp_schedule.schedule import Schedule
from hp_schedule.validation.report import Finding, FindingKind


class Rendezvous:
    """Runs the rows of all ranks under rendezvous semantics; linear in the number of steps.

    Args:
        schedule: Must have passed the checks of the rows: messages match in order on each edge.
        communication: Whether values travel by send and receive steps; otherwise every value
            written is there for all ranks.
    """

    def __init__(self, schedule: Schedule, *, communication: bool) -> None:
        self._schedule = schedule
        self._communication = communication
        self._flow: Dataflow = dataflow(schedule)
        self._rows = [row.codes() for row in schedule.steps]
        self._position = [0] * schedule.num_ranks
        # A value is local to its rank once written there, and on its way once received (posted).
        self._written = bytearray(self._flow.num_values)
        self._posted = bytearray(self._flow.num_values)
        self._arrived = bytearray(self._flow.num_values)
        # Which rank, at its current cell, waits for the posting or the arrival of a value.
        self._waits_for_post: dict[int, int] = {}
        self._waits_for_value: dict[int, int] = {}

    def deadlock(self) -> Finding | None:
        """Return the cycle of waits, or None if every row runs to its end."""
        runnable = list(range(self._schedule.num_ranks))
        while runnable:
            self._advance(runnable.pop(), runnable)
        if not (self._waits_for_post or self._waits_for_value):
            return None
        return self._describe()

    def _advance(self, rank: int, runnable: list[int]) -> None:
        row = self._rows[rank]
        for position in range(self._position[rank], len(row)):
            code = row[position]
            if code >= 0 and not self._start(code, rank, runnable):
                self._position[rank] = position
                return
        self._position[rank] = len(row)

    def _start(self, code: int, rank: int, runnable: list[int]) -> bool:
        """Run a step if it can run now, and make those ranks runnable that waited for it."""
        kind = code & KIND_MASK
        if kind < FIRST_COMMUNICATION:
            return self._compute((code,), rank, runnable)
        if kind >= FIRST_OVERLAP:
            return self._compute(halves(code), rank, runnable)
        if kind >= FIRST_FSDP:
            return True
        if kind in {FWD_SEND, BWD_SEND}:
            value = self._flow.value_read(code)
            if not self._posted[value]:
                self._waits_for_post[value] = rank
                return False
            self._arrived[value] = 1
            if value in self._waits_for_value:
                runnable.append(self._waits_for_value.pop(value))
            return True
        value = self._flow.value_written(code)
        self._posted[value] = 1
        if value in self._waits_for_post:
            runnable.append(self._waits_for_post.pop(value))
        return True

    def _compute(self, parts: tuple[int, ...], rank: int, runnable: list[int]) -> bool:
        for part in parts:
            value = self._flow.value_read(part)
            if value >= 0 and not self._available(value, rank):
                self._waits_for_value[value] = rank
                return False
        for part in parts:
            value = self._flow.value_written(part)
            if value >= 0:
                self._written[value] = 1
                if not self._communication and value in self._waits_for_value:
                    runnable.append(self._waits_for_value.pop(value))
        return True

    def _available(self, value: int, rank: int) -> bool:
        if not self._communication or self._producer(value) == rank:
            return bool(self._written[value])
        return bool(self._arrived[value])

    def _producer(self, value: int) -> int:
        stage = value // self._schedule.num_microbatches % self._schedule.num_stages
        return self._schedule.stage_to_rank[stage]

    def _describe(self) -> Finding:
        """Follow the waits from the lowest stuck rank until one comes round again."""
        waits: dict[int, tuple[int, str]] = {}
        for value, rank in self._waits_for_value.items():
            waits[rank] = (self._producer(value), "for its value to come from")
        for rank in self._waits_for_post.values():
            send = self._rows[rank][self._position[rank]]
            peer = self._flow.peer[send & KIND_MASK][send >> STAGE_SHIFT & STAGE_MASK]
            waits[rank] = (peer, "for its receive to be posted by")
        path: list[int] = []
        rank = min(waits)
        while rank in waits and rank not in path:
            path.append(rank)
            rank = waits[rank][0]
        cycle = path[path.index(rank) :] if rank in path else path
        parts = [
            f"rank {r}, cell {self._position[r]}: {unpack(self._rows[r][self._position[r]])} "
            f"waits {waits[r][1]} rank {waits[r][0]}"
            for r in cycle
        ]
        first = cycle[0]
        text = "; ".join(parts)
        return Finding(FindingKind.DEADLOCK, text, first, self._position[first])
