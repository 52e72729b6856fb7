"""What it costs ranks to have some positions of packed documents: pairs to compute, keys to fetch.

Shape symbols: S whole sequence, N ranks.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from hp_context.batch.layout import Deal

Kinds = tuple[tuple[int | None, float], ...]
"""How many keys before a query's own layers see, None for all, and the share of such layers."""


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
        """Number of positions."""
        return self.stop - self.start

    @property
    def run(self) -> range:
        """Its positions in the sequence."""
        return range(self.document + self.start, self.document + self.stop)


@dataclass(frozen=True, slots=True)
class DealCost:
    """What a deal costs each rank, in the mean over layers.

    Attributes:
        pairs: Pairs of a query and a key that it sees, of each rank.
        fetched: Keys of other ranks that its queries see, of each rank.
        far: Those of them that are in no rank of its node.
    """

    pairs: tuple[float, ...]
    fetched: tuple[float, ...]
    far: tuple[float, ...] = ()

    @property
    def imbalance(self) -> float:
        """Largest work of a rank, of the mean: 1 if all have the same."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs)

    def price(self, pairs_per_key: float) -> float:
        """The most that a rank takes, in pairs; a fetched key takes as long as so many."""
        return max(p + pairs_per_key * f for p, f in zip(self.pairs, self.fetched, strict=True))


class Work:
    """Pairs and keys of pieces under a causal mask.

    Args:
        windows: What each layer, or each kind of layer, looks at before a query's own position.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        counts = Counter(windows)
        self.kinds: Kinds = tuple((w, n / len(windows)) for w, n in counts.items())
        self._is_plain = self.kinds == ((None, 1.0),)

    def before(self, position: int) -> float:
        """Pairs of all queries of a document before a position."""
        if self._is_plain:
            return position * (position + 1) / 2
        total = 0.0
        for window, share in self.kinds:
            rising = position if window is None else min(position, window + 1)
            flat = 0 if window is None else (position - rising) * (window + 1)
            total += share * (rising * (rising + 1) / 2 + flat)
        return total

    def of(self, piece: Piece) -> float:
        """Pairs of a piece."""
        return self.before(piece.stop) - self.before(piece.start)

    def at(self, position: int) -> float:
        """Keys that the query at a place in a document sees."""
        return sum(n * (position if w is None else min(position, w)) for w, n in self.kinds) + 1

    def fetched(self, pieces: Iterable[Piece], *, near: "Held | None" = None) -> float:
        """Keys that queries of some pieces of one rank see, but that nobody near has.

        Args:
            pieces: What the rank has.
            near: What has keys that do not count: all of its node has. None: the rank alone.
        """
        mine = by_document(pieces)
        held = mine if near is None else near
        total = 0.0
        for document, queries in mine.items():
            if len(queries) == 1 and queries[0].start == 0:
                continue
            keys = held[document]
            total += sum(share * _missing(queries, keys, window) for window, share in self.kinds)
        return total


Held = dict[int, list[Piece]]
"""Pieces in order, by their document."""


def by_document(pieces: Iterable[Piece]) -> Held:
    """Put pieces in order, document by document."""
    found: Held = {}
    for piece in pieces:
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
        deal: Who has which positions.
        lengths: Tokens of each document in order.
        windows: What layers look at, see `deal_documents`.
        node: Likewise.
        heads: Likewise. Each rank of a row then computes its part of the heads of all pairs of the
            row, and fetches its part of every key; both are counted as so much of whole ones.

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
    held = [[p for part in row for run in part for p in _pieces(run, ends)] for row in rows]
    pairs = tuple(sum(map(work.of, pieces)) for pieces in held)
    far: list[float] = []
    node = len(held) if node is None else max(1, node // heads)
    for first in range(0, len(held), node):
        of_node = held[first : first + node]
        if node == len(held):
            far += [0.0] * node
            continue
        near = by_document(chain.from_iterable(of_node))
        far += [work.fetched(pieces, near=near) for pieces in of_node]
    found = pairs, tuple(map(work.fetched, held)), tuple(far)
    if heads == 1:
        return DealCost(*found)
    return DealCost(*(tuple(x / heads for x in each for _ in range(heads)) for each in found))


def _pieces(run: range, ends: Sequence[int]) -> Iterator[Piece]:
    """Cut a run of the sequence at the ends of documents."""
    index, start = bisect_right(ends, run.start), run.start
    while start < run.stop:
        document = ends[index - 1] if index else 0
        stop = min(run.stop, ends[index])
        yield Piece(document, start - document, stop - document)
        index, start = index + 1, stop


def _missing(queries: list[Piece], keys: list[Piece], window: int | None) -> int:
    """Keys of a document that some pieces see and that others, those among them, do not have.

    Args:
        queries: Pieces in order.
        keys: Likewise; disjoint.
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
