"""Vector clocks over the streams of one rank, for the order of its operations. No torch.

Every stream counts its operations. An operation is named by the position of its stream and that
count, an `Epoch`. A stream knows, for every other stream, up to which count that stream is done
before its own next operation begins. The semantics of CUDA and of torch define this knowledge:

- operations of one stream run in the order in which the host issued them;
- `RecordEvent` stores the knowledge and the operations of its stream so far; `WaitEvent` adds them
  to the knowledge of another stream. After a second record of an event the last record counts;
- a collective begins after the operations of the current stream so far, runs on the stream of its
  communicator, and `WaitWork` adds the knowledge of that stream at that time. Operations of one
  batch run concurrently;
- `HostWait` adds to the knowledge of the host, and so to that of every stream from then on.

All threads of the host count as one: a wait in one thread precedes later operations of the others.
This is their recorded order; whether the program enforces that order cannot be seen in a trace.
"""

from __future__ import annotations

from typing import TypeAlias

from hp_dry.trace import (
    Collective,
    Event,
    HostWait,
    Launch,
    RecordEvent,
    WaitEvent,
    WaitWork,
)

Epoch: TypeAlias = "tuple[int, int]"
"""Position of a stream, and count of one of its operations."""


class Clocks:
    """Knowledge of each stream and of the host, updated event by event of a trace.

    Attributes:
        host_changes: Number of waits of the host for the device.
    """

    def __init__(self) -> None:
        self._position: dict[int, int] = {}
        self._known: list[list[int]] = []
        self._issued: list[int] = []
        self._batch: list[int] = []
        self._host: list[int] = []
        self.host_changes = 0
        self._host_changes_seen: list[int] = []
        self._events: dict[int, list[int]] = {}
        self._works: dict[int, list[int]] = {}

    def observe(self, event: Event) -> bool:
        """Process the next event of the trace.

        Returns:
            False if it waits for an event without a record, or for a work before its launch.
        """
        if isinstance(event, Launch):
            self._issue(self.position(event.stream), -1)
        elif isinstance(event, Collective):
            self._start(event)
        elif isinstance(event, RecordEvent):
            self._events[event.event] = self._snapshot(event.stream)
        elif isinstance(event, WaitEvent):
            return self._learn(event.stream, self._events.get(event.event))
        elif isinstance(event, WaitWork) and event.stream >= 0:  # not a wait of the host
            return self._learn(event.stream, self._works.get(event.work))
        elif isinstance(event, HostWait):
            return self._tell_host(event)
        return True

    def position(self, stream: int) -> int:
        """Return the position of a stream, which is added if it is new."""
        if (found := self._position.get(stream)) is None:
            found = self._position[stream] = len(self._known)
            for row in (self._issued, self._host, *self._known):
                row.append(0)
            self._known.append([0] * (found + 1))
            self._batch.append(-1)
            self._host_changes_seen.append(0)
        return found

    def now(self, stream: int) -> Epoch:
        """Return the last operation of a stream, with count 0 if it has none."""
        position = self.position(stream)
        return position, self._issued[position]

    def is_before_current(self, epoch: Epoch, stream: int) -> bool:
        """Tell whether an operation is done before the last operation of `stream` begins."""
        position, count = epoch
        return self._known[self._position[stream]][position] >= count

    def is_before_next(self, epoch: Epoch, stream: int) -> bool:
        """Tell whether an operation is done before any later operation of `stream`."""
        position, count = epoch
        mine = self.position(stream)
        return position == mine or self._updated(mine)[position] >= count

    def is_known_to_host(self, epoch: Epoch) -> bool:
        """Tell whether the host has waited for an operation."""
        position, count = epoch
        return self._host[position] >= count

    def is_recorded_by(self, epoch: Epoch, event: int) -> bool:
        """Tell whether an operation is done when the last record of `event` is reached."""
        position, count = epoch
        record = self._events.get(event, [])
        return position < len(record) and record[position] >= count

    def _issue(self, position: int, batch: int) -> None:
        row = self._updated(position)
        if batch < 0 or batch != self._batch[position]:
            row[position] = self._issued[position]
            self._issued[position] += 1
        self._batch[position] = batch

    def _start(self, event: Collective) -> None:
        position = self.position(event.stream)
        if event.issuer != event.stream:
            _join(self._known[position], self._snapshot(event.issuer))
        self._issue(position, event.batch)
        self._works[event.work] = self._snapshot(event.stream)

    def _learn(self, stream: int, record: list[int] | None) -> bool:
        if record is not None:
            _join(self._known[self.position(stream)], record)
        return record is not None

    def _tell_host(self, event: HostWait) -> bool:
        record: list[int] | None = self._issued
        if event.event >= 0:
            record = self._events.get(event.event)
        elif event.stream >= 0:
            record = self._snapshot(event.stream)
        _join(self._host, record or [])
        self.host_changes += 1
        return record is not None

    def _snapshot(self, stream: int) -> list[int]:
        position = self.position(stream)
        record = self._updated(position).copy()
        record[position] = self._issued[position]
        return record

    def _updated(self, position: int) -> list[int]:
        """Return the knowledge of a stream, updated with the knowledge of the host."""
        row = self._known[position]
        if self._host_changes_seen[position] != self.host_changes:
            _join(row, self._host)
            self._host_changes_seen[position] = self.host_changes
        return row


def _join(row: list[int], other: list[int]) -> None:
    for position, count in enumerate(other):
        if count > row[position]:  # noqa: PLR1730 - `max` takes twice as long here
            row[position] = count
