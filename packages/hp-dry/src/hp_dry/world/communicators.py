"""Groups of ranks in a dry run: their names, their families and their representatives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from hp_dry.cluster import Classes

_LISTED = 16


def listed(ranks: Sequence[int]) -> str:
    """Return ranks in brackets; many evenly spaced ranks as `first:end:step`."""
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) <= _LISTED or len(steps) != 1:
        return str(list(ranks)).replace(" ", "")
    step = steps.pop()
    return f"[{ranks[0]}:{ranks[-1] + 1}" + (f":{step}]" if step > 1 else "]")


@dataclass(slots=True)
class Communicator:
    """Group of ranks, as one of its members records it.

    Attributes:
        name: Name of the group, the same on all its ranks and unique among lists of ranks.
        family: Name of the groups with the same purpose and size.
        ranks: Global ranks of the members.
        mine: Position of this rank in `ranks`.
        is_eager: Whether NCCL uses one communicator for all messages of the group.
        is_connected: Whether NCCL has connected it.
        operations: Numbers for the next operations of this rank on the host.
        num_messages: Number of messages to or from each member, by direction (`"to"` or `"from"`),
            position of the member and tag.
    """

    name: str
    family: str
    ranks: tuple[int, ...]
    mine: int
    is_eager: bool = False
    is_connected: bool = False
    operations: Iterator[int] = field(default_factory=lambda: count(1))
    num_messages: Counter[tuple[str, int, str]] = field(default_factory=Counter)

    def next_message(self, way: str, position: int, tag: str) -> int:
        """Return the number of a message to (`way` "to") or from a member, among those of a tag."""
        self.num_messages[way, position, tag] += 1
        return self.num_messages[way, position, tag] - 1


class Families:
    """All groups in the order of their creation, which is the same on all ranks.

    Disjoint groups of one purpose and size are a family, for example the groups of a mesh axis. For
    a rank without a process, the group that corresponds to a group of its representative is the
    group of the same family that contains the rank.

    Attributes:
        lists: Name of a family -> ranks of each of its groups.
    """

    def __init__(self, classes: Classes) -> None:
        self.lists: dict[str, list[tuple[int, ...]]] = {}
        self._classes = classes
        self._newest: dict[tuple[str, int], str] = {}
        self._list_of: dict[tuple[str, int], tuple[int, ...]] = {}

    def add(self, purpose: str, ranks: Sequence[int]) -> tuple[str, str]:
        """Add a new group.

        Returns:
            Name of the group and name of its family.
        """
        ranks = tuple(ranks)
        purpose = purpose.replace("[", "(").replace("]", ")") or "undefined"
        family = self._newest.get((purpose, len(ranks)))
        if family is None or any((family, rank) in self._list_of for rank in ranks):
            family, number = purpose, 1
            while family in self.lists:
                number += 1
                family = f"{purpose}#{number}"
            self._newest[purpose, len(ranks)] = family
            self.lists[family] = []
        self.lists[family].append(ranks)
        self._list_of.update({(family, rank): ranks for rank in ranks})
        return family + listed(ranks), family

    def representative_in(self, communicator: Communicator, rank: int) -> tuple[int, str]:
        """Find the representative of a member, and the communicator that it uses instead.

        Returns:
            Global rank of the representative, and the name of the given communicator or of its own
            communicator of the same family.

        Raises:
            RuntimeError: If the representative is in no communicator of the family.
        """
        representative = self._classes.representative[rank]
        if representative in communicator.ranks:
            return representative, communicator.name
        if (ranks := self._list_of.get((communicator.family, representative))) is None:
            raise RuntimeError(
                f"rank {representative}, which stands for rank {rank}, must be in a group like "
                f"{communicator.name}: ranks of one class run the same program"
            )
        return representative, communicator.family + listed(ranks)
