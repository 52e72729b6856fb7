"""Dropout of attention weights as a function of head and positions, not of the rank.

Whether a weight is dropped follows from a seed, the place in the batch, the head among all heads
and the positions of query and key, by a hash (the finalizer of splitmix64: Steele, Lea and Flood
2014, "Fast splittable pseudorandom number generators"). However heads and positions are dealt out
to ranks, the same weights are dropped, and backward needs the seed alone.

Shape symbols: B batch, H query heads, Q queries, K keys.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_BITS = 53  # of a hash that are compared with the probability


@dataclass(frozen=True, slots=True)
class Dropout:
    """The rule by which weights of a call are dropped.

    Attributes:
        probability: Probability of dropping each weight, > 0 and < 1.
        seed: Seed of the call; see `draw_seed`.
        first_head: The first query head of this rank among all heads.
    """

    probability: float
    seed: int
    first_head: int = 0

    def of_block(self, query: range, key: range) -> "BlockDropout":
        """Return the rule for a block of positions."""
        return BlockDropout(self, query, key)


@dataclass(frozen=True, slots=True)
class BlockDropout:
    """The rule by which weights of one block are dropped."""

    call: Dropout
    query: range
    key: range

    def factors(self, batch: int, heads: int, rows: slice, columns: slice, like: Tensor) -> Tensor:
        """Return [B, H, Q, K] for some queries and keys: 0 where dropped, 1 / (1 - p) elsewhere.

        Args:
            batch: Batch size, B.
            heads: Number of query heads, H.
            rows: Queries of the block.
            columns: Keys of the block.
            like: Tensor that has the dtype and the device of the result.
        """
        device, first = like.device, self.call.first_head
        state = torch.full((), self.call.seed, dtype=torch.int64, device=device)
        for size, start in ((batch, 0), (heads, first)):
            state = _mixed(state[..., None] + _numbers(start, start + size, device))
        query, key = self.query[rows], self.key[columns]
        by_query = _mixed(state[..., None] + _numbers(query.start, query.stop, device))
        # Keys are hashed once for all queries, and the two together once for each pair.
        by_key = _mixed(_mixed(_numbers(key.start, key.stop, device)) ^ self.call.seed)
        pairs = _mixed(by_query[..., None] + by_key)
        kept = _shifted(pairs, 64 - _BITS) >= int(self.call.probability * 2**_BITS)
        return kept.to(like.dtype).div_(1 - self.call.probability)


def draw_seed() -> int:
    """Return a seed from torch's generator of the CPU: recomputation restores it."""
    return int(torch.randint(2**62, (), device="cpu"))


def _numbers(start: int, stop: int, device: torch.device) -> Tensor:
    return torch.arange(start + 1, stop + 1, device=device) * _GOLDEN


def _mixed(z: Tensor) -> Tensor:
    """Hash int64 to int64; products wrap around."""
    z = (z ^ _shifted(z, 30)) * _MIX1
    z = (z ^ _shifted(z, 27)) * _MIX2
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right with zeros from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
