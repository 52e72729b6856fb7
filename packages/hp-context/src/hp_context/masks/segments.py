"""A mask as segments for kernels of variable lengths: no tensors here, and no mask tensors later.

Such a kernel computes many pairs of a run of queries and a run of keys in one launch. It knows one
window for all of them, which it aligns with the last query and the last key of each pair.

Note [What one call of variable lengths can say]
    Full, causal, window and document masks and what is made of them by `&` limit the keys of the
    query at position p to one run, max(start, p - left) ... min(end, p + right), where only start
    and end depend on the document. Of a run of consecutive queries in one document and a run of
    consecutive keys those that meet are again two runs. Cut to queries that see any of the keys,
    and to keys that any of the queries sees, an edge of the mask that lies inside is a diagonal,
    which a window says; one that lies outside limits nothing, and goes with any window that is
    wide enough. So a mask becomes segments, each with what it asks of the window on either side:
    one number, or at least some number. Segments whose demands agree share a call. Documents and
    causal masks need one call for all sequences of a batch; a window may need a second one where
    keys of other positions come after it in their tensor. Nothing of other masks is known, nor of
    a subclass of these: they go by blocks.

Shape symbols: B batch, s queries of a sequence, K keys of a sequence.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from hp_context.masks import FAR, Both, Causal, Documents, Full, Mask, SlidingWindow, common
from hp_context.masks.blocks import joined

UNBOUNDED = -1  # of a side of a window, as kernels say it


@dataclass(frozen=True, slots=True)
class Edges:
    """Limits of the keys that a query sees.

    Attributes:
        ends: Ends of the documents, in order; empty if there is one.
        left: Most keys before its own position that a query sees; None: all.
        right: Most keys after its own position that a query sees; None: all.
    """

    ends: tuple[int, ...] = ()
    left: int | None = None
    right: int | None = None

    def documents(self, run: range) -> Iterator[tuple[range, range]]:
        """Yield, for each document that a run meets, the shared positions and the document's."""
        first, start = bisect_right(self.ends, run.start), run.start
        while start < run.stop:
            known = first < len(self.ends)
            whole = range(self.ends[first - 1] if first else 0, self.ends[first] if known else FAR)
            stop = min(run.stop, whole.stop)
            yield range(start, stop), whole
            first, start = first + 1, stop


def edges_of(mask: Mask) -> Edges | None:
    """Return the limits of the keys of a query; None if a mask may have others."""
    if type(mask) is Both:
        one, other = edges_of(mask.first), edges_of(mask.second)
        if one is None or other is None:
            return None
        return Edges(
            tuple(sorted({*one.ends, *other.ends})),
            _smaller(one.left, other.left),
            _smaller(one.right, other.right),
        )
    # Of a subclass nothing is known.
    if type(mask) is Documents and isinstance(mask.lengths, tuple):
        return Edges(ends=tuple(accumulate(mask.lengths)))
    if type(mask) is SlidingWindow:
        return Edges(left=mask.left, right=mask.right)
    if type(mask) is Causal:
        return Edges(right=0)
    return Edges() if type(mask) is Full else None


@dataclass(frozen=True, slots=True)
class Segment:
    """Queries and keys that meet, by their rows in the tensors of one sequence.

    The query in row i sees the keys in rows j of `keys` with i + low <= j <= i + high.

    Attributes:
        queries: Rows of queries, each of which sees a key.
        keys: Rows of keys, each of which is seen.
        low: Least offset of a key's row; None: no key is too far to the left.
        high: Greatest offset; None: no key is too far to the right.
    """

    queries: range
    keys: range
    low: int | None
    high: int | None

    @property
    def shift(self) -> int:
        """Return the offset from the row of a query to that of the key it is aligned with."""
        return self.keys.stop - self.queries.stop


def segments(edges: Edges, queries: Sequence[range], keys: Sequence[range]) -> list[Segment]:
    """Return the segments of the keys that queries see, in the order of the queries.

    Args:
        edges: Limits of the keys of a query.
        queries: Positions of the queries, as runs in the order of their tensor.
        keys: Positions of the keys likewise.
    """
    found: list[Segment] = []
    runs = joined(keys)
    starts = [0, *accumulate(map(len, runs))]
    row = 0
    for run in joined(queries):
        for part, document in edges.documents(run):
            offset = row - run.start
            of_part: list[Segment] = []
            for key, start in zip(runs, starts, strict=False):
                within = common(key, document)
                segment = _segment(edges, part, within, (offset, start - key.start))
                if segment is not None:
                    _add_keys(of_part, segment)
            for segment in of_part:
                _add_queries(found, segment)
        row += len(run)
    return found


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a kernel, by the rows of tensors of all sequences.

    Queries are [B * s, ...] in the order of the sequences, and keys are one tensor too.

    Attributes:
        queries: Rows that it takes, without a gap.
        keys: Rows that it takes, in this order: runs, with a step where sequences alternate.
        starts: Start of each segment among the queries, and the end of the last one.
        key_starts: The same among the keys.
        window: Number of keys to the left and to the right of a query's own that it sees.
        has_gaps: Whether some of the queries see no key.
        rounds: Rounds in which gradients of the keys are added up; a round has runs of keys of this
            call with their rows, no row twice.
    """

    queries: range
    keys: tuple[range, ...]
    starts: tuple[int, ...]
    key_starts: tuple[int, ...]
    window: tuple[int, int]
    has_gaps: bool
    rounds: tuple[tuple[tuple[range, range], ...], ...]

    @property
    def longest(self) -> tuple[int, int]:
        """Return the most queries and the most keys of a segment."""
        return _longest(self.starts), _longest(self.key_starts)

    @property
    def num_numbers(self) -> int:
        """Return an upper estimate of the numbers that are copied to a device for the call."""
        of_keys = 0 if self.is_view else 3 * self.key_starts[-1]
        return 2 * len(self.starts) + of_keys

    @property
    def is_view(self) -> bool:
        """Tell whether the keys are rows that follow each other in their tensor."""
        return len(self.keys) == 1 and self.keys[0].step == 1


@dataclass(frozen=True, slots=True)
class Rows:
    """Layout of the rows of all sequences in one tensor.

    Attributes:
        batch: Sequences, B.
        queries: Queries of a sequence, s.
        keys: Keys of a sequence, K.
        alternate: Whether keys of all sequences alternate, [K * B, ...]; otherwise one sequence
            comes after the other, [B * K, ...].
    """

    batch: int
    queries: int
    keys: int
    alternate: bool

    def of_queries(self, rows: range, sequence: int) -> range:
        """Return the rows of a sequence's queries in the tensor."""
        start = sequence * self.queries
        return range(start + rows.start, start + rows.stop)

    def of_keys(self, rows: range, sequence: int) -> range:
        """Return the rows of a sequence's keys in the tensor."""
        if not self.alternate or self.batch == 1:
            start = sequence * self.keys
            return range(start + rows.start, start + rows.stop)
        step = self.batch
        return range(rows.start * step + sequence, (rows.stop - 1) * step + sequence + 1, step)


def is_known(mask: Mask) -> bool:
    """Tell whether a mask, of one sequence, can be written as segments."""
    return edges_of(mask) is not None


@lru_cache(maxsize=256)
def calls(
    masks: tuple[Mask, ...],
    queries: tuple[range, ...],
    keys: tuple[range, ...],
    *,
    alternate: bool,
) -> tuple[Call, ...]:
    """Return the calls that compute attention of a batch; cached.

    Args:
        masks: One for each sequence, all of them known (`is_known`).
        queries: Positions of the queries of every sequence, as runs in the order of their tensor.
        keys: Positions of the keys likewise.
        alternate: See `Rows.alternate`.
    """
    rows = Rows(len(masks), sum(map(len, queries)), sum(map(len, keys)), alternate)
    by_mask: dict[Mask, list[Segment]] = {}
    open_calls: list[_Open] = []
    for sequence, mask in enumerate(masks):
        if mask not in by_mask:
            by_mask[mask] = segments(edges_of(mask) or Edges(), queries, keys)
        for segment in by_mask[mask]:
            placed = _Placed(
                segment,
                rows.of_queries(segment.queries, sequence),
                rows.of_keys(segment.keys, sequence),
            )
            if not any(call.takes(placed) for call in open_calls):
                open_calls.append(_Open(placed))
    return tuple(call.closed() for call in open_calls)


def _segment(edges: Edges, query: range, key: range, offsets: tuple[int, int]) -> Segment | None:
    """Return the part of a run of queries and a run of keys, by position, that meets."""
    left, right = edges.left, edges.right
    a, b, c, d = query.start, query.stop, key.start, key.stop
    if left is not None:
        c = max(c, a - left)
        b = min(b, d + left)
    if right is not None:
        d = min(d, b + right)
        a = max(a, c - right)
    if c >= d or a >= b:
        return None
    low = high = None
    of_queries, of_keys = offsets
    if left is not None:
        c = max(c, a - left)
        low = of_keys - of_queries - left if b - 1 - left > c else None
    if right is not None:
        d = min(d, b + right)
        high = of_keys - of_queries + right if a + right < d - 1 else None
    queries = range(a + of_queries, b + of_queries)
    return Segment(queries, range(c + of_keys, d + of_keys), low, high)


def _add_keys(found: list[Segment], new: Segment) -> None:
    """Append a segment, or lengthen the last one, where its keys are the next ones in their tensor.

    All queries see some keys of both, so the limits of one are no limits of the other.
    """
    last = found[-1] if found else None
    if (
        last is not None
        and last.queries == new.queries
        and last.keys.stop == new.keys.start
        and last.high is None
        and new.low is None
    ):
        found[-1] = replace(last, keys=range(last.keys.start, new.keys.stop), high=new.high)
    else:
        found.append(new)


def _add_queries(found: list[Segment], new: Segment) -> None:
    """Append a segment, or lengthen the last one, where its queries are the next ones."""
    if found and _goes_on(found[-1], new):
        found[-1] = replace(new, queries=range(found[-1].queries.start, new.queries.stop))
    else:
        found.append(new)


def _goes_on(last: Segment, new: Segment) -> bool:
    """Tell whether the queries of a segment follow those of the last one under the same limits."""
    follows = last.queries.stop == new.queries.start and last.keys.start == new.keys.start
    if not follows or last.low is not None or new.low is not None:
        return False
    if new.high is None:
        return last.high is None and last.keys == new.keys
    one_triangle = last.high == new.high or len(last.queries) == 1
    return one_triangle and last.keys.stop == last.queries.stop + new.high


@dataclass(frozen=True, slots=True)
class _Placed:
    """A segment and its rows in the tensors of all sequences."""

    segment: Segment
    queries: range
    keys: range


@dataclass(frozen=True, slots=True)
class _Side:
    """The window that segments need on one side: exactly, or at least, a number of keys."""

    exact: int | None
    least: int

    def both(self, other: "_Side") -> "_Side | None":
        exact = self.exact if other.exact is None else other.exact
        least = max(self.least, other.least)
        if None not in (self.exact, other.exact) and self.exact != other.exact:
            return None
        return None if exact is not None and exact < least else _Side(exact, least)

    @property
    def size(self) -> int:
        return UNBOUNDED if self.exact is None else self.exact


def _sides(segment: Segment) -> tuple[_Side, _Side]:
    low, high, shift = segment.low, segment.high, segment.shift
    left = _Side(None, len(segment.keys) - 1) if low is None else _Side(shift - low, 0)
    right = _Side(None, len(segment.queries) - 1) if high is None else _Side(high - shift, 0)
    return left, right


class _Open:
    """A call that may take further segments."""

    def __init__(self, placed: _Placed) -> None:
        self._sides = _sides(placed.segment)
        self._placed = [placed]

    def takes(self, placed: _Placed) -> bool:
        """Add a segment if its demands agree and its queries come after the others; tell if so."""
        if placed.queries.start < self._placed[-1].queries.stop:
            return False
        left, right = (a.both(b) for a, b in zip(self._sides, _sides(placed.segment), strict=True))
        if left is None or right is None:
            return False
        self._sides = left, right
        self._placed.append(placed)
        return True

    def closed(self) -> Call:
        """Return the call."""
        first, last = self._placed[0], self._placed[-1]
        queries = range(first.queries.start, last.queries.stop)
        seen = sum(len(each.queries) for each in self._placed)
        runs = [each.keys for each in self._placed]
        in_order = all(run.step == 1 for run in runs) and all(
            a.stop <= b.start for a, b in pairwise(runs)
        )
        keys = (range(runs[0].start, runs[-1].stop),) if in_order else tuple(runs)
        starts, key_starts = self._starts(is_view=in_order)
        left, right = self._sides
        return Call(
            queries,
            keys,
            starts,
            key_starts,
            (left.size, right.size),
            has_gaps=seen < len(queries),
            rounds=_rounds(keys),
        )

    def _starts(self, *, is_view: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return starts of segments; between two lies one without keys, or queries."""
        starts, key_starts = [0], [0]
        first = self._placed[0]
        origin, key_origin = first.queries.start, first.keys.start

        def end_segment(stop: int, key_stop: int) -> None:
            starts.append(stop)
            key_starts.append(key_stop)

        for each in self._placed:
            if each.queries.start - origin > starts[-1]:
                end_segment(each.queries.start - origin, key_starts[-1])
            if is_view and each.keys.start - key_origin > key_starts[-1]:
                end_segment(starts[-1], each.keys.start - key_origin)
            end_segment(each.queries.stop - origin, key_starts[-1] + len(each.keys))
        return tuple(starts), tuple(key_starts)


def _rounds(keys: tuple[range, ...]) -> tuple[tuple[tuple[range, range], ...], ...]:
    """Return the keys of a call in rounds that name no row twice, the first ones in the first.

    A sum over rounds, one after the other, has one order on every device.
    """
    rounds: list[tuple[dict[int, int], list[tuple[range, range]]]] = []
    start = 0
    for run in keys:
        at = range(start, start + len(run))
        start = at.stop
        sequence = run.start % run.step
        # By sequence, where the last run of a round ends.
        free = next((each for each in rounds if run.start >= each[0].get(sequence, 0)), None)
        if free is None:
            rounds.append(free := ({}, []))
        free[0][sequence] = run.stop
        free[1].append((at, run))
    return tuple(tuple(taken) for _, taken in rounds)


def _longest(starts: Sequence[int]) -> int:
    return max(b - a for a, b in pairwise(starts))


def _smaller(one: int | None, other: int | None) -> int | None:
    known = [each for each in (one, other) if each is not None]
    return min(known, default=None)
