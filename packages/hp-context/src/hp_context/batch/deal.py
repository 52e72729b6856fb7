"""Documents dealt out to ranks: equal parts, equal work, and few keys of other ranks.

Note [How documents are dealt]
    Long documents come first. One whose work and length fit into what a rank still takes goes to
    that rank whole, and needs no keys of others. Any other is spread over as few ranks as can take
    it, in twice as many pieces as ranks: rank i gets piece i and the i-th from the end (zigzag), so
    that all have the same of its work. Shorter ones go where most work is missing. Every rank has
    as many positions as any other, because the last documents are cut where a rank is full. Then
    ranks with the most work swap runs of equal length with those with the least, until they are as
    balanced as asked.
    Where ranks are in several nodes, documents are first dealt out to these in the same way, but
    for two things: one that is about as much as a node takes, or less, stays whole, and nodes swap
    whole documents for short ones as long as there are such, so that few keys leave a node. Then
    each node deals out what it has.

Shape symbols: S whole sequence, N ranks, s = S / N.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate
from typing import ClassVar

from hp_context.batch import Deal, HeadTail
from hp_context.batch.deal_cost import Piece, Work, deal_cost
from hp_context.masks.blocks import joined

TOLERANCE = 1.005
"""Largest work of a rank, of the mean, at which swapping ends."""

_OF_NODES = 1.012
"""The same of nodes, where it takes keys that leave a node."""
_SHORT = 32
"""Documents of less than this part of what a rank holds are one piece with their neighbours."""
_SWAPS = 8
"""Swaps for each rank, at most."""


def deal_documents(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    windows: Sequence[int | None] = (None,),
    pairs_per_key: float = 64.0,
    node: int | None = None,
    heads: int = 1,
) -> Deal:
    """Deal out one sequence of documents under a causal mask; the same on every rank, remembered.

    Three ways are priced and the cheapest is taken: as Note [How documents are dealt] says, runs in
    their order, for which the fewest keys are fetched, and head-tail.

    Args:
        lengths: Tokens of each document in order; as `Documents`.
        num_ranks: Number of ranks, N.
        windows: For each layer, or each kind of layer, the number of keys before its own that a
            query sees, as `SlidingWindow(left)`; None: all of them.
        pairs_per_key: Number of pairs that take as long as one key to fetch: the bytes of a key and
            its value, by the rate of the link, times the pairs that a rank computes in a second. 0:
            the balanced way is taken.
        node: Number of consecutive ranks in a node; None: all of them.
        heads: Number of consecutive ranks that share heads (`ulysses_degree`) and so attend to each
            other's positions: documents are dealt out to rows of so many ranks.

    Returns:
        A layout whose ranks have S / N positions each.

    Raises:
        ValueError: N does not divide S, or a number is out of its range.
    """
    total, shortest = sum(lengths), min(lengths, default=0)
    if num_ranks < 1 or shortest < 1 or total % num_ranks:
        raise ValueError(
            f"lengths ({total} tokens, the shortest {shortest}) must be positive and sum to a "
            f"multiple of the number of ranks ({num_ranks})"
        )
    if not windows or any(window is not None and window < 0 for window in windows):
        raise ValueError(f"windows ({tuple(windows)}) must be numbers >= 0, or None")
    if node is not None and (node < 1 or num_ranks % node):
        raise ValueError(f"node ({node}) must divide the number of ranks ({num_ranks})")
    if heads < 1 or num_ranks % heads:
        raise ValueError(f"heads ({heads}) must divide the number of ranks ({num_ranks})")
    kinds = tuple(sorted(Counter(windows).items(), key=str))
    rows = num_ranks // heads
    of_rows = (rows, max(1, (node or num_ranks) // heads))
    deal = _cheapest(tuple(lengths), of_rows, kinds, float(pairs_per_key))
    return deal if heads == 1 else _split(deal, heads)


def _split(deal: Deal, heads: int) -> Deal:
    """Deal out the positions of a row to its ranks, in equal parts in order."""
    parts: list[tuple[range, ...]] = []
    for runs, total in zip(deal.parts, deal.sizes, strict=True):
        size = total // heads
        part: list[range] = []
        room = size
        for run in runs:
            start = run.start
            while run.stop - start >= room:
                part.append(range(start, start + room))
                parts.append(tuple(part))
                start, room, part = start + room, size, []
            if start < run.stop:
                part.append(range(start, run.stop))
                room -= run.stop - start
    return Deal(tuple(parts))


@lru_cache(maxsize=64)
def _cheapest(
    lengths: tuple[int, ...],
    ranks: tuple[int, int],
    kinds: tuple[tuple[int | None, int], ...],
    pairs_per_key: float,
) -> Deal:
    """Return the cheapest deal over a number of ranks with a number of ranks in each node."""
    num_ranks, node = ranks
    windows = [window for window, count in kinds for _ in range(count)]
    starts = [0, *accumulate(lengths)]
    documents = [Piece(at, 0, n) for at, n in zip(starts, lengths, strict=False)]
    balanced = Deal(
        tuple(_runs(held) for held in _dealt(documents, num_ranks, node, Work(windows)))
    )
    if pairs_per_key == 0:
        return balanced
    size = starts[-1] // num_ranks
    found = [balanced, Deal(tuple((range(i, i + size),) for i in range(0, starts[-1], size)))]
    if size % 2 == 0:
        found.append(Deal(HeadTail().runs(starts[-1], num_ranks)))
    prices = [deal_cost(deal, lengths, windows=windows).price(pairs_per_key) for deal in found]
    return found[prices.index(min(prices))]


def _dealt(
    documents: Sequence[Piece], num_ranks: int, node: int, work: Work
) -> Iterator[list[Piece]]:
    """Yield the pieces that each rank gets."""
    of_nodes = [list(documents)]
    if node < num_ranks:
        of_nodes = _NodeDealer(documents, num_ranks // node, work).deal()
    for pieces in of_nodes:
        yield from _Dealer(pieces, min(node, num_ranks), work).deal()


class _Dealer:
    """Deals out documents, or pieces of them, to ranks; see Note [How documents are dealt]."""

    whole: ClassVar[float] = 0.0
    """Documents with less work than this part of what a rank takes are not spread."""

    def __init__(self, documents: Sequence[Piece], num_ranks: int, work: Work) -> None:
        self._documents = documents
        self._work = work
        self._part = sum(piece.size for piece in documents) // num_ranks
        self._mean = sum(map(work.of, documents)) / num_ranks
        self._room = [self._part] * num_ranks
        self._missing = [self._mean] * num_ranks
        self._held: list[list[Piece]] = [[] for _ in range(num_ranks)]

    def deal(self) -> list[list[Piece]]:
        """Return the pieces that each rank gets."""
        few = max(1, self._part // _SHORT)
        long = [piece for piece in self._documents if piece.size > few]
        long.sort(key=lambda piece: piece.size, reverse=True)
        rest = [[piece] for piece in long if not self._spread(piece)]
        self._fill(rest + self._neighbours(few))
        self._balance()
        return self._held

    def _take(self, rank: int, piece: Piece) -> None:
        self._held[rank].remove(piece)
        self._room[rank] += piece.size
        self._missing[rank] += self._work.of(piece)

    def _give(self, rank: int, piece: Piece, work: float) -> None:
        self._held[rank].append(piece)
        self._room[rank] -= piece.size
        self._missing[rank] -= work

    def _spread(self, document: Piece) -> bool:
        """Deal out a document if no rank can take all of it; tell whether it was."""
        size, work = document.size, self._work.of(document)
        room, missing = self._room, self._missing
        if work < self.whole * self._mean and max(room) >= size:
            return False
        if any(r >= size and m >= work for r, m in zip(room, missing, strict=True)):
            return False
        ranks = sorted(range(len(room)), key=lambda i: (-missing[i], i))
        least = self._part
        for degree, rank in enumerate(ranks, start=1):
            least = min(least, room[rank])
            share = 2 * -(-size // (2 * degree))  # of two pieces, each rounded up
            if degree > 1 and least >= share and missing[rank] >= work / degree:
                self._zigzag(document, ranks[:degree])
                return True
        return False

    def _zigzag(self, document: Piece, ranks: Sequence[int]) -> None:
        """Give each rank one piece from the front and one from the back."""
        degree = len(ranks)
        parts = range(2 * degree + 1)
        cuts = [document.start + i * document.size // (2 * degree) for i in parts]
        for i, rank in enumerate(ranks):
            for place in (i, 2 * degree - 1 - i):
                piece = Piece(document.document, cuts[place], cuts[place + 1])
                if piece.size:
                    self._give(rank, piece, self._work.of(piece))

    def _neighbours(self, few: int) -> list[list[Piece]]:
        """Return short documents in groups of consecutive ones, up to a few positions each."""
        groups: list[list[Piece]] = []
        size = few
        for piece in self._documents:
            more = piece.stop - piece.start
            if more > few:
                size = few
                continue
            if size + more > few:
                groups.append([])
                size = 0
            groups[-1].append(piece)
            size += more
        return groups

    def _fill(self, groups: list[list[Piece]]) -> None:
        """Give groups to the rank with room that lacks the most work; cut the last."""
        each = [[self._work.of(piece) for piece in group] for group in groups]
        works = list(map(sum, each))
        room = self._room
        heap = [(-missing, rank) for rank, missing in enumerate(self._missing)]
        heapify(heap)
        left: list[Piece] = []
        for index in sorted(range(len(groups)), key=works.__getitem__, reverse=True):
            group = groups[index]
            size = sum([piece.stop - piece.start for piece in group])
            aside = []
            while heap and room[heap[0][1]] < size:
                aside.append(heappop(heap))
            if heap:
                rank = heap[0][1]
                for piece, work in zip(group, each[index], strict=True):
                    self._give(rank, piece, work)
                heapreplace(heap, (-self._missing[rank], rank))
            else:
                left += group
            for item in aside:
                if self._room[item[1]]:
                    heappush(heap, item)
        self._cut(left)

    def _cut(self, pieces: list[Piece]) -> None:
        """Give pieces to ranks with room, in parts that fill them exactly, the roomiest first."""
        for piece in pieces:
            start = piece.start
            while start < piece.stop:
                rank = max(range(len(self._room)), key=self._room.__getitem__)
                stop = min(piece.stop, start + self._room[rank])
                part = Piece(piece.document, start, stop)
                self._give(rank, part, self._work.of(part))
                start = stop

    def _balance(self) -> None:
        """Let the rank with the most work and that with the least swap runs of equal length."""
        slack = (TOLERANCE - 1) * self._mean
        ranks = range(len(self._missing))
        for _ in range(_SWAPS * len(ranks)):
            most = min(ranks, key=self._missing.__getitem__)
            least = max(ranks, key=self._missing.__getitem__)
            if self._missing[most] >= -slack:
                return
            wanted = min(-self._missing[most], self._missing[least])
            if not self._swap(most, least, wanted):
                return

    def _swap(self, most: int, least: int, wanted: float) -> bool:
        """Move a wanted amount of work from one rank to another; tell whether any was moved."""
        work = self._work
        light = min(self._held[least], key=lambda piece: (piece.start, -piece.size))
        heavy = self._enough(self._held[most], light, wanted)

        def moved(size: int) -> float:
            late = work.before(heavy.stop) - work.before(heavy.stop - size)
            return late - work.before(light.start + size) + work.before(light.start)

        size = _swapped(heavy, light)
        if work.is_plain and moved(size) > wanted:
            size = _smallest_root(heavy.stop - light.start, wanted)
        else:
            low = 0
            while low < size:  # the largest size that moves no more than wanted
                middle = (low + size + 1) // 2
                low, size = (middle, size) if moved(middle) <= wanted else (low, middle - 1)
        if size == 0 or moved(size) <= 0:
            return False
        self._exchange(most, least, (heavy, light), size)
        return True

    def _enough(self, pieces: list[Piece], light: Piece, wanted: float) -> Piece:
        """Return the piece with enough work whose queries have the fewest keys before them."""

        def moved(piece: Piece) -> float:
            size = _swapped(piece, light)
            return size * (piece.stop - light.start - size)  # but for windows

        enough = [piece for piece in pieces if moved(piece) >= 2 * wanted]
        if enough:
            return min(enough, key=lambda piece: piece.stop)
        return max(pieces, key=moved)

    def _exchange(self, most: int, least: int, pieces: tuple[Piece, Piece], size: int) -> None:
        heavy, light = pieces
        for rank, piece in ((most, heavy), (least, light)):
            self._take(rank, piece)
        late = Piece(heavy.document, heavy.stop - size, heavy.stop)
        early = Piece(light.document, light.start, light.start + size)
        kept = Piece(heavy.document, heavy.start, late.start)
        rest = Piece(light.document, early.stop, light.stop)
        for rank, piece in ((most, early), (most, kept), (least, late), (least, rest)):
            if piece.size:
                self._give(rank, piece, self._work.of(piece))


def _swapped(heavy: Piece, light: Piece) -> int:
    """Return the size of a swap, of a piece's end for another's start, that moves most work."""
    return max(0, min(heavy.size, light.size, (heavy.stop - light.start) // 2))


def _smallest_root(distance: int, wanted: float) -> int:
    """Return the largest size below half a distance with size * (distance - size) <= wanted.

    The product is the number of pairs that move where queries see all keys before them.
    """
    size = int(2 * wanted / (distance + math.sqrt(distance * distance - 4 * wanted)))
    while (size + 1) * (distance - size - 1) <= wanted:
        size += 1
    while size * (distance - size) > wanted:
        size -= 1
    return size


class _NodeDealer(_Dealer):
    """Deals out documents to nodes."""

    whole = 0.7

    def _swap(self, most: int, least: int, wanted: float) -> bool:
        """Swap a whole piece for short ones of the same length, or else parts of pieces."""
        work = self._work
        light = sorted(self._held[least], key=lambda piece: (piece.stop, piece.document))
        sizes = [0, *accumulate(piece.size for piece in light)]
        works = [0.0, *accumulate(map(work.of, light))]

        def gain(piece: Piece) -> float:
            at = bisect_right(sizes, piece.size) - 1
            if at == len(light):
                return -1.0
            rest = Piece(
                light[at].document, light[at].start, light[at].start + piece.size - sizes[at]
            )
            return work.of(piece) - works[at] - work.of(rest)

        gains = {piece: gain(piece) for piece in self._held[most]}
        heavy = max(gains, key=lambda piece: gains[piece] if gains[piece] <= wanted else -1.0)
        if not 0 < gains[heavy] <= wanted:
            is_far_off = -self._missing[most] > (_OF_NODES - 1) * self._mean
            return is_far_off and super()._swap(most, least, wanted)
        self._move(most, least, heavy)
        left = heavy.size
        for piece in light:
            if left == 0:
                break
            back = piece
            if piece.size > left:
                back = self._split(least, piece, left)
            self._move(least, most, back)
            left -= back.size
        return True

    def _move(self, source: int, target: int, piece: Piece) -> None:
        self._take(source, piece)
        self._give(target, piece, self._work.of(piece))

    def _split(self, node: int, piece: Piece, size: int) -> Piece:
        """Cut a piece of a node in two; return the first."""
        first, rest = (piece._replace(**{end: piece.start + size}) for end in ("stop", "start"))
        self._held[node].remove(piece)
        self._held[node] += [first, rest]
        return first


def _runs(pieces: list[Piece]) -> tuple[range, ...]:
    """Return the positions of pieces as runs, in the order of the sequence."""
    return tuple(joined(sorted([piece.run for piece in pieces], key=lambda run: run.start)))
