"""Attention masks as descriptions of global positions, never as shapes of a local tensor.

A mask answers one question: may the query at global position p see the key at position k? What
a rank holds of the sequence is of no consequence to the answer, so a mask stays right however
the sequence is split. `is_causal=True` on a local block does not: it aligns the corner of the
block, not the positions.

Shape symbols: Q queries, K keys, S length of the whole sequence.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


class Mask(ABC):
    """Which keys a query may see. Combine two with `&`."""

    @abstractmethod
    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """Return where attention is allowed.

        Args:
            query: Global positions, int64, broadcastable against `key`.
            key: Global positions, int64.

        Returns:
            bool, the broadcast shape of both.
        """

    def check(self, seq_len: int) -> None:
        """Raise `ValueError` if the mask does not fit a sequence of `seq_len` positions."""
        del seq_len

    def __and__(self, other: "Mask") -> "Mask":
        """The mask that allows what both allow."""
        return Both(self, other)


@dataclass(frozen=True, slots=True)
class Full(Mask):
    """Every query sees every key."""

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """All true; see `Mask.allowed`."""
        return torch.ones_like(query - key, dtype=torch.bool)


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """A query sees the keys up to its own position."""

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """See `Mask.allowed`."""
        return key <= query


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


@dataclass(frozen=True, slots=True)
class Documents(Mask):
    """Documents packed into one sequence; a query sees its own document only.

    Args:
        lengths: Tokens of each document in order, any lengths >= 1 that sum to the length of
            the whole sequence. All sequences of a batch share them.
    """

    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"Documents lengths ({self.lengths}) must be >= 1 and not empty")

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """See `Mask.allowed`."""
        ends = torch.tensor(list(accumulate(self.lengths)), device=query.device)
        document = torch.bucketize(query, ends, right=True)
        return document == torch.bucketize(key, ends, right=True)

    def check(self, seq_len: int) -> None:
        """Raise `ValueError` unless the documents fill the sequence exactly."""
        total = sum(self.lengths)
        if total != seq_len:
            raise ValueError(
                f"sum of Documents lengths ({total}) must equal the length of the whole "
                f"sequence ({seq_len})"
            )


@dataclass(frozen=True, slots=True)
class Both(Mask):
    """Allows what both masks allow, e.g. `Causal() & Documents((5, 3))`."""

    first: Mask
    second: Mask

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """See `Mask.allowed`."""
        return self.first.allowed(query, key) & self.second.allowed(query, key)

    def check(self, seq_len: int) -> None:
        """Check both."""
        self.first.check(seq_len)
        self.second.check(seq_len)


def mask_tensor(mask: Mask, seq_len: int, *, device: torch.device | None = None) -> Tensor:
    """Write `mask` out for a whole sequence: bool [S, S], true where attention is allowed.

    Raises:
        ValueError: The mask does not fit `seq_len`.
    """
    mask.check(seq_len)
    positions = torch.arange(seq_len, device=device)
    return mask.allowed(positions[:, None], positions[None, :])
