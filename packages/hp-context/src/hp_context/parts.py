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
from dataclasses import dataclass

import torch
from torch import Tensor

from hp_context.attention import SpreadMask, Terms
from hp_context.blocks import KeyBlock, QueryRun
from hp_context.heads import HeadShare
from hp_context.kernels import block_backward, block_forward
from hp_context.masks import BlockKind, Mask, block_tensor
from hp_context.merge import Merge, for_backward
from hp_context.spread import Needs, Spread

WORTH_A_COPY = 1024  # queries that use a key/value head


class PartsMask(SpreadMask):
    """A mask whose attention gets keys and values from the ranks of a `Spread`.

    Args:
        mask: See `SpreadMask`.
        spread: Whose positions are which.
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
            raise ValueError(f"dropout ({terms.dropout}) must be 0 in {self.mode}")
        self.used = True
        device = q.device.type
        if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
            q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
        scores = Scores(self.mask, terms.scale, terms.softcap)
        return self.attend_to_parts((q, k, v), terms.sinks, scores)

    @abstractmethod
    def attend_to_parts(
        self, qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, scores: "Scores"
    ) -> Tensor:
        """Return [B, H, s, E]; differentiable. `sinks` are [H], see `merge.with_sinks`."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What makes scores of queries and keys: the mask, the factor and the bound, if any."""

    mask: Mask
    scale: float
    softcap: float | None = None

    def tensor(self, run: QueryRun, block: KeyBlock, device: torch.device) -> Tensor | None:
        """Return the mask tensor of a block that needs one."""
        if block.kind is not BlockKind.PARTIAL:
            return None
        return block_tensor(self.mask, run.query, block.key, device=device)


class Forward:
    """Attention over the parts that have been added so far.

    Args:
        q: [B, H, s, D].
        scores: How queries and keys make scores.
    """

    def __init__(self, q: Tensor, scores: Scores) -> None:
        self._q, self._scores = q, scores
        self._merges: dict[range, Merge] = {}  # by where a run of queries is in q

    def add(self, part: Tensor, runs: Sequence[QueryRun]) -> None:
        """Take in a part, keys and values packed, and its blocks."""
        keys, values = _rows_of_heads(part, self._q)
        for run in runs:
            at = range(run.start, run.start + len(run.query))
            for columns, block in run.calls:
                out, lse = block_forward(
                    self._q[:, :, at.start : at.stop],
                    keys[:, :, columns],
                    values[:, :, columns],
                    kind=block.kind,
                    mask=self._scores.tensor(run, block, keys.device),
                    scale=self._scores.scale,
                    softcap=self._scores.softcap,
                )
                self._merges.setdefault(at, Merge()).add(out, lse)

    def write(self, out: Tensor, lse: Tensor) -> None:
        """Write the result: output [B, H, s, E], log-sum-exp [B, H, s].

        Queries that see no key at all have output 0 and log-sum-exp -inf.
        """
        if sum(map(len, self._merges)) < out.size(2):
            out.zero_()
            lse.fill_(-torch.inf)
        for at, merge in self._merges.items():
            rows = slice(at.start, at.stop)
            out[:, :, rows], lse[:, :, rows] = merge.result()


class Backward:
    """Gradients over the parts that have been added so far; see Note [Backward by blocks].

    Args:
        q: [B, H, s, D].
        out: [B, H, s, E], over all keys.
        lse: [B, H, s], over all keys.
        grad_out: [B, H, s, E].
        scores: How queries and keys make scores.
    """

    def __init__(
        self, q: Tensor, *, out: Tensor, lse: Tensor, grad_out: Tensor, scores: Scores
    ) -> None:
        self._q, self._out, self._grad_out, self._scores = q, out, grad_out, scores
        self._lse = for_backward(lse)
        self.dq = torch.zeros_like(q, dtype=lse.dtype)

    def add(self, part: Tensor, runs: Sequence[QueryRun]) -> Tensor:
        """Take in a part and its blocks; return its gradients, packed, in float32 or wider."""
        head_size = self._q.size(-1)
        keys, values = _rows_of_heads(part, self._q)
        grads = torch.zeros_like(part, dtype=self.dq.dtype)
        dkeys, dvalues = unpacked(grads, head_size)
        for run in runs:
            rows = slice(run.start, run.start + len(run.query))
            for columns, block in run.calls:
                dq, dk, dv = block_backward(
                    self._q[:, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    grad_out=self._grad_out[:, :, rows],
                    out=self._out[:, :, rows],
                    lse=self._lse[:, :, rows],
                    kind=block.kind,
                    mask=self._scores.tensor(run, block, part.device),
                    scale=self._scores.scale,
                    softcap=self._scores.softcap,
                )
                self.dq[:, :, rows] += dq
                dkeys[:, :, columns] += dk
                dvalues[:, :, columns] += dv
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
