"""Deadlocks of a machine whose messages queue up on communicators while its ranks go on.

Sends and receives are issued in the order of the row and hold up nobody; a message moves when both
its ends are the oldest of their queues; a compute step waits for its inputs. This is the machine of
the simulator without its clock.
"""

from collections import defaultdict, deque

from hp_schedule.dataflow import dataflow
from hp_schedule.packing import (
    BWD_SEND,
    FIRST_COMMUNICATION,
    FIRST_FSDP,
    FWD_SEND,
    KIND_MASK,
    STAGE_MASK,
    STAGE_SHIFT,
    is_compute,
    leaves,
)
from hp_schedule.schedule import Schedule
from hp_schedule.simulation.channels import ChannelModel, channel_of
from hp_schedule.validation.rendezvous import Wait, cycle_finding, message_ends
from hp_schedule.validation.report import Finding

SHARING: dict[ChannelModel, str] = {
    "edge": "one communicator for each directed edge",
    "pair": "one communicator for each pair of ranks",
    "rank": "one communicator for all ranks",
}

_Queue = tuple[int, tuple[int, int]]
"""A rank and one of its communicators."""


class QueueMachine:
    """Runs all rows under one way of sharing communicators; linear in the number of steps.

    Args:
        schedule: Must have passed the checks of the rows.
        channels: Which messages share a queue.
    """

    def __init__(self, schedule: Schedule, channels: ChannelModel) -> None:
        self._schedule = schedule
        self._channels = channels
        self._flow = dataflow(schedule)
        self._rows = [row.codes() for row in schedule.steps]
        self._position = [0] * schedule.num_ranks
        self._queues: defaultdict[_Queue, deque[int]] = defaultdict(deque)
        self._arrived: set[int] = set()
        self._waiting: dict[int, int] = {}

    def deadlock(self) -> Finding | None:
        """Return a cycle of waits, or None if every row runs to its end."""
        runnable = list(range(self._schedule.num_ranks))
        while runnable:
            self._advance(runnable.pop(), runnable)
        if not self._waiting:
            return None
        waits = {rank: self._explain(rank, value) for value, rank in self._waiting.items()}
        return cycle_finding(waits, suffix=f" (with {SHARING[self._channels]})")

    def _advance(self, rank: int, runnable: list[int]) -> None:
        row = self._rows[rank]
        for position in range(self._position[rank], len(row)):
            code = row[position]
            if FIRST_COMMUNICATION <= code & KIND_MASK < FIRST_FSDP:
                self._issue(rank, code, runnable)
            elif is_compute(code):
                lacking = self._lacking(rank, code)
                if lacking is not None:
                    self._waiting[lacking] = rank
                    self._position[rank] = position
                    return
        self._position[rank] = len(row)

    def _lacking(self, rank: int, code: int) -> int | None:
        """Return a value that a compute step needs and that has not arrived."""
        for part in leaves(code):
            value = self._flow.value_read(part)
            if value >= 0 and value not in self._arrived and self._producer(value) != rank:
                return value
        return None

    def _producer(self, value: int) -> int:
        stage = value // self._schedule.num_microbatches % self._schedule.num_stages
        return self._schedule.stage_to_rank[stage]

    def _issue(self, rank: int, code: int, runnable: list[int]) -> None:
        kind = code & KIND_MASK
        peer = self._flow.peer[kind][code >> STAGE_SHIFT & STAGE_MASK]
        sends = kind in {FWD_SEND, BWD_SEND}
        value = self._flow.value_read(code) if sends else self._flow.value_written(code)
        edge = (rank, peer) if sends else (peer, rank)
        queue = (rank, channel_of(self._channels, edge))
        self._queues[queue].append(value)
        self._move(queue, runnable)

    def _move(self, queue: _Queue, runnable: list[int]) -> None:
        """Move messages until the oldest of the queue, and of those it frees, have to wait."""
        left = [queue]
        while left:
            values = self._queues[left[-1]]
            ends = self._queues_of(values[0]) if values else ()
            if not ends or any(self._oldest(end) != values[0] for end in ends):
                left.pop()
                continue
            value = values[0]
            for end in ends:
                self._queues[end].popleft()
            self._arrived.add(value)
            if value in self._waiting:
                runnable.append(self._waiting.pop(value))
            left += ends

    def _queues_of(self, value: int) -> tuple[_Queue, ...]:
        ranks = tuple(end.rank for end in message_ends(self._schedule, value))
        channel = channel_of(self._channels, (ranks[0], ranks[1]))
        return tuple((rank, channel) for rank in ranks)

    def _oldest(self, queue: _Queue) -> int | None:
        values = self._queues[queue]
        return values[0] if values else None

    def _explain(self, rank: int, value: int) -> Wait:
        """Say what keeps a value from a rank, through the messages that stand before it."""
        position = self._position[rank]
        step = self._schedule.steps[rank][position]
        text = f"{step} waits for {message_ends(self._schedule, value)[1].step}"
        passed: list[int] = []
        while value not in passed:
            passed.append(value)
            for end, queue in zip(
                message_ends(self._schedule, value), self._queues_of(value), strict=True
            ):
                if value not in self._queues[queue]:
                    return Wait(
                        position, f"{text}, rank {end.rank} has not come to {end.step}", end.rank
                    )
                oldest = self._queues[queue][0]
                if oldest != value:
                    text += f", on rank {end.rank} behind {self._half(oldest, end.rank)}"
                    value = oldest
                    break
        return Wait(position, text, rank)

    def _half(self, value: int, rank: int) -> str:
        """Return the step of a message on one of its ranks."""
        return next(str(e.step) for e in message_ends(self._schedule, value) if e.rank == rank)
