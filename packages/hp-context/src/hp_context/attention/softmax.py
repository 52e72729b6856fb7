"""Attention by blocks, forward and backward, and that of a whole sequence under one mask.

The computation for the keys that a rank has is the same in all modes: the blocks of a plan
(`blocks.plan`), each with the kernels of `hp_context.kernels`, put together by the log-sum-exp of
the scores of each part (`Merge`). From "Online normalizer calculation for softmax" (Milakov and
Gimelshein 2018, arXiv:1805.02867). A part with no key to see has log-sum-exp -inf and weighs
nothing.

Shape symbols: B batch, S sequence, Q queries, K keys, H query heads, G key/value heads (G divides
H), D head size of queries and keys, E head size of values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_context.kernels import block_backward, block_forward
from hp_context.kernels.reference import Dropout
from hp_context.masks import (
    BlockKind,
    Both,
    Causal,
    Documents,
    Full,
    Mask,
    SlidingWindow,
    block_tensor,
)
from hp_context.masks.blocks import KeyBlock, QueryRun, plan
from hp_platform.autograd import autocast_dtype


class Merge:
    """The running result over the parts of the keys seen so far, in float32 or wider."""

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Add one part.

        Args:
            out: [B, H, Q, E], attention over the keys of the part alone. May be overwritten.
            lse: [B, H, Q], log-sum-exp of its scores; -inf where a query sees none of the keys,
                and `out` 0 there.
        """
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        if self._out is None or self._lse is None:
            self._out, self._lse = wide, lse
            return
        total = torch.logaddexp(self._lse, lse)
        finite = for_backward(total)
        self._out.mul_((self._lse - finite).exp().unsqueeze(-1))
        self._out.addcmul_(wide, (lse - finite).exp().unsqueeze(-1))
        self._lse = total

    def result(self) -> tuple[Tensor, Tensor]:
        """Return output [B, H, Q, E] and log-sum-exp [B, H, Q]; exactly 0 and -inf for no key."""
        if self._out is None or self._lse is None:
            raise RuntimeError("Merge.result must follow at least one Merge.add")
        return self._out, self._lse


def for_backward(lse: Tensor) -> Tensor:
    """Return `lse` without -inf, so that exp(-inf - lse) is 0 for queries that see no key."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add one more term to the softmax of each query, with no value: attention that goes nowhere.

    Backward by blocks (Note [Backward by blocks]) is right with what this returns.

    Args:
        out: [B, H, Q, E] over all keys. May be overwritten.
        lse: [B, H, Q] likewise.
        sinks: [H], the score of the term; None: there is no such term.

    Returns:
        Output and log-sum-exp with the term in it.
    """
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out.mul_((lse - total).exp().to(out.dtype).unsqueeze(-1)), total


def sinks_gradient(sinks: Tensor, *, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of the scores of `with_sinks`, [H], summed over batch and queries.

    Args:
        sinks: [H].
        grad_out: [B, H, Q, E].
        out: What `with_sinks` returned.
        lse: What `with_sinks` returned.
    """
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return (weights * delta).sum((0, 2)).neg().to(sinks.dtype)


# Pairs of positions whose scores could be computed in the time that a block takes beside its own:
# measured on a CPU, where documents of 64 positions break even; estimated for a GPU, from 50 us for
# a block and 2 us for the scores of 2**16 pairs and 16 heads.
_CALL_COST = {"cpu": 1 << 13, "cuda": 1 << 20}


@dataclass(frozen=True, slots=True)
class Scores:
    """The rule by which weights follow from queries and keys: mask, scale, soft cap and dropout.

    Attributes:
        mask: Description of the keys that a query may see.
        scale: Factor of the scores.
        softcap: Bound of the scores; None: no bound.
        dropout: Rule by which weights are dropped; for keys in the order of their positions.
        masks: One for each sequence of the batch, where calls of variable lengths compute
            attention (`segmented`); None: it goes by blocks.
    """

    mask: Mask
    scale: float
    softcap: float | None = None
    dropout: Dropout | None = None
    masks: tuple[Mask, ...] | None = None

    def of_block(
        self, run: QueryRun, block: KeyBlock, columns: slice, device: torch.device
    ) -> dict[str, Any]:
        """Return the arguments of a block's kernels beside tensors of queries and keys."""
        mask = dropped = None
        if block.kind is BlockKind.PARTIAL:
            mask = block_tensor(self.mask, run.query, block.key, device=device)
        if self.dropout is not None:
            dropped = self.dropout.of_block(run.query, range(columns.start, columns.stop))
        return {
            "kind": block.kind,
            "mask": mask,
            "scale": self.scale,
            "softcap": self.softcap,
            "dropout": dropped,
        }


class Forward:
    """The online softmax: attention over the keys that have been added so far.

    Args:
        q: [B, H, S, D].
        scores: How queries and keys make weights.
    """

    def __init__(self, q: Tensor, scores: Scores) -> None:
        self.q, self._scores = q, scores
        self._merges: dict[range, Merge] = {}  # by where a run of queries is in q

    def add_keys(self, keys: Tensor, values: Tensor, runs: Sequence[QueryRun]) -> None:
        """Add keys [B, G, K, D] and values [B, G, K, E] with their blocks."""
        for run in runs:
            at = range(run.start, run.start + len(run.query))
            for columns, block in run.calls:
                part = block_forward(
                    self.q[:, :, at.start : at.stop],
                    keys[:, :, columns],
                    values[:, :, columns],
                    **self._scores.of_block(run, block, columns, keys.device),
                )
                self._merges.setdefault(at, Merge()).add(*part)

    def write(self, out: Tensor, lse: Tensor, sinks: Tensor | None = None) -> None:
        """Write the result: output [B, H, S, E], log-sum-exp [B, H, S].

        Queries that see nothing at all have output 0 and log-sum-exp -inf.

        Args:
            out: Output, overwritten.
            lse: Log-sum-exp, overwritten.
            sinks: [H], see `softmax.with_sinks`.
        """
        if sum(map(len, self._merges)) < out.size(2):
            out.zero_()
            lse.copy_(torch.full_like(lse, -torch.inf) if sinks is None else sinks[:, None])
        for at, merge in self._merges.items():
            rows = slice(at.start, at.stop)
            out[:, :, rows], lse[:, :, rows] = with_sinks(*merge.result(), sinks)


class Backward:
    """Gradients over the keys that have been added so far; see Note [Backward by blocks].

    Args:
        q: [B, H, S, D].
        out: [B, H, S, E], over all keys, with sinks if there are any.
        lse: [B, H, S], likewise.
        grad_out: [B, H, S, E].
        scores: How queries and keys make weights.
    """

    def __init__(
        self, q: Tensor, *, out: Tensor, lse: Tensor, grad_out: Tensor, scores: Scores
    ) -> None:
        self.q, self._out, self._grad_out, self._scores = q, out, grad_out, scores
        self._lse = for_backward(lse)
        self.dq = torch.zeros_like(q, dtype=lse.dtype)

    def add_keys(
        self,
        keys: Tensor,
        values: Tensor,
        runs: Sequence[QueryRun],
        grads: tuple[Tensor, Tensor],
    ) -> None:
        """Add keys [B, G, K, D] and values [B, G, K, E] with their blocks.

        Their gradients are added to `grads`, like keys and values, in float32 or wider.
        """
        dkeys, dvalues = grads
        for run in runs:
            rows = slice(run.start, run.start + len(run.query))
            for columns, block in run.calls:
                dq, dk, dv = block_backward(
                    self.q[:, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    grad_out=self._grad_out[:, :, rows],
                    out=self._out[:, :, rows],
                    lse=self._lse[:, :, rows],
                    **self._scores.of_block(run, block, columns, keys.device),
                )
                self.dq[:, :, rows] += dq
                dkeys[:, :, columns] += dk
                dvalues[:, :, columns] += dv


def whole_plan(mask: Mask, seq_len: int) -> tuple[QueryRun, ...]:
    """Return the blocks of a whole sequence; cached for masks that cannot change."""
    if _cannot_change(mask):
        return _remembered_plan(mask, seq_len)
    return tuple(plan(mask, [range(seq_len)], [range(seq_len)]))


@lru_cache(maxsize=64)
def _remembered_plan(mask: Mask, seq_len: int) -> tuple[QueryRun, ...]:
    return tuple(plan(mask, [range(seq_len)], [range(seq_len)]))


def _cannot_change(mask: Mask) -> bool:
    """Tell whether a mask equals another if and only if it allows the same, now and later."""
    if isinstance(mask, Both):
        return _cannot_change(mask.first) and _cannot_change(mask.second)
    if type(mask) is Documents:
        return isinstance(mask.lengths, tuple)
    return type(mask) in (Full, Causal, SlidingWindow)


def blocks_pay(mask: Mask, seq_len: int, device_type: str) -> bool:
    """Tell whether blocks cost less than all S * S scores.

    The answer is the same for any number of heads, so that ranks that share them agree with one
    process that has them all, to the bit.
    """
    if _cannot_change(mask):
        return _remembered_answer(mask, seq_len, device_type)
    return _blocks_pay(mask, seq_len, device_type)


def _blocks_pay(mask: Mask, seq_len: int, device_type: str) -> bool:
    call_cost = _CALL_COST.get(device_type, _CALL_COST["cuda"])
    runs = whole_plan(mask, seq_len)
    num_calls = sum(len(run.blocks) for run in runs)
    return sum(run.cost for run in runs) + num_calls * call_cost < seq_len**2


_remembered_answer = lru_cache(maxsize=64)(_blocks_pay)


def attend_by_blocks(
    qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, scores: Scores
) -> Tensor:
    """Return attention of a whole sequence, [B, H, S, E]; differentiable once.

    Args:
        qkv: [B, H, S, D], [B, G, S, D] and [B, G, S, E].
        sinks: [H], see `softmax.with_sinks`.
        scores: How queries and keys make weights.
    """
    out: Tensor = _ByBlocks.apply(scores, *narrowed(*qkv), sinks)
    return out


def narrowed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v in the dtype that autocast means for attention."""
    dtype = autocast_dtype(q)
    return q.to(dtype), k.to(dtype), v.to(dtype)


class _ByBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Scores, *inputs: Tensor) -> Tensor:
        q, k, v, sinks = inputs
        out = q.new_empty((*q.shape[:-1], v.size(-1)))
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            online, runs = Forward(q, scores), whole_plan(scores.mask, q.size(2))
            online.add_keys(k, v, runs)
            online.write(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.scores, ctx.runs = scores, runs
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            grads = Backward(q, out=out, lse=lse, grad_out=grad_out, scores=ctx.scores)
            dk, dv = (torch.zeros_like(x, dtype=lse.dtype) for x in (k, v))
            grads.add_keys(k, v, ctx.runs, (dk, dv))
            dsinks = (
                sinks_gradient(sinks, grad_out=grad_out, out=out, lse=lse)
                if ctx.needs_input_grad[4]
                else None
            )
        return None, grads.dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks
