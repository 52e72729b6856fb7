"""Ranks of a world whose programs and neighbours are alike, found from what classes recorded.

A rank that had no process did what its representative did, in the groups of the same families that
it is in, with peers as many positions further. Two ranks have one colour if they have one
representative and, in every family, meet the same colours (and the same colour at the same
distance, where messages go). Then they are always at the same point: by induction over steps, what
one waits for is reached exactly when what the other waits for is. So it is enough to follow one
rank of every colour, for worlds of any size, and nothing is lost by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hp_dry.cluster import Classes
from hp_dry.trace import Collective, HostMessage, Trace


def family_of(name: str) -> str:
    """Return the name of the family of a communicator."""
    return name.split("[", 1)[0]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Group in which a rank meets others.

    Attributes:
        family: Family of the communicator.
        distance: Positions in the group from the sender to the receiver of a message; 0: a
            collective of the whole group.
        is_send: Whether this rank sends.
    """

    family: str
    distance: int = 0
    is_send: bool = False


class Symmetry:
    """Colours of all ranks, and who is in which group.

    Attributes:
        traces: Traces of the representatives, by global rank.
        classes: Classes of the ranks, each with its representative.
        colours: Colour of each rank, a number, by global rank.
        example: A rank of each colour, by colour; the representative where it has that colour.

    Raises:
        ValueError: If a representative has no trace, or nobody knows a group that a rank must be
            in.
    """

    def __init__(self, traces: Mapping[int, Trace], classes: Classes) -> None:
        self.traces, self.classes = traces, classes
        if missing := sorted(set(classes.members) - set(traces)):
            raise ValueError(f"traces must hold those of representatives {missing}")
        self._lists = {rank: self._lists_of(trace) for rank, trace in traces.items()}
        self._meetings = {rank: self._meetings_of(traces[rank]) for rank in classes.members}
        self.colours = self._refined()
        self.example: dict[int, int] = {}
        for rank, colour in enumerate(self.colours):
            known = self.example.setdefault(colour, rank)
            if classes.representative[rank] == rank != known:
                self.example[colour] = rank

    def ranks(self, family: str, rank: int) -> tuple[int, ...]:
        """Return the ranks of the group of a family that a rank is in.

        Raises:
            ValueError: If nobody has said.
        """
        speaks = self.classes.representative[rank]
        if (found := self._lists[speaks].get((family, rank))) is None:
            raise ValueError(
                f"rank {rank} must be in a group {family} as rank {speaks}, which stands for it, "
                "is: give it a process of its own"
            )
        return found

    def is_known(self, family: str, rank: int) -> bool:
        """Tell whether a rank is in a group of a family."""
        return (family, rank) in self._lists[self.classes.representative[rank]]

    def at_distance(self, family: str, rank: int, distance: int) -> int:
        """Return the rank so many positions further in a group."""
        ranks = self.ranks(family, rank)
        return ranks[(ranks.index(rank) + distance) % len(ranks)]

    def trace_of(self, rank: int) -> Trace:
        """Return the trace that is a rank's own or its representative's."""
        return self.traces[self.classes.representative[rank]]

    def distance(self, event: Collective | HostMessage, rank: int) -> int:
        """Return the positions from sender to receiver, of a message in the trace of `rank`."""
        ranks = self.ranks(family_of(event.group), rank)
        steps = (ranks.index(event.peer) - ranks.index(rank)) % len(ranks)
        return steps if event.op == "send" else (-steps) % len(ranks)

    def _lists_of(self, trace: Trace) -> dict[tuple[str, int], tuple[int, ...]]:
        found = {
            (family, rank): ranks
            for family, lists in trace.families.items()
            for ranks in lists
            for rank in ranks
        }
        for name, ranks in trace.groups.items():
            if "pair[" not in name:
                found.update({(family_of(name), rank): ranks for rank in ranks})
        return found

    def _meetings_of(self, trace: Trace) -> list[Meeting]:
        found: dict[Meeting, None] = {}
        for event in trace.events:
            if not isinstance(event, Collective | HostMessage):
                continue
            steps = 0 if event.peer < 0 else self.distance(event, trace.rank)
            found[Meeting(family_of(event.group), steps, event.op == "send")] = None
        return list(found)

    def _refined(self) -> list[int]:
        colours = list(self.classes.representative)
        while True:
            numbers: dict[object, int] = {}
            sets: dict[tuple[int, ...], frozenset[int]] = {}
            refined = []
            for rank, colour in enumerate(colours):
                key = (colour, *self._met(rank, colours, sets))
                refined.append(numbers.setdefault(key, len(numbers)))
            if len(numbers) == len(set(colours)):
                return refined
            colours = refined

    def _met(
        self, rank: int, colours: Sequence[int], sets: dict[tuple[int, ...], frozenset[int]]
    ) -> Iterator[object]:
        """Yield the colour, or the set of colours, that a rank meets in each of its meetings.

        Args:
            rank: Global rank.
            colours: Colour of each rank, by global rank.
            sets: Set of the colours of each group, which grows.
        """
        for meeting in self._meetings[self.classes.representative[rank]]:
            if meeting.distance:
                steps = meeting.distance if meeting.is_send else -meeting.distance
                yield colours[self.at_distance(meeting.family, rank, steps)]
                continue
            ranks = self.ranks(meeting.family, rank)
            if ranks not in sets:
                sets[ranks] = frozenset(colours[other] for other in ranks)
            yield sets[ranks]
