"""Results of operators for operands of one form, so that torch works them out once.

Much of torch computes shapes in Python, and a step asks for the same ones thousands of times.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hp_dry._internals import is_meta, storage_key

META = torch.device("meta")
MASKS = (torch.bool, torch.uint8)
"""Dtypes of indices that say of each place whether it is meant."""


class Cost(NamedTuple):
    """Work that an operator asks of the device.

    Attributes:
        num_kernels: Kernels, copies and fills that CUDA is given.
        flops: Operations on numbers, by torch's flop counter.
    """

    num_kernels: int
    flops: int


@dataclass(frozen=True, slots=True)
class Made:
    """Results that an operator makes whenever its operands have one form.

    Attributes:
        kind: `list` or `tuple` of results; `Tensor` if it is one.
        parts: Shape, strides and dtype of each tensor; other results as they are.
        cost: What it asks of the device.
    """

    kind: type
    parts: tuple[Any, ...]
    cost: Cost

    def again(self) -> Any:
        """Make new tensors on `meta`."""
        made = [
            torch.empty_strided(each[0], each[1], dtype=each[2], device=META)
            if type(each) is tuple
            else each
            for each in self.parts
        ]
        return made[0] if self.kind is Tensor else self.kind(made)


def form_of(func: Any, args: Any, kwargs: Any) -> Hashable:
    """Return what the results of an operator follow from: shapes, strides, dtypes, all but tensors.

    Args:
        func: An overload of an operator.
        args: Its arguments; every tensor is on `meta`.
        kwargs: Keyword arguments of the operator.
    """
    return func, torch.get_default_dtype(), _form(args), _form((*kwargs, *kwargs.values()))


def _form(x: Any) -> Hashable:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    if isinstance(x, list | tuple):
        return tuple(map(_form, x))
    return type(x), x  # 1, 1.0 and True are equal


def made_of(out: Any, given: list[Tensor], cost: Cost) -> Made | None:
    """Describe what an operator returned; None if it is more than new tensors.

    Args:
        out: What it returned.
        given: The tensors that it was given.
        cost: What it asked of the device.
    """
    kind = type(out)
    results = out if kind in (list, tuple) else (out,)
    tensors = [x for x in results if isinstance(x, Tensor)]
    before = {storage_key(x.untyped_storage()) for x in given}
    after = {storage_key(x.untyped_storage()) for x in tensors}
    if (
        len(after - before) < len(tensors)
        or any(x.is_complex() for x in (*tensors, *given))  # may say that it is conjugated
        or not all(map(_is_whole, tensors))
        or not all(isinstance(x, Tensor | int | float | None) for x in results)
    ):
        return None
    parts = ((x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in results)
    return Made(kind, tuple(parts), cost)


def _is_whole(x: Tensor) -> bool:
    """Tell whether a tensor is what `torch.empty_strided` would make, to the byte."""
    if type(x) is not Tensor or not is_meta(x) or x.layout != torch.strided or x.requires_grad:
        return False
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    num_bytes = (last + 1) * x.itemsize if x.numel() else 0
    return not x.storage_offset() and x.untyped_storage().nbytes() == num_bytes
