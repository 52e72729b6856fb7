"""Which documents share a microbatch: parts of given shares of the cost, none too long."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

_SWAPS = 4
"""Swaps of documents for each part, at most."""
_CLOSE = 0.002
"""Of a part's share of the cost: what is closer is not swapped."""


def partition(
    costs: Sequence[float], lengths: Sequence[int], targets: Sequence[float], *, longest: int
) -> list[list[int]] | None:
    """Put documents into parts.

    The dearest first, each into the part that most is missing of (LPT); then parts with too much
    swap documents with parts that lack some.

    Args:
        costs: Cost of each document, in any unit.
        lengths: Tokens of each.
        targets: Share of the cost that each part is to have; they sum to 1.
        longest: Most tokens of a part.

    Returns:
        The documents of each part, ascending; None if tokens do not fit, or a part has none.
    """
    total = sum(costs)
    missing = [share * total for share in targets]
    room = [longest] * len(targets)
    parts: list[list[int]] = [[] for _ in targets]
    heap = [(-left, part) for part, left in enumerate(missing)]
    heapify(heap)
    for document in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        aside = []
        while heap and room[heap[0][1]] < lengths[document]:
            aside.append(heappop(heap))
        if not heap:
            return None
        part = heappop(heap)[1]
        parts[part].append(document)
        missing[part] -= costs[document]
        room[part] -= lengths[document]
        heappush(heap, (-missing[part], part))
        for item in aside:
            heappush(heap, item)
    if not all(parts):
        return None
    _swap(parts, missing, costs, lengths, room)
    return [sorted(part) for part in parts]


def _swap(
    parts: list[list[int]],
    missing: list[float],
    costs: Sequence[float],
    lengths: Sequence[int],
    room: list[int],
) -> None:
    """Bring parts closer to their targets, by a move or a swap between the two farthest off."""
    close = _CLOSE * sum(costs) / len(parts)
    for _ in range(_SWAPS * len(parts)):
        rich = min(range(len(parts)), key=missing.__getitem__)
        poor = max(range(len(parts)), key=missing.__getitem__)
        gap = min(-missing[rich], missing[poor])
        if max(-missing[rich], missing[poor]) <= close or gap <= 0:
            return
        best: tuple[float, int, int | None] | None = None
        others = sorted(parts[poor], key=costs.__getitem__)
        for given in parts[rich]:
            # Of what comes back, that with which nearly the gap is moved.
            for taken in (None, *_near(others, costs, costs[given] - gap)):
                back = 0.0 if taken is None else costs[taken]
                size = lengths[given] - (0 if taken is None else lengths[taken])
                off = abs(costs[given] - back - gap)
                if size <= room[poor] and -size <= room[rich] and off < gap:
                    best = (off, given, taken) if best is None or off < best[0] else best
        if best is None or (best[2] is None and len(parts[rich]) == 1):
            return
        _, given, taken = best
        for part, other, document in ((rich, poor, given), (poor, rich, taken)):
            if document is None:
                continue
            parts[part].remove(document)
            parts[other].append(document)
            for index, sign in ((part, 1), (other, -1)):
                missing[index] += sign * costs[document]
                room[index] += sign * lengths[document]


def _near(ordered: Sequence[int], costs: Sequence[float], wanted: float) -> Sequence[int]:
    """The documents just below and just above a cost."""
    low, high = 0, len(ordered)
    while low < high:
        middle = (low + high) // 2
        if costs[ordered[middle]] < wanted:
            low = middle + 1
        else:
            high = middle
    return ordered[max(0, low - 1) : low + 1]
