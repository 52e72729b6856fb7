"""Attention of a part of the queries over all keys, gathered from the ranks that share a sequence.

Known from Llama 3 (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2). Forward gathers keys and
values once, packed into one tensor, and computes the blocks of its queries. Backward gathers them
again instead of keeping them, walks the same blocks, and sends the gradients of keys and values to
the ranks that they belong to.

Note [Gradients go home by all-to-all]
    Each rank has gradients for the keys of all ranks. A reduce-scatter would sum them in the
    order of the backend, and Gloo runs it as an all-reduce of the whole. An all-to-all followed by
    a sum over ranks, in rank order, moves the same bytes as a good reduce-scatter and gives the
    same bits on every run. It is done in float32 or wider.

Shape symbols: B batch, S whole sequence, N ranks, s = S / N, H query heads, G key/value heads, D
head size of queries and keys, E head size of values. Queries and keys are [B, H, s, D] and
[B, G, s, D]; gathered keys and values [S, B, G, D + E], in the order of positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hp_context.attention import SpreadMask, Terms
from hp_context.blocks import KeyBlock, QueryRun, plan
from hp_context.heads import HeadShare
from hp_context.kernels import block_backward, block_forward
from hp_context.masks import BlockKind, Mask, block_tensor
from hp_context.merge import Merge, for_backward, sinks_gradient, with_sinks
from hp_platform import launch_all_to_all

# Renamed in 2.13, where the old name warns.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Spread:
    """Which positions the ranks of a group hold; together all of a sequence.

    Attributes:
        group: The ranks.
        runs: Positions of each rank, as runs in the order it holds them.
    """

    group: ProcessGroup
    runs: tuple[tuple[range, ...], ...]

    @property
    def mine(self) -> tuple[range, ...]:
        """The positions of this rank."""
        return self.runs[self.group.rank()]

    @property
    def whole(self) -> range:
        """All positions."""
        return range(sum(len(run) for runs in self.runs for run in runs))


class GatheredMask(SpreadMask):
    """A mask whose attention gathers keys and values over the ranks of a `Spread`.

    Args:
        mask: See `SpreadMask`.
        spread: Which positions each rank has.
        mode: See `SpreadMask`.
        share: See `SpreadMask`.
    """

    def __init__(
        self, mask: Mask, spread: Spread, mode: str, share: HeadShare | None = None
    ) -> None:
        super().__init__(mask, mode, share)
        self.spread = spread

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
        runs = plan(self.mask, self.spread.mine, [self.spread.whole])
        call = _Call(self.mask, self.spread, runs, terms.scale, terms.softcap)
        out: Tensor = _Attention.apply(call, q, k, v, terms.sinks)
        return out


@dataclass(frozen=True, slots=True)
class _Call:
    """What one call of attention needs beside tensors, in forward and in backward."""

    mask: Mask
    spread: Spread
    runs: list[QueryRun]
    scale: float
    softcap: float | None

    def tensor(self, run: QueryRun, block: KeyBlock, device: torch.device) -> Tensor | None:
        """Return the mask tensor of a block that needs one."""
        if block.kind is not BlockKind.PARTIAL:
            return None
        return block_tensor(self.mask, run.query, block.key, device=device)


def gather_keys(k: Tensor, v: Tensor, spread: Spread, *, seq_dim: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all positions, in their order; differentiable.

    Args:
        k: This rank's keys, any shape with s at `seq_dim`.
        v: Its values, of the same shape but for the last dim.
        spread: Whose positions are which.
        seq_dim: Dimension of the sequence.
    """
    whole: tuple[Tensor, Tensor] = _Gather.apply(k, v, spread, seq_dim)
    return whole


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: Tensor) -> Tensor:
        q, k, v, sinks = inputs
        out = torch.empty_like(q) if v.size(-1) == q.size(-1) else q.new_empty(_out_shape(q, v))
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            keys, values = _heads_first(_gather(_packed(k, v), call.spread), k.size(-1))
            for run in call.runs:
                rows = slice(run.start, run.start + len(run.query))
                out[:, :, rows], lse[:, :, rows] = _attend(q[:, :, rows], keys, values, run, call)
            if sinks is not None:
                out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.call = call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        call: _Call = ctx.call
        wide = lse.dtype
        lse = for_backward(lse)
        with torch.autocast(q.device.type, enabled=False):
            gathered = _gather(_packed(k, v), call.spread)
            keys, values = _heads_first(gathered, k.size(-1))
            dq = torch.zeros_like(q, dtype=wide)
            grads = torch.zeros_like(gathered, dtype=wide)
            dkeys, dvalues = _heads_first(grads, k.size(-1))
            for run in call.runs:
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
                        mask=call.tensor(run, block, q.device),
                        scale=call.scale,
                        softcap=call.softcap,
                    )
                    dq[:, :, rows] += dq_block
                    dkeys[:, :, columns] += dk_block
                    dvalues[:, :, columns] += dv_block
            dk, dv = _heads_first(_send_home(grads, call.spread), k.size(-1))
            dsinks = None
            if sinks is not None and ctx.needs_input_grad[4]:
                dsinks = sinks_gradient(sinks, grad_out=grad_out, out=out, lse=lse)
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, spread: Spread, seq_dim: int
    ) -> tuple[Tensor, Tensor]:
        ctx.call = (k.size(-1), spread, seq_dim)
        whole = _gather(torch.cat([k, v], -1).movedim(seq_dim, 0), spread)
        keys, values = whole.movedim(0, seq_dim).tensor_split([k.size(-1)], -1)
        return keys.contiguous(), values.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkeys: Tensor, dvalues: Tensor) -> tuple[Tensor, Tensor, None, None]:
        head_size, spread, seq_dim = ctx.call
        wide = torch.promote_types(dkeys.dtype, torch.float32)
        grads = torch.cat([dkeys, dvalues], -1).movedim(seq_dim, 0).to(wide)
        home = _send_home(grads, spread).movedim(0, seq_dim).to(dkeys.dtype)
        dk, dv = home.tensor_split([head_size], -1)
        return dk, dv, None, None


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, run: QueryRun, call: _Call
) -> tuple[Tensor, Tensor]:
    """Return output [B, H, Q, E] and log-sum-exp [B, H, Q] of one run of queries."""
    if not run.blocks:
        lse = q.new_full(
            q.shape[:-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32)
        )
        return q.new_zeros(_out_shape(q, values)), lse
    merge = Merge()
    for block in run.blocks:
        columns = slice(block.start, block.start + len(block.key))
        out, lse = block_forward(
            q,
            keys[:, :, columns],
            values[:, :, columns],
            kind=block.kind,
            mask=call.tensor(run, block, q.device),
            scale=call.scale,
            softcap=call.softcap,
        )
        merge.add(out, lse)
    return merge.result()


def _out_shape(q: Tensor, v: Tensor) -> tuple[int, ...]:
    return (*q.shape[:-1], v.size(-1))


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """[B, G, s, D] and [B, G, s, E] -> [s, B, G, D + E]."""
    return torch.cat([k.movedim(2, 0), v.movedim(2, 0)], -1)


def _heads_first(packed: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """[S, B, G, D + E] -> views [B, G, S, D] and [B, G, S, E]."""
    k, v = packed.movedim(0, 2).tensor_split([head_size], -1)
    return k, v


def _gather(x: Tensor, spread: Spread) -> Tensor:
    """[s, ...] of each rank -> [S, ...] in the order of positions."""
    gathered = x.new_empty((len(spread.whole), *x.shape[1:]))
    _all_gather(gathered, x.contiguous(), group=spread.group)
    held = _in_tensor_order(spread)
    if held == sorted(held, key=lambda run: run.start):
        return gathered
    parts = dict(zip(held, gathered.split([len(run) for run in held]), strict=True))
    return torch.cat([parts[run] for run in sorted(held, key=lambda run: run.start)])


def _send_home(grads: Tensor, spread: Spread) -> Tensor:
    """Sum [S, ...] over the ranks, each of which gets its own [s, ...].

    See Note [Gradients go home by all-to-all].
    """
    held = _in_tensor_order(spread)
    if held != sorted(held, key=lambda run: run.start):
        grads = torch.cat([grads[run.start : run.stop] for run in held])
    received = launch_all_to_all(grads, group=spread.group).wait()
    total: Tensor = received.unflatten(0, (spread.group.size(), -1)).sum(0)
    return total


def _in_tensor_order(spread: Spread) -> Sequence[range]:
    return [run for runs in spread.runs for run in runs]
