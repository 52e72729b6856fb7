# ruff: noqa: SLF001  # no public function of torch returns the log-sum-exp
"""Attention of one block by torch's efficient attention of CUDA, forward and backward.

It takes what flash attention does not, but needs as many key/value heads as query heads: it runs
once per member of the groups that share them, on views, so that nothing is repeated.

Shape symbols: B batch, H query heads, G key/value heads, Q queries, K keys, D head size of queries
and keys, E head size of values.
"""

import torch
from torch import Tensor

from hp_context.kernels.cuda_flash import capability
from hp_context.kernels.reference import Scoring

_LSE_MULTIPLE = 32  # rows of the log-sum-exp are padded to this
_BIAS_MULTIPLE = 16  # and rows of a bias begin at such multiples


def applies(q: Tensor, v: Tensor, *, mask: Tensor | None, softcap: float | None) -> bool:
    """Tell whether efficient attention takes such a block, in both ways; any mask will do."""
    del mask
    multiple = 4 if q.dtype == torch.float32 else 8
    sizes_fit = q.size(-1) % multiple == 0 and v.size(-1) % multiple == 0
    dtypes = [torch.float32, torch.float16]
    if capability(q.device) >= (8, 0):
        dtypes.append(torch.bfloat16)
    built = torch.version.hip is None and torch.backends.cuda.mem_efficient_sdp_enabled()
    fits = built and q.dtype in dtypes and sizes_fit
    return fits and softcap is None and q.device.type == "cuda"


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Q, E] and its log-sum-exp [B, H, Q]; see `kernels.block_forward`."""
    outs, lses = [], []
    for member in _members(q, k.size(1)):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            member, k, v, _bias(mask, member, k), True, 0.0, causal, scale=scoring.scale
        )
        outs.append(out)
        lses.append(lse[..., : q.size(2)])
    return torch.stack(outs, 2).flatten(1, 2), torch.stack(lses, 2).flatten(1, 2)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, the last two summed in float32; see `kernels.block_backward`.

    torch's kernels take for granted, and do not check, what follows (read in
    aten/src/ATen/native/transformers/cuda). Backward of efficient attention reads the output as if
    it were contiguous in [B, Q, H, E], whatever its strides, and the log-sum-exp in steps of 32
    queries. Backward of both reads the random state with dropout only. A build for AMD has other
    operators under these names: nothing here applies to it.
    """
    padding = -q.size(2) % _LSE_MULTIPLE
    padded = torch.nn.functional.pad(lse, (0, padding), value=torch.inf)
    unused = torch.zeros((), dtype=torch.int64, device=q.device)  # the random state of dropout
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = []
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    by_member = (_members(x, k.size(1)) for x in (grad_out, q, out, padded))
    for grad_m, q_m, out_m, lse_m in zip(*by_member, strict=True):
        bias = _bias(mask, q_m, k)
        dq_m, dk_m, dv_m, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad_m,
            q_m,
            k,
            v,
            bias,
            out_m.transpose(1, 2).contiguous().transpose(1, 2),
            lse_m.contiguous(),
            unused,
            unused,
            0.0,
            [True, True, True, False],
            causal,
            scale=scoring.scale,
        )
        dq.append(dq_m)
        dk += dk_m
        dv += dv_m
    return torch.stack(dq, 2).flatten(1, 2), dk, dv


def _members(x: Tensor, num_kv_heads: int) -> tuple[Tensor, ...]:
    """Split [B, H, ...] into one [B, G, ...] per member of the groups that share a key head."""
    parts: tuple[Tensor, ...] = x.unflatten(1, (num_kv_heads, -1)).unbind(2)
    return parts


def _bias(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the bias of the scores: [B, G, Q, K] that shares memory over B and G."""
    if mask is None:
        return None
    num_keys = k.size(2)
    padded = num_keys + -num_keys % _BIAS_MULTIPLE
    bias = torch.full((q.size(2), padded), -torch.inf, dtype=q.dtype, device=q.device)
    bias[:, :num_keys].masked_fill_(mask, 0.0)
    return bias[:, :num_keys].expand(q.size(0), q.size(1), -1, -1)
