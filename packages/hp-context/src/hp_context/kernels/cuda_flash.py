# ruff: noqa: SLF001  # no public function of torch returns the log-sum-exp
"""Attention of one block by torch's flash attention of CUDA, forward and backward.

It takes bfloat16 and float16 without a mask tensor, and shares key/value heads by itself.

Shape symbols: B batch, H query heads, G key/value heads, Q queries, K keys, D head size of queries,
keys and values.
"""

import torch
from torch import Tensor

from hp_context.kernels.reference import Scoring

_MAX_HEAD_SIZE = 256
_MAX_HEAD_SIZE_SMALL = 192


def applies(q: Tensor, v: Tensor, *, mask: Tensor | None, softcap: float | None) -> bool:
    """Tell whether flash attention takes such a block, in forward and in backward."""
    head_size, (major, minor) = q.size(-1), capability(q.device)
    # Backward of large heads needs more shared memory than these have.
    small = major == 12 or (major == 8 and minor in (6, 7, 9))
    return (
        q.device.type == "cuda"
        and mask is None
        and softcap is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.backends.cuda.flash_sdp_enabled()
        and major >= 8
        and q.dtype in (torch.bfloat16, torch.float16)
        and v.size(-1) == head_size
        and head_size % 8 == 0
        and head_size <= (_MAX_HEAD_SIZE_SMALL if small else _MAX_HEAD_SIZE)
    )


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability; (0, 0) for what is not from NVIDIA."""
    if torch.version.hip is not None or device.type != "cuda":
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Q, D] and its log-sum-exp [B, H, Q]; see `kernels.block_forward`."""
    del mask
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal, False, scale=scoring.scale
    )
    return out, lse


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
    """Return dq, dk, dv; see `kernels.block_backward`."""
    del mask
    unused = torch.zeros(2, dtype=torch.int64, device=q.device)  # the random state of dropout
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        None,
        None,
        q.size(2),
        k.size(2),
        0.0,
        causal,
        unused,
        unused,
        scale=scoring.scale,
    )
    return dq, dk, dv
