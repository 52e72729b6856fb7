"""Groups of ranks in a dry run: what they are called, which were made alike, who speaks in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from hp_dry.cluster import Classes

_LISTED = 16


def listed(ranks: Sequence[int]) -> str:
    """Return the ranks in brackets; evenly spaced ones, if they are many, as `first:end:step`."""
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) <= _LISTED or len(steps) != 1:
        return str(list(ranks)).replace(" ", "")
    step = steps.pop()
    return f"[{ranks[0]}:{ranks[-1] + 1}" + (f":{step}]" if step > 1 else "]")


@dataclass(slots=True)
class Communicator:
    """One group of ranks.

    Attributes:
        name: Distinct for every list of ranks; the same on all of them.
        family: Name of all that were made alike.
        ranks: Global ranks of the members.
        mine: Position of this rank in `ranks`.
        is_eager: Whether NCCL has one communicator for all its messages.
        is_connected: Whether NCCL has connected it.
        operations: Numbers of the operations that this rank will begin on the host.
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
        """Number of a message that goes (`way` "to") or comes ("from"), among those like it."""
        self.num_messages[way, position, tag] += 1
        return self.num_messages[way, position, tag] - 1


class Families:
    """All groups that were made, in the order of their making, which is one for all ranks.

    Groups of one purpose and size whose ranks do not overlap are a family: the groups of an axis.
    Of a rank that has no process, the group that corresponds to one of its representative's is
    that of the same family that has the rank in it.

    Attributes:
        lists: Ranks of each group of a family, by the name of the family.
    """

    def __init__(self, classes: Classes) -> None:
        self.lists: dict[str, list[tuple[int, ...]]] = {}
        self._classes = classes
        self._newest: dict[tuple[str, int], str] = {}
        self._list_of: dict[tuple[str, int], tuple[int, ...]] = {}

    def add(self, purpose: str, ranks: Sequence[int]) -> tuple[str, str]:
        """Note a new group.

        Returns:
            Names of the group and of its family.
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

    def speaker(self, communicator: Communicator, rank: int) -> tuple[int, str]:
        """Find the rank that has a process and stands for a member.

        Returns:
            Its global rank, and the name of the communicator in which it speaks for it: this one,
            or that of the same family that it is in.

        Raises:
            RuntimeError: If it is in none of that family.
        """
        speaks = self._classes.representative[rank]
        if speaks in communicator.ranks:
            return speaks, communicator.name
        if (ranks := self._list_of.get((communicator.family, speaks))) is None:
            raise RuntimeError(
                f"rank {speaks}, which stands for rank {rank}, must be in a group like "
                f"{communicator.name}: ranks of one class run the same program"
            )
        return speaks, communicator.family + listed(ranks)
