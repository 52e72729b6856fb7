"""Ranks of a world with equal programs and equal neighbours, found in the traces of classes.

A rank without a process did the same as its representative, in the groups of the same families that
contain the rank, with peers at the same distances. Two ranks have one colour if they have one
representative and meet the same colours in every family (for messages, the same colour at the same
distance). Then both are always at the same point of their programs: by induction over steps, the
needs of one rank are met exactly when those of the other are. So it suffices to follow one rank of
every colour, for worlds of any size.
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
    """Kind of operation of a rank with others in a group.

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
    """Colours of all ranks, and the groups of each rank.

    Attributes:
        traces: Traces of the representatives, by global rank.
        classes: Classes of the ranks, each with its representative.
        colours: Colour of each rank, a number, by global rank.
        example: Rank of each colour, by colour; a representative if it has that colour.

    Raises:
        ValueError: If a representative has no trace, or no trace has a group that a rank must be
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
        """Return the ranks of the group of a family that contains a rank.

        Raises:
            ValueError: If no trace has such a group.
        """
        representative = self.classes.representative[rank]
        if (found := self._lists[representative].get((family, rank))) is None:
            raise ValueError(
                f"rank {rank} must be in a group {family} as rank {representative}, which stands "
                "for it, is: give it a process of its own"
            )
        return found

    def is_known(self, family: str, rank: int) -> bool:
        """Tell whether a rank is in a group of a family."""
        return (family, rank) in self._lists[self.classes.representative[rank]]

    def at_distance(self, family: str, rank: int, distance: int) -> int:
        """Return the rank that is `distance` positions further in a group."""
        ranks = self.ranks(family, rank)
        return ranks[(ranks.index(rank) + distance) % len(ranks)]

    def trace_of(self, rank: int) -> Trace:
        """Return the trace of a rank's representative."""
        return self.traces[self.classes.representative[rank]]

    def distance(self, event: Collective | HostMessage, rank: int) -> int:
        """Return the positions from sender to receiver for a message in the trace of `rank`."""
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
        """Yield the colour, or the set of colours, of the other ranks in each meeting of a rank.

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
