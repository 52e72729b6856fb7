# ruff: noqa: SLF001  # operators that other operators are composed of
"""Operators that torch composes differently on CUDA than on `meta`.

`scaled_dot_product_attention`, `dropout` and `rms_norm` are not kernels but choose kernels by the
device. On `meta` they choose kernels of the CPU, or store all scores. The functions of this file
are registered for meta tensors and choose the kernels of CUDA, as torch does in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp: flash attention, else memory-efficient
attention, else products. Some versions of torch with cuDNN prefer its attention to flash attention
on Hopper and Blackwell; its output and log-sum-exp have the same sizes. It is chosen here if the
other kernels are switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda as switches
from torch.nn import functional

from hp_dry.cluster import Gpu
from hp_platform.dry_device import launch

_HALF = (torch.float16, torch.bfloat16)
_FLASH_MAX_HEAD_SIZE = 256
_BIAS_MULTIPLE = 16  # entries of a row of a bias
aten: Any = torch.ops.aten


def kernels(gpu: Gpu) -> dict[str, Callable[..., Tensor]]:
    """Return the functions that replace operators of aten, by their names."""
    found: dict[str, Callable[..., Tensor]] = {
        "scaled_dot_product_attention": partial(_attention, gpu.capability),
        "dropout": _dropout,
    }
    if hasattr(aten, "_fused_rms_norm"):
        found["rms_norm"] = _rms_norm
    return found


def _attention(  # noqa: PLR0917 # torch's own
    capability: tuple[int, int],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    bias = _as_bias(attn_mask, q)
    is_plain = q.dim() == 4 and 0 not in (*q.shape, *k.shape)
    fits_causal = attn_mask is None and (not is_causal or q.shape[2] == k.shape[2])
    if is_plain and fits_causal and _flash_takes(capability, q, k, v):
        out: Tensor = _flash(q, k, v, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    elif is_plain and _efficient_takes(capability, q, k, v):
        keeps = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        out = aten._scaled_dot_product_efficient_attention(
            q, k, v, _padded(bias, q, k), keeps, dropout_p, is_causal, scale=scale
        )[0]
    elif is_plain and _only_cudnn() and q.dtype in _HALF:
        out = aten._scaled_dot_product_cudnn_attention(
            q, k, v, bias, True, dropout_p, is_causal, False, scale=scale
        )[0]
    else:
        out = aten._scaled_dot_product_attention_math(
            q, k, v, bias, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    return out


def _flash_takes(capability: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        switches.flash_sdp_enabled()
        and capability >= (8, 0)
        and q.dtype in _HALF
        and q.shape[-1] == v.shape[-1] <= _FLASH_MAX_HEAD_SIZE
        and q.shape[1] % k.shape[1] == 0
    )


def _flash(
    q: Tensor, k: Tensor, v: Tensor, *, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    size = q.shape[-1]
    if padding := -size % 8:
        scale = size**-0.5 if scale is None else scale
        q, k, v = (functional.pad(x, (0, padding)) for x in (q, k, v))
    y: Tensor = aten._scaled_dot_product_flash_attention(
        q, k, v, dropout_p, is_causal, False, scale=scale
    )[0]
    return y[..., :size] if padding else y


def _efficient_takes(capability: tuple[int, int], q: Tensor, k: Tensor, v: Tensor) -> bool:
    multiple = 4 if q.dtype == torch.float32 else 8
    dtypes = [torch.float32, torch.float16, *([torch.bfloat16] if capability >= (8, 0) else [])]
    return (
        switches.mem_efficient_sdp_enabled()
        and q.dtype in dtypes
        and q.shape[-1] % multiple == v.shape[-1] % multiple == 0
        and q.shape[1] == k.shape[1]
    )


def _only_cudnn() -> bool:
    return switches.cudnn_sdp_enabled() and not (
        switches.flash_sdp_enabled() or switches.mem_efficient_sdp_enabled()
    )


def _as_bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=q.dtype).masked_fill_(mask.logical_not(), -torch.inf)


def _padded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Return the bias [B, H, Q, K] with rows aligned for the kernel."""
    if bias is None:
        return None
    if padding := -bias.shape[-1] % _BIAS_MULTIPLE:
        bias = functional.pad(bias, (0, padding))[..., : k.shape[2]]
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Apply dropout as one kernel, which saves a mask of bools."""
    if not train or p == 0 or x.numel() == 0:
        return x
    y: Tensor = x * x.new_zeros(()) if p == 1 else aten.native_dropout(x, p, train)[0]
    return y


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Normalise as one kernel, which saves the reciprocal of the norm, unless dtypes differ."""
    if weight is None or weight.dtype == x.dtype:
        fused: Tensor = _RmsNorm.apply(x, tuple(shape), weight)
        return fused
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    dims = tuple(range(-len(shape), 0))
    normed = wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True).add_(eps))
    return (normed.to(x.dtype) * weight).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """`aten::_fused_rms_norm`, which on `meta` is composed of others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], weight: Tensor | None) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        stored = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
        y, rstd = torch.empty_like(x), x.new_empty(stored, dtype=wide)
        ctx.save_for_backward(x, rstd, weight)
        given = (x,) if weight is None else (x, weight)
        launch("aten._fused_rms_norm", _nothing, reads=given, writes=(y, rstd))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor | None]:
        x, rstd, weight = ctx.saved_tensors
        grads = [torch.empty_like(x)] + ([] if weight is None else [torch.empty_like(weight)])
        given = (grad, x, rstd) if weight is None else (grad, x, rstd, weight)
        launch("aten._fused_rms_norm_backward", _nothing, reads=given, writes=grads)
        return grads[0], None, None if weight is None else grads[1]


def _nothing() -> None:
    """Compute nothing, instead of a kernel."""
