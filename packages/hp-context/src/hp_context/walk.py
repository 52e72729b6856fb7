"""Attention by blocks where a rank has all keys and values that its queries see.

Shape symbols: B batch, S sequence, H query heads, G key/value heads (G divides H), D head size of
queries and keys, E head size of values.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_context.blocks import KeyBlock, QueryRun, plan
from hp_context.dropout import BlockDropout, Dropout
from hp_context.kernels import block_backward, block_forward
from hp_context.masks import BlockKind, Mask, block_tensor
from hp_context.merge import Merge, for_backward, sinks_gradient, with_sinks

# Pairs of positions whose scores could be computed in the time that a block takes beside its own:
# measured on a CPU, where documents of 64 positions break even; estimated for a GPU, from 50 us for
# a block and 2 us for the scores of 2**16 pairs and 16 heads.
_CALL_COST = {"cpu": 1 << 13, "cuda": 1 << 20}


@dataclass(frozen=True, slots=True)
class Walk:
    """The blocks of one call and how their weights are made, for forward and for backward.

    Attributes:
        mask: Which keys a query may see.
        runs: The blocks, of all queries.
        scale: Factor of the scores.
        softcap: Bound of the scores; None: no bound.
        dropout: Which weights are dropped.
    """

    mask: Mask
    runs: tuple[QueryRun, ...]
    scale: float
    softcap: float | None = None
    dropout: Dropout | None = None

    def forward(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [B, H, S, E] and its log-sum-exp [B, H, S], -inf for no key.

        Args:
            q: [B, H, S, D].
            keys: [B, G, S, D].
            values: [B, G, S, E].
        """
        out = q.new_empty((*q.shape[:-1], values.size(-1)))
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
        for run in self.runs:
            rows = slice(run.start, run.start + len(run.query))
            if not run.blocks:
                out[:, :, rows], lse[:, :, rows] = 0.0, -torch.inf
                continue
            merge = Merge()
            for block in run.blocks:
                columns = slice(block.start, block.start + len(block.key))
                part = block_forward(
                    q[:, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    kind=block.kind,
                    mask=self._tensor(run, block, q.device),
                    scale=self.scale,
                    softcap=self.softcap,
                    dropout=self._dropped(run, block),
                )
                merge.add(*part)
            out[:, :, rows], lse[:, :, rows] = merge.result()
        return out, lse

    def backward(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, keys and values in float32 or wider.

        Args:
            q: As in `forward`.
            keys: As in `forward`.
            values: As in `forward`.
            grad_out: [B, H, S, E].
            out: The output, with sinks if there are any.
            lse: The log-sum-exp likewise.
        """
        dq, dkeys, dvalues = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, keys, values))
        lse = for_backward(lse)
        for run in self.runs:
            rows = slice(run.start, run.start + len(run.query))
            for block in run.blocks:
                columns = slice(block.start, block.start + len(block.key))
                dq_block, dk_block, dv_block = block_backward(
                    q[:, :, rows],
                    keys[:, :, columns],
                    values[:, :, columns],
                    grad_out=grad_out[:, :, rows],
                    out=out[:, :, rows],
                    lse=lse[:, :, rows],
                    kind=block.kind,
                    mask=self._tensor(run, block, q.device),
                    scale=self.scale,
                    softcap=self.softcap,
                    dropout=self._dropped(run, block),
                )
                dq[:, :, rows] += dq_block
                dkeys[:, :, columns] += dk_block
                dvalues[:, :, columns] += dv_block
        return dq, dkeys, dvalues

    def _tensor(self, run: QueryRun, block: KeyBlock, device: torch.device) -> Tensor | None:
        if block.kind is not BlockKind.PARTIAL:
            return None
        return block_tensor(self.mask, run.query, block.key, device=device)

    def _dropped(self, run: QueryRun, block: KeyBlock) -> BlockDropout | None:
        return None if self.dropout is None else self.dropout.of_block(run.query, block.key)


def whole_plan(mask: Mask, seq_len: int) -> tuple[QueryRun, ...]:
    """Return the blocks of a whole sequence; remembered for masks that can be hashed."""
    try:
        return _remembered_plan(mask, seq_len)
    except TypeError:  # a mask of the user's that compares but does not hash
        return tuple(plan(mask, [range(seq_len)], [range(seq_len)]))


@lru_cache(maxsize=64)
def _remembered_plan(mask: Mask, seq_len: int) -> tuple[QueryRun, ...]:
    return tuple(plan(mask, [range(seq_len)], [range(seq_len)]))


def blocks_pay(mask: Mask, seq_len: int, device_type: str) -> bool:
    """Tell whether blocks cost less than all S * S scores.

    The answer is the same for any number of heads, so that ranks that share them agree with one
    process that has them all, to the bit.
    """
    call_cost = _CALL_COST.get(device_type, _CALL_COST["cuda"])
    runs = whole_plan(mask, seq_len)
    num_calls = sum(len(run.blocks) for run in runs)
    return sum(run.cost for run in runs) + num_calls * call_cost < seq_len**2


def attend_by_blocks(
    qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, walk: Walk
) -> Tensor:
    """Return attention of a whole sequence, [B, H, S, E]; differentiable once.

    Args:
        qkv: [B, H, S, D], [B, G, S, D] and [B, G, S, E].
        sinks: [H], see `merge.with_sinks`.
        walk: Blocks of this sequence.
    """
    device = qkv[0].device.type
    narrow: Iterable[Tensor] = qkv
    if torch.is_autocast_enabled(device) and qkv[0].dtype != torch.float64:
        narrow = (x.to(torch.get_autocast_dtype(device)) for x in qkv)
    out: Tensor = _ByBlocks.apply(walk, *narrow, sinks)
    return out


class _ByBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, walk: Walk, *inputs: Tensor) -> Tensor:
        q, k, v, sinks = inputs
        with torch.autocast(q.device.type, enabled=False):
            out, lse = walk.forward(q, k, v)
            if sinks is not None:
                out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.walk = walk
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        with torch.autocast(q.device.type, enabled=False):
            grads = ctx.walk.backward(q, k, v, grad_out=grad_out, out=out, lse=lse)
            dq, dk, dv = (g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
            dsinks = None
            if sinks is not None and ctx.needs_input_grad[4]:
                dsinks = sinks_gradient(sinks, grad_out=grad_out, out=out, lse=lse)
        return None, dq, dk, dv, dsinks
