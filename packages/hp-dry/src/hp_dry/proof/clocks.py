"""Vector clocks over the streams of one rank: what is known to be done before what. No torch.

Every stream counts the operations that it was given; an operation is named by the position of its
stream and that count, an `Epoch`. A stream knows, for every other, up to which count that one is
done before its own next operation begins. It learns this as CUDA's semantics and torch's say:

- operations of one stream run in the order in which the host gave them;
- `RecordEvent` stores what its stream knows and was given so far; `WaitEvent` adds it to what
  another stream knows. An event that was recorded twice stands for the last record;
- a collective begins after what was given to the stream that was current, runs on the stream of its
  communicator, and `WaitWork` adds what that one then knew. Operations of one batch run side by
  side;
- `HostWait` adds to what the host knows, and so to what any stream is given from then on.

The threads of the host count as one: what one thread has waited for is known to what another one
issues later. That is how they were seen to run; whether the program forces that order is not known
from a trace.
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
"""Position of a stream, and the count of one of its operations."""


class Clocks:
    """Follows what each stream and the host know, as a trace is gone through in order.

    Attributes:
        host_changes: Times that the host has waited for the device.
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
        """Go on by one event of the trace.

        Returns:
            False if it waits for an event that was not recorded, or a work that was not launched.
        """
        if isinstance(event, Launch):
            self._issue(self.position(event.stream), -1)
        elif isinstance(event, Collective):
            self._start(event)
        elif isinstance(event, RecordEvent):
            self._events[event.event] = self._snapshot(event.stream)
        elif isinstance(event, WaitEvent):
            return self._learn(event.stream, self._events.get(event.event))
        elif isinstance(event, WaitWork) and event.stream >= 0:  # the host's are not the device's
            return self._learn(event.stream, self._works.get(event.work))
        elif isinstance(event, HostWait):
            return self._tell_host(event)
        return True

    def position(self, stream: int) -> int:
        """Return the index of a stream in what others know; streams are added as they are seen."""
        if (found := self._position.get(stream)) is None:
            found = self._position[stream] = len(self._known)
            for row in (self._issued, self._host, *self._known):
                row.append(0)
            self._known.append([0] * (found + 1))
            self._batch.append(-1)
            self._host_changes_seen.append(0)
        return found

    def now(self, stream: int) -> Epoch:
        """Return the operation that a stream was given last, with count 0 if there was none."""
        position = self.position(stream)
        return position, self._issued[position]

    def is_before_current(self, epoch: Epoch, stream: int) -> bool:
        """Tell whether an operation is done before the one that `stream` was given last begins."""
        position, count = epoch
        return self._known[self._position[stream]][position] >= count

    def is_before_next(self, epoch: Epoch, stream: int) -> bool:
        """Tell whether an operation is done before all that `stream` is given from now on."""
        position, count = epoch
        mine = self.position(stream)
        return position == mine or self._heard(mine)[position] >= count

    def is_known_to_host(self, epoch: Epoch) -> bool:
        """Tell whether the host has waited until an operation was done."""
        position, count = epoch
        return self._host[position] >= count

    def is_recorded_by(self, epoch: Epoch, event: int) -> bool:
        """Tell whether an operation is done when `event`, as it was recorded last, is reached."""
        position, count = epoch
        record = self._events.get(event, [])
        return position < len(record) and record[position] >= count

    def _issue(self, position: int, batch: int) -> None:
        row = self._heard(position)
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
        record = self._heard(position).copy()
        record[position] = self._issued[position]
        return record

    def _heard(self, position: int) -> list[int]:
        """Return what a stream knows, with what the host has come to know meanwhile."""
        row = self._known[position]
        if self._host_changes_seen[position] != self.host_changes:
            _join(row, self._host)
            self._host_changes_seen[position] = self.host_changes
        return row


def _join(row: list[int], other: list[int]) -> None:
    for position, count in enumerate(other):
        if count > row[position]:  # noqa: PLR1730 - `max` takes twice as long here
            row[position] = count
