"""Causal attention on a CPU whose values have another head size than its queries and keys.

No kernel of torch takes such heads there, and its fallback computes all S * S scores, of which half
count for nothing, and copies all operands. Here a strip of queries meets only the keys up to its
last query, in products that read the heads where they are.

Shape symbols: B batch, S sequence, H heads, D head size of queries and keys, E head size of values,
R queries of a strip, K keys up to its last one.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_context.kernels import in_rows

_LEAST = 64  # queries of a strip: fewer make products too small to be fast
_STRIPS = 4  # leave out three of eight scores; more would add to gradients of keys too often


def strips_apply(q: Tensor, k: Tensor) -> bool:
    """Tell whether strips are the better way for these heads; the same for any number of heads."""
    return (
        q.device.type == "cpu"
        and q.ndim == 4
        and q.shape == k.shape
        and q.dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
    )


def attend_in_strips(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend: [B, H, S, D], [B, H, S, D], [B, H, S, E] to [B, H, S, E]; differentiable once."""
    out: Tensor = _Strips.apply(q, k, v, scale)
    return out


class _Strips(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        q, k, v = in_rows(q, k, v)
        out, weights = _like_rows(q, v.size(-1)), []
        for b, rows in _strips(q):
            keys = slice(rows.stop)
            w_HRK = torch.bmm(q[b, :, rows], k[b, :, keys].mT).mul_(scale)
            size = rows.stop - rows.start
            later = q.new_ones(size, size, dtype=torch.bool).triu_(1)
            w_HRK[:, :, rows].masked_fill_(later, -torch.inf)
            torch.softmax(w_HRK, -1, out=w_HRK)
            out[b, :, rows] = torch.bmm(w_HRK, v[b, :, keys])
            weights.append(w_HRK)
        ctx.save_for_backward(q, k, v, out, *weights)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, *weights = ctx.saved_tensors
        (grad,) = in_rows(grad)
        dq = _like_rows(q, q.size(-1))
        dk, dv = (x.new_empty(x.shape) for x in (k, v))
        delta = (grad * out).sum(-1, keepdim=True)
        # From the last strip, which meets all keys: it begins their gradients, others add.
        for (b, rows), w_HRK in reversed(list(zip(_strips(q), weights, strict=True))):
            keys, first = slice(rows.stop), float(rows.stop < q.size(2))
            grad_HRE, q_HRD = grad[b, :, rows], q[b, :, rows]
            dv_HKE, dk_HKD = dv[b, :, keys], dk[b, :, keys]
            dv_HKE.baddbmm_(w_HRK.mT, grad_HRE, beta=first)
            ds_HRK = torch.bmm(grad_HRE, v[b, :, keys].mT)
            ds_HRK.sub_(delta[b, :, rows]).mul_(w_HRK).mul_(ctx.scale)
            dq[b, :, rows] = torch.bmm(ds_HRK, k[b, :, keys])
            dk_HKD.baddbmm_(ds_HRK.mT, q_HRD, beta=first)
        return dq, dk, dv, None


def _strips(q: Tensor) -> Iterator[tuple[int, slice]]:
    """Return sequences and queries, in order."""
    seq_len = q.size(2)
    size = max(_LEAST, -(-seq_len // _STRIPS))
    for b in range(q.size(0)):
        for start in range(0, seq_len, size):
            yield b, slice(start, min(start + size, seq_len))


def _like_rows(q: Tensor, width: int) -> Tensor:
    """Return an empty [B, H, S, width] that lies in memory as [B, S, H, width]."""
    batch, heads, seq_len, _ = q.shape
    return q.new_empty(batch, seq_len, heads, width).transpose(1, 2)
