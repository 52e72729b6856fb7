"""Attention of a rank's queries over keys that arrive in parts, and its way backward.

The modes differ in how keys and values arrive and how their gradients go home. What is computed of
a part that is there is the same in all of them: its blocks (`blocks.plan`), each with the kernels
of `hp_context.kernels`, put together by their log-sum-exp (`softmax.Merge`).

Shape symbols: B batch, s queries of this rank, K keys of a part, H query heads, G key/value heads,
D head size of queries and keys, E head size of values. Keys and values travel packed: [K, B, G,
D + E].
"""

from abc import abstractmethod
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_context.attention import segmented, softmax
from hp_context.attention.core import SpreadMask, Terms, check_dropout
from hp_context.attention.softmax import Scores, sinks_gradient, with_sinks
from hp_context.attention.spread import HeadShare, Needs, Rows, Spread, in_order, slices
from hp_context.kernels import varlen
from hp_context.kernels.varlen import padded
from hp_context.masks import Mask, of_sequences
from hp_context.masks.blocks import QueryRun, plan
from hp_context.masks.segments import Call, calls

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
        """Return a number of which keys are sent where; the same on all ranks, or they hang."""
        return Needs(self.spread.runs, self.mask).fingerprint

    def attend(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> Tensor:
        """See `SpreadMask.attend`.

        Raises:
            ValueError: There is dropout.
        """
        check_dropout(terms.dropout, self.mode)
        self.used = True
        q, k, v = softmax.narrowed(q, k, v)
        masks = None
        if terms.softcap is None and q.device.type in varlen.DEVICES:
            masks = segmented.masks_of_calls(q, v, self.mask)
        if masks is None and self.mask.of_batch:
            return self._one_by_one((q, k, v), terms)
        scores = Scores(self.mask, terms.scale, terms.softcap, masks=masks)
        if masks is not None:
            return self._in_order((q, k, v), terms.sinks, scores)
        return self.attend_to_parts((q, k, v), terms.sinks, scores)

    def _in_order(
        self, qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, scores: Scores
    ) -> Tensor:
        """Attend with the positions of every rank in order, so that a step is one call.

        They are not where ranks that share heads hold two pieces each: the hybrid modes, head-tail.
        """
        spread = self.spread
        ordered = replace(spread, runs=tuple(map(in_order, spread.runs)))
        if ordered.runs == spread.runs:
            return self.attend_to_parts(qkv, sinks, scores)
        q, k, v = (_Moved.apply(x, ordered.mine, spread.mine) for x in qkv)
        of_ordered = copy(self)
        of_ordered.spread = ordered
        out = of_ordered.attend_to_parts((q, k, v), sinks, scores)
        moved: Tensor = _Moved.apply(out, spread.mine, ordered.mine)
        return moved

    def _one_by_one(self, qkv: tuple[Tensor, Tensor, Tensor], terms: Terms) -> Tensor:
        """Attend to one sequence after the other, each with exchanges of its own."""
        outs = []
        for b, mask in enumerate(of_sequences(self.mask, qkv[0].size(0))):
            of_row = copy(self)
            of_row.mask = mask
            q, k, v = (x[b : b + 1] for x in qkv)
            outs.append(of_row.attend(q, k, v, terms))
        return torch.cat(outs)

    def attend_to_parts(
        self, qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, scores: Scores
    ) -> Tensor:
        """Return [B, H, s, E]; differentiable. `sinks` are [H], see `softmax.with_sinks`."""
        out: Tensor = _OverParts.apply(self.exchange(qkv, scores), *qkv, sinks)
        return out

    @abstractmethod
    def exchange(self, qkv: tuple[Tensor, Tensor, Tensor], scores: Scores) -> "PartsExchange":
        """Return the exchanges of one call, for forward and backward."""


class PartsExchange(Protocol):
    """The exchanges of keys and values, and of their gradients, in one call of attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return output [B, H, s, E] and log-sum-exp [B, H, s] over the keys of all parts."""

    def gradients(
        self, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradient of q, and of this rank's keys and values, packed.

        Args:
            qkv: Same as in `attend`.
            out: [B, H, s, E], with sinks if there are any.
            lse: [B, H, s], likewise.
            grad_out: [B, H, s, E].
        """


class _OverParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: PartsExchange, *inputs: Tensor) -> Tensor:
        q, k, v, sinks = inputs
        with torch.autocast(q.device.type, enabled=False):
            out, lse = with_sinks(*exchange.attend(q, k, v), sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.exchange = exchange
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            dq, home = ctx.exchange.gradients((q, k, v), out, lse, grad_out)
            dk, dv = unpacked(home, k.size(-1))
            dsinks = (
                sinks_gradient(sinks, grad_out=grad_out, out=out, lse=lse)
                if ctx.needs_input_grad[4]
                else None
            )
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


class _Moved(torch.autograd.Function):
    """[B, heads, s, size] with other positions first; in memory the sequence comes before heads."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Rows, held: Rows) -> Tensor:
        ctx.rows, ctx.held = rows, held
        return _moved(x, rows, held)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _moved(grad, ctx.held, ctx.rows), None, None


def _moved(x: Tensor, rows: Rows, held: Rows) -> Tensor:
    by_position = x.transpose(1, 2)
    pieces = [by_position[:, at] for at in slices(rows, held)]
    return torch.cat(pieces, 1).transpose(1, 2)


@dataclass(frozen=True)
class Work:
    """A part of the keys, and the queries that attend to it.

    Attributes:
        mask: Which keys a query may see.
        queries: Positions of the queries, as runs in the order of their tensor.
        keys: Positions of the keys likewise.
    """

    mask: Mask
    queries: Rows
    keys: Rows

    @cached_property
    def runs(self) -> list[QueryRun]:
        """Return the blocks of queries and keys to compute."""
        return plan(self.mask, self.queries, self.keys)

    def calls(self, masks: tuple[Mask, ...]) -> tuple[Call, ...]:
        """Return the calls of variable lengths that compute it, with a mask for each sequence."""
        return calls(masks, self.queries, self.keys, alternate=True)


def start_forward(q: Tensor, scores: Scores) -> "_ForwardByBlocks | _ForwardByCalls":
    """Return an accumulator of attention of q [B, H, s, D]: by blocks, or in calls of segments."""
    if scores.masks is None:
        return _ForwardByBlocks(q, scores)
    return _ForwardByCalls(q, scores.scale, scores.masks)


def start_backward(
    q: Tensor, *, out: Tensor, lse: Tensor, grad_out: Tensor, scores: Scores
) -> "_BackwardByBlocks | _BackwardByCalls":
    """Return an accumulator of the gradients; takes the arguments of `softmax.Backward`."""
    make = _BackwardByBlocks if scores.masks is None else _BackwardByCalls
    return make(q, out=out, lse=lse, grad_out=grad_out, scores=scores)


class _ForwardByBlocks(softmax.Forward):
    """Attention over the parts that have been added so far; see `softmax.Forward`."""

    def add(self, part: Tensor, work: Work) -> None:
        """Add a part: keys and values, packed, [K, B, G, D + E]."""
        self.add_keys(*_rows_of_heads(part, self.q), work.runs)

    def result(self, value_size: int) -> tuple[Tensor, Tensor]:
        """Return output [B, H, s, E] and log-sum-exp [B, H, s]; see `softmax.Forward.write`."""
        out, lse = new_results(self.q, value_size)
        self.write(out, lse)
        return out, lse


class _BackwardByBlocks(softmax.Backward):
    """Gradients over the parts that have been added so far; see `softmax.Backward`."""

    def add(self, part: Tensor, work: Work) -> Tensor:
        """Add a part; return its gradients, packed, in float32 or wider."""
        head_size = self.q.size(-1)
        grads = torch.zeros_like(part, dtype=self.dq.dtype)
        self.add_keys(*_rows_of_heads(part, self.q), work.runs, unpacked(grads, head_size))
        return grads


class _ForwardByCalls:
    """The same as `_ForwardByBlocks`, in calls of segments."""

    def __init__(self, q: Tensor, scale: float, masks: tuple[Mask, ...]) -> None:
        self._masks = masks
        self._rows = segmented.Forward(segmented.rows_of_queries(q), scale)

    def add(self, part: Tensor, work: Work) -> None:
        self._rows.add_keys((part.flatten(0, 1),), work.calls(self._masks))

    def result(self, value_size: int) -> tuple[Tensor, Tensor]:
        rows, lse = self._rows.result()
        batch = len(self._masks)
        out = segmented.heads_first(rows[..., :value_size], batch)
        return out, lse.unflatten(1, (batch, -1)).transpose(0, 1)

    def write(self, out: Tensor, lse: Tensor) -> None:
        for target, found in zip((out, lse), self.result(out.size(-1)), strict=True):
            target.copy_(found)


class _BackwardByCalls:
    """The same as `_BackwardByBlocks`, in calls of segments."""

    def __init__(
        self, q: Tensor, *, out: Tensor, lse: Tensor, grad_out: Tensor, scores: Scores
    ) -> None:
        self._masks = scores.masks or ()
        rows, size = segmented.rows_of_queries, q.size(-1)
        self._rows = segmented.Backward(
            rows(q),
            out=padded(rows(out), size),
            lse=lse.transpose(0, 1).flatten(1),
            grad_out=padded(rows(grad_out), size),
            scale=scores.scale,
        )

    @property
    def dq(self) -> Tensor:
        return segmented.heads_first(self._rows.dq, len(self._masks))

    def add(self, part: Tensor, work: Work) -> Tensor:
        wide = torch.promote_types(part.dtype, torch.float32)
        grads = torch.empty(part.shape, dtype=wide, device=part.device)
        by_row = (part.flatten(0, 1),), work.calls(self._masks)
        self._rows.add_keys(*by_row, (grads.flatten(0, 1),))
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
    """Pack keys and values: [B, G, K, D] and [B, G, K, E] to [K, B, G, D + E]."""
    return torch.cat([k.movedim(2, 0), v.movedim(2, 0)], -1)


def unpacked(x: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of [K, B, G, D + E]: views [B, G, K, D] and [B, G, K, E]."""
    k, v = x.movedim(0, 2).tensor_split([head_size], -1)
    return k, v


def _rows_of_heads(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack for kernels: on the CPU into copies in which the rows of a head follow each other.

    Measured: without them its kernel takes up to 1.1 times as long, where there are enough queries
    [B, H, s, D] for each key to win back the copy. Kernels of CUDA do not care.
    """
    k, v = unpacked(x, q.size(-1))
    pays = q.device.type == "cpu" and q.size(1) * q.size(2) >= WORTH_A_COPY * k.size(1)
    return (k.contiguous(), v.contiguous()) if pays else (k, v)
