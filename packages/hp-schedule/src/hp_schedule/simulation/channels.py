"""Time as a queue of events, shared cores, and channels under three ways to share communicators."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Literal, get_args

from hp_schedule.costs import Costs
from hp_schedule.schedule import Schedule

Action = Callable[[], None]


class Clock:
    """Runs actions in the order of their times; actions of one time in the order of the calls.

    Attributes:
        now: The time of the action that runs, of the last one at the end.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._number = count()

    def at(self, time: float, action: Action) -> None:
        """Run an action later; `time` is not before `now`."""
        heappush(self._events, (time, next(self._number), action))

    def after(self, duration: float, action: Action) -> None:
        """Run an action once `duration` has passed."""
        self.at(self.now + duration, action)

    def run(self) -> None:
        """Run until nothing is left to be done."""
        while self._events:
            self.now, _, action = heappop(self._events)
            action()


class SharedCores:
    """All ranks share a machine, as processes under a fair operating system do.

    While n steps run on c < n cores, each advances at c / n of its full speed. The work done per
    running step is one number for all of them, so that the next to end is the one with the least
    work at its end.

    Args:
        clock: The clock.
        cores: How many steps run at full speed at once, at least 1.
    """

    def __init__(self, clock: Clock, cores: int) -> None:
        self._clock = clock
        self._cores = cores
        self._number = count()
        self._running: list[tuple[float, int, Action]] = []
        self._work = 0.0
        self._seen = 0.0
        self._plan = 0

    def start(self, duration: float, done: Action) -> None:
        """Begin a step that takes `duration` on a core of its own; `done` is called at its end.

        From now on all running steps may be slower.
        """
        self._advance()
        heappush(self._running, (self._work + duration, next(self._number), done))
        self._plan_next()

    def _advance(self) -> None:
        self._work += (self._clock.now - self._seen) * self._speed
        self._seen = self._clock.now

    @property
    def _speed(self) -> float:
        return min(1.0, self._cores / max(1, len(self._running)))

    def _plan_next(self) -> None:
        self._plan += 1
        if self._running:
            plan = self._plan
            left = max(0.0, self._running[0][0] - self._work) / self._speed
            self._clock.after(left, lambda: self._finish(plan))

    def _finish(self, plan: int) -> None:
        if plan != self._plan:
            return
        self._advance()
        self._work, _, done = heappop(self._running)
        self._plan_next()
        done()


ChannelModel = Literal["edge", "pair", "rank"]
"""Which messages share an in-order queue on a rank: those of a directed edge, those of a pair of
ranks in both directions, or all of them (one communicator for all ranks)."""

Edge = tuple[int, int]


@dataclass(slots=True)
class _Queue:
    """The operations that one rank has issued on one communicator, in order."""

    values: deque[int] = field(default_factory=deque)
    busy: bool = False


class Channels:
    """Moves a message when its send and its receive are both the oldest of their queues.

    The message then occupies both queues until it has arrived, or, on a channel for each directed
    edge, only for the time of its transmission: messages of an edge may follow each other on the
    wire.

    Args:
        model: Which messages share a queue.
        schedule: Schedule whose messages are sent.
        costs: Latency, message sizes and bandwidth.
        clock: Told when messages arrive.
        on_arrival: Called with the value and its edge.
    """

    def __init__(
        self,
        model: ChannelModel,
        schedule: Schedule,
        costs: Costs,
        clock: Clock,
        on_arrival: Callable[[int, Edge], None],
    ) -> None:
        self._model = model
        self._costs = costs
        self._clock = clock
        self._on_arrival = on_arrival
        self._queues: dict[tuple[int, Edge], _Queue] = {}
        self._edges: dict[int, Edge] = {}
        self._transmission = transmission_by_value(schedule, costs)

    def issue(self, rank: int, value: int, edge: Edge) -> None:
        """Add the send or the receive of a value to a rank's queue."""
        queue = self._queue(rank, edge)
        queue.values.append(value)
        self._edges[value] = edge
        self._try(queue)

    def waiting(self, rank: int, edge: Edge) -> Sequence[int]:
        """Return the values that wait on a rank for their turn on the channel of an edge."""
        return self._queue(rank, edge).values

    def _queue(self, rank: int, edge: Edge) -> _Queue:
        return self._queues.setdefault((rank, channel_of(self._model, edge)), _Queue())

    def _try(self, queue: _Queue) -> None:
        """Start the transfer of a queue's oldest message if it can start."""
        if queue.busy or not queue.values:
            return
        value = queue.values[0]
        edge = self._edges[value]
        ends = (self._queue(edge[0], edge), self._queue(edge[1], edge))
        for end in ends:
            if end.busy or not end.values or end.values[0] != value:
                return
        for end in ends:
            end.busy = True
        sent = self._clock.now + self._transmission[value]
        arrival = sent + self._costs.latency_of(*edge)
        free = sent if self._model == "edge" else arrival
        self._clock.at(arrival, partial(self._on_arrival, value, edge))
        self._clock.at(free, partial(self._release, ends))

    def _release(self, ends: tuple[_Queue, _Queue]) -> None:
        for end in ends:
            end.values.popleft()
            end.busy = False
        for end in ends:
            self._try(end)


def check_model(model: ChannelModel) -> None:
    """Raise ValueError for a name that is no model."""
    if model not in get_args(ChannelModel):
        raise ValueError(f"channels ({model}) must be {' or '.join(get_args(ChannelModel))}")


def channel_of(model: ChannelModel, edge: Edge) -> Edge:
    """Return the key of the communicator that serves an edge."""
    match model:
        case "edge":
            return edge
        case "pair":
            return (min(edge), max(edge))
        case "rank":
            return (-1, -1)


def transmission_by_value(schedule: Schedule, costs: Costs) -> list[float]:
    """Return how long each value (see `hp_schedule.schedule`) occupies a channel."""
    num = schedule.num_microbatches
    outputs = costs.transmission(schedule.num_stages, num)
    gradients = [
        time
        for before in schedule.upstream
        for time in (outputs[before * num : (before + 1) * num] if before >= 0 else [0.0] * num)
    ]
    return outputs + gradients
