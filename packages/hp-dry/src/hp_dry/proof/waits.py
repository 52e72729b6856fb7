"""Waits of streams, communicators and hosts for each other, for one rank of every colour.

Every event needs others first: the earlier events of its host, the earlier work of its streams, the
previous operation of its communicator, the begin of the operation on the other members. There are
no choices, so that exactly those events can happen that a topological sort by these needs reaches;
the others wait in a cycle. No buffering is assumed: a send ends when its receive has begun, on the
device and on the host. If a launch loads its kernel, the host waits for the device
(`hp_dry.proof.loads`), and other threads launch nothing meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hp_dry.proof.loads import Modules
from hp_dry.proof.matching import Operation, Problem, channel_of, described
from hp_dry.proof.symmetry import Symmetry, family_of
from hp_dry.trace import (
    Collective,
    Event,
    HostMessage,
    HostWait,
    Launch,
    RecordEvent,
    WaitEvent,
    WaitWork,
)

Key = tuple[object, ...]


@dataclass(slots=True)
class _Graph:
    """Graph of the needs of all events.

    Attributes:
        needs: Nodes that must be reached before each node.
        owner: Rank, event and side (`"host"`, `"begin"` or `"end"`) of each node; None for a node
            that only joins others.
    """

    needs: list[list[int]] = field(default_factory=list)
    owner: list[tuple[int, Event, str] | None] = field(default_factory=list)

    def add(self, needs: Iterable[int], owner: tuple[int, Event, str] | None = None) -> int:
        self.needs.append([each for each in needs if each >= 0])
        self.owner.append(owner)
        return len(self.needs) - 1

    def stuck(self) -> set[int]:
        """Return the nodes that are never reached."""
        users: list[list[int]] = [[] for _ in self.needs]
        count = [len(needs) for needs in self.needs]
        for node, needs in enumerate(self.needs):
            for need in needs:
                users[need].append(node)
        ready = deque(node for node, number in enumerate(count) if not number)
        while ready:
            for user in users[ready.popleft()]:
                count[user] -= 1
                if not count[user]:
                    ready.append(user)
        return {node for node, number in enumerate(count) if number}

    def cycle(self, stuck: set[int]) -> list[int]:
        """Return a cycle of nodes, each of which waits for the next."""
        path: dict[int, int] = {}
        node = min(stuck)
        while node not in path:
            path[node] = len(path)
            node = next(need for need in self.needs[node] if need in stuck)
        return [each for each, place in path.items() if place >= path[node]]


class _Rank:
    """Queues of one rank while its trace is processed."""

    def __init__(self, graph: _Graph, rank: int, *, in_launch_order: bool) -> None:
        self.graph, self.rank, self.in_launch_order = graph, rank, in_launch_order
        self.host: dict[int, int] = {}  # by thread: its last node
        self.tails: dict[int, int] = {}  # by stream: end of its work so far
        self.queues: dict[str, int] = {}  # by communicator: the operation before
        self.events: dict[int, int] = {}
        self.works: dict[int, int] = {}
        self.launched = self.loading = -1
        self.batch = (-1, -1, -1)  # number, begin and end of the open batch

    def tail(self, stream: int) -> int:
        return self.tails.get(stream, -1)

    def go(self, event: Event, needs: Iterable[int] = ()) -> int:
        """Add the node of an event on the host."""
        node = self.graph.add([self.host.get(event.thread, -1), *needs], (self.rank, event, "host"))
        self.host[event.thread] = node
        return node

    def join(self, stream: int, need: int) -> None:
        self.tails[stream] = self.graph.add([self.tail(stream), need])

    def launch(self, event: Collective) -> tuple[int, int]:
        """Queue an operation; return the nodes of its begin and its end."""
        if event.batch >= 0 and event.batch == self.batch[0]:
            return self.batch[1], self.batch[2]
        needs = [
            self.go(event, [self.loading]),
            self.tail(event.issuer),
            self.tail(event.stream),
            self.queues.get(event.group, -1),
            self.launched if self.in_launch_order else -1,
        ]
        begin = self.graph.add(needs, (self.rank, event, "begin"))
        end = self.graph.add([begin], (self.rank, event, "end"))
        self.tails[event.stream] = self.queues[event.group] = end
        self.launched = begin
        self.works[event.work] = end
        self.batch = (event.batch, begin, end)
        return begin, end

    def load(self, event: Launch) -> None:
        """Make the host wait for the device, and later launches of all threads for the host."""
        self.loading = self.go(event, [self.loading, *self.tails.values()])


class Waits:
    """Graph of a world, in which a cycle is a deadlock.

    Args:
        symmetry: Colours of the world's ranks, with their traces.
        in_launch_order: Whether NCCL runs operations of all communicators of a device in the order
            of the host (`NCCL_LAUNCH_ORDER_IMPLICIT`).
        eager: Whether torch's kernels are loaded before anything is launched
            (`CUDA_MODULE_LOADING`).
    """

    def __init__(
        self, symmetry: Symmetry, *, in_launch_order: bool = False, eager: bool = False
    ) -> None:
        self._symmetry, self._eager = symmetry, eager
        self._graph = _Graph()
        self._began: dict[Key, int] = {}
        self._ends: list[tuple[int, list[Key]]] = []
        for colour, rank in symmetry.example.items():
            self._follow(colour, _Rank(self._graph, rank, in_launch_order=in_launch_order))
        for end, keys in self._ends:
            self._graph.needs[end] += [self._began[key] for key in keys if key in self._began]

    def problems(self) -> list[Problem]:
        """Return the first cycle, if there is one."""
        stuck = self._graph.stuck()
        if not stuck:
            return []
        links: list[tuple[int, Event, str]] = []
        for node in self._graph.cycle(stuck):
            link = self._graph.owner[node]
            if link is not None and (not links or links[-1][:2] != link[:2]):
                links.append(link)
        shown = _shortened(links)
        ranks = tuple(dict.fromkeys(rank for rank, _, _ in shown))
        at = tuple(event.at for _, event, _ in shown)
        words = "; ".join(_described_link(*link) for link in shown)
        text = f"these wait for each other, each for the next one: {words}"
        return [Problem("deadlock", ranks, at, text)]

    def _follow(self, colour: int, state: _Rank) -> None:  # a case for each event
        counts: dict[Key, int] = {}
        modules = Modules(eager=self._eager)
        for event in self._symmetry.trace_of(state.rank).events:
            if isinstance(event, Launch) and modules.loads(event):
                state.load(event)
            elif isinstance(event, Collective):
                begin, end = state.launch(event)
                self._meet(colour, state.rank, event, counts, begin, end)
            elif isinstance(event, HostMessage):
                self._message(colour, state, event, counts)
            elif isinstance(event, HostWait):
                state.go(event, _waited_for(state, event))
            elif isinstance(event, WaitWork):
                done = state.works.get(event.work, -1)
                if event.stream < 0:
                    state.go(event, [done])
                else:
                    state.join(event.stream, done)
            elif isinstance(event, RecordEvent):
                state.events[event.event] = state.tail(event.stream)
            elif isinstance(event, WaitEvent):
                state.join(event.stream, state.events.get(event.event, -1))

    def _message(
        self, colour: int, state: _Rank, event: HostMessage, counts: dict[Key, int]
    ) -> None:
        begin = state.go(event)
        if channel_of(event) == "making" and not event.waits:
            return
        end = self._graph.add([begin], (state.rank, event, "end"))
        self._meet(colour, state.rank, event, counts, begin, end)
        if event.work >= 0:
            state.works[event.work] = end
        if event.waits:
            state.go(event, [end])

    def _meet(  # noqa: PLR0917
        self, colour: int, rank: int, event: Operation, counts: dict[Key, int], begin: int, end: int
    ) -> None:
        """Record the begin of an operation; its end needs its begin on the other ranks."""
        symmetry, channel, family = self._symmetry, channel_of(event), family_of(event.group)
        if event.peer < 0:
            number = counts[channel, family] = counts.get((channel, family), 0) + 1
            self._began[colour, channel, family, number] = begin
            members = {symmetry.colours[other] for other in symmetry.ranks(family, rank)}
            keys: list[Key] = [(each, channel, family, number) for each in members]
        else:
            distance = symmetry.distance(event, symmetry.classes.representative[rank])
            tag = "" if channel == "device" else event.detail
            sends = event.op == "send"
            one: Key = (channel, family, distance, tag, sends)
            number = counts[one] = counts.get(one, 0) + 1
            self._began[(colour, *one, number)] = begin
            other = symmetry.at_distance(family, rank, distance if sends else -distance)
            keys = [(symmetry.colours[other], channel, family, distance, tag, not sends, number)]
        self._ends.append((end, keys))


def _waited_for(state: _Rank, event: HostWait) -> list[int]:
    if event.event >= 0:
        return [state.events.get(event.event, -1)]
    if event.stream >= 0:
        return [state.tail(event.stream)]
    return list(state.tails.values())


def _shortened(links: list[tuple[int, Event, str]]) -> list[tuple[int, Event, str]]:
    """Leave out links of a rank's host between two other links of the same rank."""
    shown: list[tuple[int, Event, str]] = []
    for place, link in enumerate(links):
        before, after = links[place - 1], links[(place + 1) % len(links)]
        is_between = link[2] == "host" and before[0] == link[0] == after[0]
        is_wait = isinstance(link[1], HostWait | WaitWork | Launch) or (
            isinstance(link[1], HostMessage) and link[1].waits
        )
        if not is_between or is_wait:
            shown.append(link)
    return shown or links


def _described_link(rank: int, event: Event, what: str) -> str:
    place = f" ({event.place})" if event.place else ""
    if isinstance(event, Collective | HostMessage):
        words = f"{described(event)} in {event.group}"
        how = {"host": "the host of ", "begin": "the start on ", "end": ""}[what]
        return f"{how}rank {rank}, {words}"
    if isinstance(event, HostWait):
        return f"rank {rank}, the host waits for the device ({event.what}) at {event.at}{place}"
    if isinstance(event, Launch):
        module = event.variant or event.what
        return f"rank {rank}, the host waits for the device to load {module} at {event.at}{place}"
    return f"rank {rank}, {type(event).__name__} at {event.at}{place}"
