"""Attention of a rank's queries over keys that arrive in parts, and its way backward.

The modes differ in how keys and values arrive and how their gradients go home. What is computed of
a part that is there is the same in all of them: its blocks (`blocks.plan`), each with the kernels
of `kernels.py`, put together by their log-sum-exp (`merge.py`).

Shape symbols: B batch, s queries of this rank, K keys of a part, H query heads, G key/value heads,
D head size of queries and keys, E head size of values. Keys and values travel packed: [K, B, G,
D + E].
"""

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from hp_context.attention import softmax
from hp_context.attention.core import SpreadMask, Terms
from hp_context.attention.heads import HeadShare
from hp_context.attention.softmax import Scores
from hp_context.attention.spread import Needs, Spread
from hp_context.masks.blocks import QueryRun
from hp_context.masks.mask import Mask

WORTH_A_COPY = 1024  # queries that use a key/value head


class PartsMask(SpreadMask):
    """A mask whose attention gets keys and values from the ranks of a `Spread`.

    Args:
        mask: See `SpreadMask`.
        spread: Positions of the sequence that each rank of the group holds.
        mode: See `SpreadMask`.
        share: See `SpreadMask`.
    """

    def __init__(
        self, mask: Mask, spread: Spread, mode: str, share: HeadShare | None = None
    ) -> None:
        super().__init__(mask, mode, share)
        self.spread = spread

    @property
    def fingerprint(self) -> int:
        """Tells masks apart by which keys are sent where; the same on all ranks, or they hang."""
        return Needs(self.spread.runs, self.mask).fingerprint

    def attend(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
        """See `SpreadMask.attend`.

        Raises:
            ValueError: There is dropout.
        """
        if terms.dropout:
            raise ValueError(
                f"dropout ({terms.dropout}) must be 0 in {self.mode}: use ulysses_degree=None"
            )
        self.used = True
        device = q.device.type
        if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
            q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
        scores = Scores(self.mask, terms.scale, terms.softcap)
        return self.attend_to_parts((q, k, v), terms.sinks, scores)

    @abstractmethod
    def attend_to_parts(
        self, qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, scores: Scores
    ) -> Tensor:
        """Return [B, H, s, E]; differentiable. `sinks` are [H], see `merge.with_sinks`."""


class Forward(softmax.Forward):
    """Attention over the parts that have been added so far; see `softmax.Forward`."""

    def add(self, part: Tensor, runs: Sequence[QueryRun]) -> None:
        """Take in a part, keys and values packed, and its blocks."""
        self.add_keys(*_rows_of_heads(part, self.q), runs)


class Backward(softmax.Backward):
    """Gradients over the parts that have been added so far; see `softmax.Backward`."""

    def add(self, part: Tensor, runs: Sequence[QueryRun]) -> Tensor:
        """Take in a part and its blocks; return its gradients, packed, in float32 or wider."""
        head_size = self.q.size(-1)
        grads = torch.zeros_like(part, dtype=self.dq.dtype)
        self.add_keys(*_rows_of_heads(part, self.q), runs, unpacked(grads, head_size))
        return grads


def new_results(q: Tensor, value_size: int) -> tuple[Tensor, Tensor]:
    """Return empty output [B, H, s, E] like `q` and log-sum-exp [B, H, s], float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q) if value_size == q.size(-1) else None
    return (
        q.new_empty((*q.shape[:-1], value_size)) if out is None else out,
        torch.empty(q.shape[:-1], dtype=wide, device=q.device),
    )


def packed(k: Tensor, v: Tensor) -> Tensor:
    """[B, G, K, D] and [B, G, K, E] -> [K, B, G, D + E]."""
    return torch.cat([k.movedim(2, 0), v.movedim(2, 0)], -1)


def unpacked(x: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """[K, B, G, D + E] -> views [B, G, K, D] and [B, G, K, E]."""
    k, v = x.movedim(0, 2).tensor_split([head_size], -1)
    return k, v


def _rows_of_heads(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """`unpacked` for kernels: on the CPU copies in which the rows of a head follow each other.

    Measured: without them its kernel takes up to 1.1 times as long, where there are enough queries
    [B, H, s, D] for each key to win back the copy. Kernels of CUDA do not care.
    """
    k, v = unpacked(x, q.size(-1))
    pays = q.device.type == "cpu" and q.size(1) * q.size(2) >= WORTH_A_COPY * k.size(1)
    return (k.contiguous(), v.contiguous()) if pays else (k, v)
