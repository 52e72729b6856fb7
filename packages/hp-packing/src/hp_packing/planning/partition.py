"""Documents partitioned into parts with given shares of the cost and a maximum of tokens."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

_SWAPS = 4
"""Maximum number of swaps of documents per part."""
_CLOSE = 0.002
"""Distance from its target, as a share of a part's cost, at which a part is not swapped further."""


def partition(
    costs: Sequence[float], lengths: Sequence[int], targets: Sequence[float], *, longest: int
) -> list[list[int]] | None:
    """Put documents into parts.

    The most expensive first, each into the part that is farthest below its target (longest
    processing time first); then parts above their targets swap documents with parts below.

    Args:
        costs: Cost of each document, in any unit.
        lengths: Tokens of each document.
        targets: Target share of the cost of each part; they sum to 1.
        longest: Maximum number of tokens of a part.

    Returns:
        Documents of each part, ascending; None if tokens do not fit, or a part is empty.
    """
    parts = _Parts(costs, lengths, targets, longest)
    if not parts.fill():
        return None
    parts.swap()
    return [sorted(document for _, document in part) for part in parts.held]


class _Parts:
    """Parts while they are filled.

    Attributes:
        held: Cost and index of each document of each part.
    """

    def __init__(
        self,
        costs: Sequence[float],
        lengths: Sequence[int],
        targets: Sequence[float],
        longest: int,
    ) -> None:
        total = sum(costs)
        self._costs, self._lengths = costs, lengths
        self._missing = [share * total for share in targets]
        self._room = [longest] * len(targets)
        self._close = _CLOSE * total / len(targets)
        self.held: list[list[tuple[float, int]]] = [[] for _ in targets]

    def fill(self) -> bool:
        """Put every document into a part; tell whether all fit and no part is empty."""
        costs, lengths, room, held = self._costs, self._lengths, self._room, self.held
        heap = [(-left, part) for part, left in enumerate(self._missing)]
        heapify(heap)
        # The most expensive first, and of equal ones the first.
        for document in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
            aside = []
            length, cost = lengths[document], costs[document]
            while heap and room[heap[0][1]] < length:
                aside.append(heappop(heap))
            if not heap:
                return False
            less, part = heap[0]
            held[part].append((cost, document))
            room[part] -= length
            heapreplace(heap, (less + cost, part))
            for item in aside:
                heappush(heap, item)
        for less, part in heap:
            self._missing[part] = -less
        return all(held)

    def swap(self) -> None:
        """Bring parts closer to their targets, by moves and swaps between the two farthest off."""
        missing = self._missing
        for part in self.held:
            part.sort()
        for _ in range(_SWAPS * len(self.held)):
            least, most = min(missing), max(missing)
            gap = min(-least, most)
            if max(-least, most) <= self._close or gap <= 0:
                return
            if not self._between(missing.index(least), missing.index(most), gap):
                return

    def _between(self, rich: int, poor: int, gap: float) -> bool:
        """Move a cost of about `gap` from a part to another; tell whether a document moved."""
        lengths, others = self._lengths, self.held[poor]
        room, back_room = self._room[poor], self._room[rich]
        best = gap, -1, -1
        for place, (cost, given) in enumerate(self.held[rich]):
            size = lengths[given]
            if abs(cost - gap) < best[0] and size <= room and len(self.held[rich]) > 1:
                best = abs(cost - gap), place, -1
            # The document to return with which the moved cost is closest to the gap.
            at = bisect_left(others, (cost - gap,))
            for index in range(max(0, at - 1), min(at + 1, len(others))):
                back, taken = others[index]
                more = size - lengths[taken]
                off = abs(cost - back - gap)
                if off < best[0] and more <= room and -more <= back_room:
                    best = off, place, index
        _, place, index = best
        if place < 0:
            return False
        returned = others.pop(index) if index >= 0 else None
        self._put(self.held[rich].pop(place), rich, poor)
        if returned is not None:
            self._put(returned, poor, rich)
        return True

    def _put(self, entry: tuple[float, int], source: int, target: int) -> None:
        """Add a document to a part, after it was taken out of another."""
        insort(self.held[target], entry)
        for part, sign in ((source, 1), (target, -1)):
            self._missing[part] += sign * entry[0]
            self._room[part] += sign * self._lengths[entry[1]]
