"""Two tensors that should be the same: equal, equal but for a cast, or by how much they differ."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hp_base.dtypes import dtype_name
from hp_checkpoint.manifest import DTYPES

_CASTS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_EIGHTS = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3, torch.int8: 0.0}
"""Dtypes of quantised weights, and the relative half step of each."""
_STEPS = {torch.float8_e4m3fn: 2.0**-10, torch.float8_e5m2: 2.0**-17, torch.int8: 0.5}
"""Half of the smallest step of each, before it is scaled."""
_SLACK = 1.02
"""Of the half step, for scales that are rounded themselves."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a pair of tensors.

    Attributes:
        said: Words: equal, or what explains the difference, or where it is.
        is_equal: Whether they are, but for what is explained.
        error: Norm of the difference, relative to the first's.
    """

    said: str
    is_equal: bool
    error: float = 0.0


def is_quantised(dtype: str) -> bool:
    """Tell whether a dtype is one of weights that come with scales."""
    return DTYPES[dtype] in _EIGHTS


def scales_of(name: str) -> tuple[str, ...]:
    """Return the names that engines and published files give to a quantised tensor's scales."""
    module = name.removesuffix(".weight")
    ends = ("_scale_inv", "_scale", "_scales")
    return (*(f"{name}{end}" for end in ends), f"{module}.scale", f"{module}.weight_scale")


def judge(ours: Tensor, theirs: Tensor) -> Verdict:
    """Compare tensors of one shape and any dtypes.

    Args:
        ours: Reference, of any shape and dtype; errors are relative to its norm.
        theirs: Tensor of the same shape that is judged.
    """
    if ours.dtype == theirs.dtype and _same(ours, theirs):
        return Verdict("equal", True)
    error, where = _apart(ours, theirs)
    if ours.dtype != theirs.dtype and _same(ours.to(theirs.dtype), theirs):
        return Verdict(f"equal after a cast to {dtype_name(theirs.dtype)}", True, error)
    if ours.dtype != theirs.dtype and _same(theirs.to(ours.dtype), ours):
        return Verdict(f"equal before a cast to {dtype_name(ours.dtype)}", True, error)
    if ours.is_floating_point() and theirs.is_floating_point():
        for dtype in _CASTS:
            if _same(ours.to(dtype).to(theirs.dtype), theirs):
                return Verdict(f"equal after a cast to {dtype_name(dtype)} and back", True, error)
    return Verdict(where, False, error)


def judge_quantised(ours: Tensor, theirs: Tensor, scales: Tensor) -> Verdict:
    """Compare weights with quantised ones.

    Args:
        ours: Weights, of any shape.
        theirs: The same in 8 bits.
        scales: Factors of `theirs`: one, or one a row, a column or a block; as many
            dims as `theirs`, or none.
    """
    wide = _spread(scales.double(), theirs.shape)
    if wide is None:
        return Verdict(
            f"scales of shape {list(scales.shape)} do not fit {list(theirs.shape)}", False, math.inf
        )
    back, values = theirs.double() * wide, ours.double()
    bound = torch.maximum(
        values.abs() * _EIGHTS[theirs.dtype], wide.abs() * _STEPS[theirs.dtype]
    ).mul_(_SLACK)
    error, where = _apart(ours, back)
    beyond = int(((back - values).abs() > bound).sum() + back.isnan().sum())
    if beyond:
        shown = f"{beyond} of {values.numel()} beyond half a step of {dtype_name(theirs.dtype)}"
        return Verdict(f"{shown}, {where}", False, error)
    return Verdict(f"rounded to {dtype_name(theirs.dtype)} with scales", True, error)


def _spread(scales: Tensor, shape: torch.Size) -> Tensor | None:
    """Return scales of blocks, repeated to the shape of what they scale; None: they do not fit."""
    if scales.numel() == 1:
        return scales.reshape(()).expand(shape)
    if scales.ndim == len(shape) - 1 and scales.shape == shape[:-1]:
        scales = scales[..., None]
    if scales.ndim != len(shape):
        return None
    for dim, (blocks, size) in enumerate(zip(scales.shape, shape, strict=True)):
        if not 0 < blocks <= size:
            return None
        width = -(-size // blocks)
        if blocks not in (1, size):
            width = next((w for w in (128, 64, 32, 16) if -(-size // w) == blocks), width)
        scales = scales.repeat_interleave(width, dim).narrow(dim, 0, size)
    return scales


def _same(a: Tensor, b: Tensor) -> bool:
    """Tell whether all bits are, zeros with signs and NaNs too."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)


def _apart(ours: Tensor, theirs: Tensor) -> tuple[float, str]:
    """Return the norm of the difference relative to ours, and the index of the largest one."""
    a, b = ours.double(), theirs.double()
    difference = (a - b).abs_()
    is_bad = difference.isnan()
    differing = int(((a != b) | is_bad).sum())
    if not differing:
        return 0.0, "equal but for signs of zeros, or bits of NaNs"
    largest = int(torch.where(is_bad, math.inf, difference).argmax())
    place = [int(i) for i in torch.unravel_index(torch.tensor(largest), a.shape)]
    mine, other = float(a.flatten()[largest]), float(b.flatten()[largest])
    norm = float(torch.linalg.vector_norm(a))
    error = float(torch.linalg.vector_norm(difference))
    relative = math.inf if math.isnan(error) or not norm else error / norm
    at = f" at {place}" if place else ""
    said = f"{differing} of {a.numel()} differ, most{at}: {other:.9g} where {mine:.9g} is expected"
    return relative, said
