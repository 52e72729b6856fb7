"""Costs of the positions of packed documents that ranks have: pairs to compute, keys to fetch.

Shape symbols: S whole sequence, N ranks.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from hp_context.batch import Deal

Kinds = tuple[tuple[int | None, float], ...]
"""Number of keys before its own that a query sees, None for all, with the share of such layers."""


class Piece(NamedTuple):
    """A run of positions of one document, by its place in it.

    Attributes:
        document: First position of the document in the sequence.
        start: First position of the run in the document.
        stop: One past its last.
    """

    document: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Return the number of positions."""
        return self.stop - self.start

    @property
    def run(self) -> range:
        """Return the positions in the sequence."""
        return range(self.document + self.start, self.document + self.stop)


@dataclass(frozen=True, slots=True)
class DealCost:
    """Costs of a deal for each rank, in the mean over layers.

    Attributes:
        pairs: Pairs of a query and a key that it sees, of each rank.
        fetched: Keys of other ranks that its queries see, of each rank.
        far: Keys among the fetched ones that no rank of its node has.
    """

    pairs: tuple[float, ...]
    fetched: tuple[float, ...]
    far: tuple[float, ...] = ()

    @property
    def imbalance(self) -> float:
        """Return the largest work of a rank, divided by the mean: 1 if all have the same."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs)

    def price(self, pairs_per_key: float) -> float:
        """Return the longest time of a rank, in pairs; a fetched key takes `pairs_per_key`."""
        return max(p + pairs_per_key * f for p, f in zip(self.pairs, self.fetched, strict=True))


class Work:
    """Pairs and keys of pieces under a causal mask.

    Args:
        windows: For each layer, or each kind of layer, the number of keys before its own that a
            query sees; None: all.

    Attributes:
        kinds: The windows, each once, with its share of the layers.
        is_plain: Whether queries of all layers see all keys before their own.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        counts = Counter(windows)
        self.kinds: Kinds = tuple((w, n / len(windows)) for w, n in counts.items())
        self.is_plain = self.kinds == ((None, 1.0),)

    def before(self, position: int) -> float:
        """Count the pairs of all queries of a document before a position."""
        if self.is_plain:
            return position * (position + 1) / 2
        total = 0.0
        for window, share in self.kinds:
            rising = position if window is None else min(position, window + 1)
            flat = 0 if window is None else (position - rising) * (window + 1)
            total += share * (rising * (rising + 1) / 2 + flat)
        return total

    def of(self, piece: Piece) -> float:
        """Count the pairs of a piece."""
        _, start, stop = piece
        if self.is_plain:
            return (stop - start) * (stop + start + 1) / 2
        return self.before(stop) - self.before(start)

    def at(self, position: int) -> float:
        """Count the keys that the query at a place in a document sees."""
        return sum(n * (position if w is None else min(position, w)) for w, n in self.kinds) + 1

    def fetched(self, pieces: Iterable[Piece]) -> float:
        """Count the keys that queries of some pieces of one rank see, but that are in no piece."""
        mine = cut_documents(pieces)
        return self.absent(mine, mine)

    def absent(self, mine: "PiecesByDocument", held: "PiecesByDocument") -> float:
        """Count the keys that queries of one rank see, but that are not held.

        Args:
            mine: Pieces of the rank, of documents whose keys it lacks in part.
            held: Pieces of these documents, and maybe of others, that it and ranks near it have.
        """
        if self.is_plain:
            return float(sum([_before_last(mine[each], held[each]) for each in mine]))
        total = 0.0
        for document, queries in mine.items():
            keys = held[document]
            total += sum(share * _missing(queries, keys, window) for window, share in self.kinds)
        return total


PiecesByDocument = dict[int, list[Piece]]
"""Pieces in order, by their document."""


def cut_documents(pieces: Iterable[Piece]) -> PiecesByDocument:
    """Return pieces by document, in order, of documents some piece of which begins after 0."""
    every = list(pieces)
    cut = {document for document, start, _ in every if start}
    found: PiecesByDocument = {}
    for piece in every if cut else ():
        if piece.document in cut:
            found.setdefault(piece.document, []).append(piece)
    for held in found.values():
        held.sort()
    return found


def deal_cost(
    deal: Deal,
    lengths: Sequence[int],
    *,
    windows: Sequence[int | None] = (None,),
    node: int | None = None,
    heads: int = 1,
) -> DealCost:
    """Count pairs and fetched keys of each rank under a causal mask, in the mean over `windows`.

    Args:
        deal: Positions of each rank.
        lengths: Tokens of each document in order.
        windows: See `deal_documents`.
        node: See `deal_documents`.
        heads: See `deal_documents`. Each rank of a row then computes its part of the heads of all
            pairs of the row, and fetches its part of every key; both count as fractions.

    Raises:
        ValueError: The documents are not as long as the sequence of the deal.
    """
    if sum(lengths) != deal.seq_len:
        raise ValueError(
            f"lengths ({sum(lengths)} tokens) must sum to the sequence of the Deal ({deal.seq_len})"
        )
    ends = list(accumulate(lengths))
    work = Work(windows)
    rows = [deal.parts[i : i + heads] for i in range(0, len(deal.parts), heads)]
    held = [_pieces(chain.from_iterable(row), ends) for row in rows]
    pairs = tuple(sum(map(work.of, pieces)) for pieces in held)
    cut = [cut_documents(pieces) for pieces in held]
    fetched = tuple(work.absent(mine, mine) for mine in cut)
    far = [0.0] * len(held)
    node = len(held) if node is None else max(1, node // heads)
    for first in range(0, len(held), node) if node < len(held) else ():
        near = cut_documents(chain.from_iterable(held[first : first + node]))
        for rank in range(first, first + node):
            far[rank] = work.absent(cut[rank], near)
    found = pairs, fetched, tuple(far)
    if heads == 1:
        return DealCost(*found)
    return DealCost(*(tuple(x / heads for x in each for _ in range(heads)) for each in found))


def _pieces(runs: Iterable[range], ends: Sequence[int]) -> list[Piece]:
    """Cut runs of the sequence at the ends of documents."""
    found = []
    for run in runs:
        start, last = run.start, run.stop
        index = bisect_right(ends, start)
        while start < last:
            document = ends[index - 1] if index else 0
            stop = min(last, ends[index])
            found.append(Piece(document, start - document, stop - document))
            index, start = index + 1, stop
    return found


def _before_last(queries: list[Piece], keys: list[Piece]) -> int:
    """Return the result of `_missing` where queries see all keys before, and `keys` has theirs."""
    first = queries[-1].start
    return first - sum([min(stop, first) - start for _, start, stop in keys if start < first])


def _missing(queries: list[Piece], keys: list[Piece], window: int | None) -> int:
    """Count keys of a document that some pieces see and that `keys`, these among them, lack.

    Args:
        queries: Pieces in order.
        keys: Pieces in order; disjoint.
        window: Keys before its own that a query sees; None: all.
    """
    missing = known = 0  # what is before has been counted, or is seen by no later piece
    for piece in queries:
        first = known if window is None else max(known, piece.start - window)
        if piece.start > first:
            held = sum(max(0, min(key.stop, piece.start) - max(key.start, first)) for key in keys)
            missing += piece.start - first - held
        known = piece.stop
    return missing
