"""Masks: descriptions of global positions, never shapes of a local tensor.

A mask answers one question: may the query at global position p see the key at position k? What
a rank holds of the sequence is of no consequence to the answer, so a mask stays right however
the sequence is split. `is_causal=True` on a local block does not: it aligns the corner of the
block, not the positions.

Masks also answer for blocks, a run of query positions against a run of key positions (a `range`
of step 1), so that a kernel can leave out what nobody sees and needs a mask tensor for the rest
only where the answers differ within a block.

Shape symbols: Q queries, K keys, S length of the whole sequence.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

import torch
from torch import Tensor

FAR = 1 << 62  # beyond the last position of any sequence


class BlockKind(Enum):
    """The part of a block of queries x keys that a mask allows."""

    EMPTY = "empty"  # nothing
    FULL = "full"  # everything
    CAUSAL = "causal"  # queries and keys are the same run of two or more; up to the diagonal
    PARTIAL = "partial"  # some of it


class Mask(ABC):
    """A description of the keys that a query may see. Combine two with `&`."""

    @abstractmethod
    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """Return where attention is allowed.

        Args:
            query: Global positions, int64, broadcastable against `key`.
            key: Global positions, int64.

        Returns:
            bool, the broadcast shape of both.
        """

    def visible(self, query: int) -> range | None:
        """Return the keys that the query at a position may see, where they are one run.

        None, the default, tells nothing. A mask that returns a run does so for every query; the
        run has the query itself in it, may go beyond the sequence, and neither of its ends moves
        back from one query to the next.
        """
        del query
        return None

    def seen(self, query: range) -> range:
        """Return a run of keys outside of which no query of a run sees any.

        Keys that a rank does not see in this sense are not sent to it. Exact where `visible` tells
        the keys; everything where it does not.

        Args:
            query: Run of positions, at least one.
        """
        first, last = self.visible(query[0]), self.visible(query[-1])
        return range(FAR) if first is None or last is None else range(first.start, last.stop)

    @property
    def causal(self) -> bool:
        """Tell whether it is known that no query sees a key behind its own position."""
        return False

    @property
    def of_batch(self) -> bool:
        """Tell whether it limits each sequence of a batch in its own way."""
        return False

    def block(self, query: range, key: range) -> BlockKind:
        """Return the kind of a block; PARTIAL, always right, where it is not known.

        Exact where `visible` tells the keys and `causal` the truth.

        Args:
            query: Run of positions, at least one.
            key: Run of positions, at least one.
        """
        first, last = self.visible(query[0]), self.visible(query[-1])
        if first is None or last is None:
            return BlockKind.PARTIAL
        if last.start <= key.start and key.stop <= first.stop:
            return BlockKind.FULL
        if query == key and last.start <= key.start and self.causal:
            return BlockKind.CAUSAL
        # Ends move forward only: the queries that see beyond the first key are the last ones,
        # those that see from before the last key on are the first ones.
        begin = bisect_right(query, key.start, key=lambda p: self._visible(p).stop)
        end = bisect_left(query, key.stop, key=lambda p: self._visible(p).start)
        return BlockKind.PARTIAL if begin < end else BlockKind.EMPTY

    def query_cuts(self, run: range) -> set[int]:
        """Return the positions in a run of queries at which blocks should begin."""
        del run
        return set()

    def key_cuts(self, query: range) -> set[int]:
        """Return the positions at which the keys that a run of queries may see begin or end."""
        ends = (self.visible(query[0]), self.visible(query[-1]))
        return {cut for keys in ends if keys is not None for cut in (keys.start, keys.stop)}

    def check(self, seq_len: int) -> None:
        """Raise `ValueError` if the mask does not fit a sequence of `seq_len` positions."""
        del seq_len

    def __and__(self, other: "Mask") -> "Mask":
        """Return the mask that allows a pair if both do."""
        return Both(self, other)

    def _visible(self, query: int) -> range:
        keys = self.visible(query)
        if keys is None or query not in keys:
            raise ValueError(
                f"visible({query}) of {self} ({keys}) must be a run with {query} in it"
            )
        return keys


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """Every query sees every key."""

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """Return all true; see `Mask.allowed`."""
        return torch.ones_like(query - key, dtype=torch.bool)

    def visible(self, query: int) -> range:
        """See `Mask.visible`."""
        del query
        return range(FAR)


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """A query sees the keys up to its own position."""

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """See `Mask.allowed`."""
        return key <= query

    def visible(self, query: int) -> range:
        """See `Mask.visible`."""
        return range(query + 1)

    @property
    def causal(self) -> bool:
        """Return True."""
        return True


@dataclass(frozen=True, slots=True)
class SlidingWindow(Mask):
    """A query sees `left` keys before its position, itself, and `right` keys after it."""

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            if getattr(self, name) < 0:
                raise ValueError(f"SlidingWindow {name} ({getattr(self, name)}) must be >= 0")

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """See `Mask.allowed`."""
        return (key >= query - self.left) & (key <= query + self.right)

    def visible(self, query: int) -> range:
        """See `Mask.visible`."""
        return range(max(0, query - self.left), query + self.right + 1)

    @property
    def causal(self) -> bool:
        """Tell whether the window ends at the query."""
        return self.right == 0

    def query_cuts(self, run: range) -> set[int]:
        """Cut long runs by the width of the window: a longer block is mostly outside of it."""
        return set(run[self.left + self.right + 1 :: self.left + self.right + 1])


@dataclass(frozen=True, slots=True)
class Documents(Mask):
    """Documents packed into one sequence; a query sees its own document only.

    Args:
        lengths: Tokens of each document in order, any lengths >= 1 that sum to the length of
            the whole sequence. All sequences of a batch share them.
    """

    lengths: tuple[int, ...]
    _ends: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"Documents lengths ({self.lengths}) must be >= 1 and not empty")
        object.__setattr__(self, "_ends", tuple(accumulate(self.lengths)))

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """See `Mask.allowed`."""
        ends = torch.tensor(self._ends, device=query.device)
        document = torch.bucketize(query, ends, right=True)
        return document == torch.bucketize(key, ends, right=True)

    def visible(self, query: int) -> range:
        """See `Mask.visible`; positions after the last document count as one more."""
        document = bisect_right(self._ends, query)
        start = self._ends[document - 1] if document else 0
        return range(start, self._ends[document] if document < len(self._ends) else FAR)

    def query_cuts(self, run: range) -> set[int]:
        """Cut between documents."""
        return set(
            self._ends[bisect_right(self._ends, run.start) : bisect_left(self._ends, run.stop)]
        )

    def check(self, seq_len: int) -> None:
        """Raise `ValueError` unless the documents fill the sequence exactly."""
        total = self._ends[-1]
        if total != seq_len:
            raise ValueError(
                f"sum of Documents lengths ({total}) must equal the length of the whole "
                f"sequence ({seq_len})"
            )


@dataclass(frozen=True, slots=True)
class Both(Mask):
    """A mask that allows a pair if both of its masks do, e.g. `Causal() & Documents((5, 3))`."""

    first: Mask
    second: Mask

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """See `Mask.allowed`."""
        return self.first.allowed(query, key) & self.second.allowed(query, key)

    def visible(self, query: int) -> range | None:
        """Return the keys that both allow, where both are known."""
        one, other = self.first.visible(query), self.second.visible(query)
        if one is None or other is None:
            return None
        return range(max(one.start, other.start), min(one.stop, other.stop))

    def seen(self, query: range) -> range:
        """Return the keys that both allow; see `Mask.seen`."""
        one, other = self.first.seen(query), self.second.seen(query)
        return range(max(one.start, other.start), min(one.stop, other.stop))

    @property
    def causal(self) -> bool:
        """Tell whether one of the masks is causal."""
        return self.first.causal or self.second.causal

    @property
    def of_batch(self) -> bool:
        """Tell whether one of the masks does."""
        return self.first.of_batch or self.second.of_batch

    def block(self, query: range, key: range) -> BlockKind:
        """See `Mask.block`; by the kinds of both where one of them does not tell its keys."""
        if self.visible(query[0]) is not None:
            return super(Both, self).block(query, key)
        one, other = self.first.block(query, key), self.second.block(query, key)
        if BlockKind.EMPTY in (one, other):
            return BlockKind.EMPTY
        if one is BlockKind.FULL or one is other:
            return other
        return one if other is BlockKind.FULL else BlockKind.PARTIAL

    def query_cuts(self, run: range) -> set[int]:
        """Return where either mask cuts."""
        return self.first.query_cuts(run) | self.second.query_cuts(run)

    def key_cuts(self, query: range) -> set[int]:
        """Return where either mask cuts."""
        return self.first.key_cuts(query) | self.second.key_cuts(query)

    def check(self, seq_len: int) -> None:
        """Check both."""
        self.first.check(seq_len)
        self.second.check(seq_len)


@dataclass(frozen=True, slots=True)
class PositionMask(Mask):
    """A mask given by a function of global positions.

    Nothing is known of a block beforehand, so all of them are computed with a mask tensor. Combine
    it with a mask that leaves blocks out, e.g. `Causal() & PositionMask(...)`.

    Args:
        function: Takes the positions of queries and keys, int64 tensors that broadcast against
            each other, and returns where attention is allowed: bool, of their broadcast shape.

    Example:
        >>> strided = PositionMask(lambda query, key: (query - key) % 4 == 0)
    """

    function: Callable[[Tensor, Tensor], Tensor]

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """See `Mask.allowed`.

        Raises:
            ValueError: The function returned anything but bool, or another shape.
        """
        result = self.function(query, key)
        shape = torch.broadcast_shapes(query.shape, key.shape)
        if result.dtype != torch.bool or result.shape != shape:
            raise ValueError(
                f"function of PositionMask must return bool {tuple(shape)}, but it returned "
                f"{result.dtype} {tuple(result.shape)}"
            )
        return result


def mask_tensor(mask: Mask, seq_len: int, *, device: torch.device | None = None) -> Tensor:
    """Write `mask` out for a whole sequence: bool [S, S], true where attention is allowed.

    Raises:
        ValueError: The mask does not fit `seq_len`.
    """
    mask.check(seq_len)
    positions = torch.arange(seq_len, device=device)
    return mask.allowed(positions[:, None], positions[None, :])


def common(one: range, other: range) -> range:
    """Return the positions that two runs share."""
    return range(max(one.start, other.start), min(one.stop, other.stop))


def block_tensor(
    mask: Mask, query: range, key: range, *, device: torch.device | None = None
) -> Tensor:
    """Write `mask` out for one block: bool [Q, K], true where attention is allowed."""
    queries = torch.arange(query.start, query.stop, device=device)
    keys = torch.arange(key.start, key.stop, device=device)
    return mask.allowed(queries[:, None], keys[None, :])


@dataclass(frozen=True, slots=True)
class EachSequence(Mask):
    """A mask for each sequence of a batch, as `Documents` whose lengths differ are.

    `Causal() & EachSequence(documents)` limits the keys of every sequence by both.

    Args:
        masks: One for each sequence of the batch, in order.

    Raises:
        ValueError: There is none, or one of them is for a batch itself.

    Example:
        >>> mask = Causal() & EachSequence((Documents((5, 3)), Documents((8,))))
    """

    masks: tuple[Mask, ...]

    def __post_init__(self) -> None:
        if not self.masks:
            raise ValueError(f"EachSequence masks ({self.masks}) must be one or more")
        if any(mask.of_batch for mask in self.masks):
            raise ValueError(f"EachSequence masks ({self.masks}) must be of one sequence each")

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """See `Mask.allowed`; [B, 1, ...] for a batch of B sequences and any head."""
        return torch.stack([mask.allowed(query, key) for mask in self.masks]).unsqueeze(1)

    def seen(self, query: range) -> range:
        """Return a run that holds the keys seen in any sequence; see `Mask.seen`."""
        seen = [mask.seen(query) for mask in self.masks]
        return range(min(keys.start for keys in seen), max(keys.stop for keys in seen))

    @property
    def causal(self) -> bool:
        """Tell whether all of them are."""
        return all(mask.causal for mask in self.masks)

    @property
    def of_batch(self) -> bool:
        """Return True."""
        return True

    def block(self, query: range, key: range) -> BlockKind:
        """Return the kind of a block in all sequences; PARTIAL where they differ."""
        kinds = {mask.block(query, key) for mask in self.masks}
        return kinds.pop() if len(kinds) == 1 else BlockKind.PARTIAL

    def check(self, seq_len: int) -> None:
        """Check all of them."""
        for mask in self.masks:
            mask.check(seq_len)


def of_sequences(mask: Mask, batch: int) -> tuple[Mask, ...]:
    """Return the mask of each sequence of a batch.

    Args:
        mask: Mask of all sequences, or an `EachSequence` with one mask per sequence.
        batch: Number of sequences.

    Raises:
        ValueError: The mask is for a batch of another size.
    """
    if isinstance(mask, Both) and mask.of_batch:
        parts = (of_sequences(mask.first, batch), of_sequences(mask.second, batch))
        return tuple(a & b for a, b in zip(*parts, strict=True))
    if not isinstance(mask, EachSequence):
        return (mask,) * batch
    if len(mask.masks) != batch:
        raise ValueError(
            f"EachSequence masks ({len(mask.masks)}) must be one for each sequence of q ({batch})"
        )
    return mask.masks
