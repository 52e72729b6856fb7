"""Tensors of an operator: results for operands of one form, and buffers while it runs.

Much of torch computes shapes in Python, and a step asks for the same shapes thousands of times: so
results are worked out once for operands of one form.

Buffers are known of flash attention of variable lengths, backward: from torch's copy of flash
attention 2 (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_varlen_bwd`),
which sums the gradient of queries in float32, and that of shared key/value heads once for every
query head. They are also known of reductions in a dtype that their input does not have: these cast
all of it first, except a half type into float32 (`make_reduction` of
aten/src/ATen/native/ReduceOpsUtils.h).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from hp_dry._internals import Arguments, Keywords, Operator, is_meta, storage_key

META = torch.device("meta")
MASKS = (torch.bool, torch.uint8)
"""Dtypes of indices that are masks."""
Buffer: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a buffer."""

_TILE: Final = 128  # rows that every segment may be rounded up by
_SIZE_MULTIPLE: Final = 32
_LARGE_HEAD: Final = 192


class Cost(NamedTuple):
    """Work of the device for an operator.

    Attributes:
        num_kernels: Kernels, copies and fills that are launched.
        flops: Operations on numbers, by torch's flop counter.
    """

    num_kernels: int
    flops: int


@dataclass(frozen=True, slots=True)
class Made:
    """Results of an operator for operands of one form.

    Attributes:
        kind: `list` or `tuple` of results; `Tensor` for a single tensor.
        parts: Shape, strides and dtype of each tensor; other results as they are.
        cost: Work of the device.
    """

    kind: type
    parts: tuple[object, ...]
    cost: Cost

    def again(self) -> object:
        """Make new tensors on `meta`."""
        made = [
            torch.empty_strided(each[0], each[1], dtype=each[2], device=META)
            if isinstance(each, tuple)
            else each
            for each in self.parts
        ]
        return made[0] if self.kind is Tensor else self.kind(made)


def form_of(func: Operator, args: Arguments, kwargs: Keywords) -> Hashable:
    """Return the facts that determine the results of an operator: its arguments without values.

    Args:
        func: Overload of an operator.
        args: Positional arguments of the operator; every tensor is on `meta`.
        kwargs: Keyword arguments of the operator.
    """
    return func, torch.get_default_dtype(), _form(args), _form((*kwargs, *kwargs.values()))


def _form(x: object) -> Hashable:
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype
    if isinstance(x, list | tuple):
        return tuple(map(_form, x))
    return type(x), x  # 1, 1.0 and True are equal


def made_of(out: object, given: list[Tensor], cost: Cost) -> Made | None:
    """Describe the results of an operator; return None unless they are new tensors or numbers.

    Args:
        out: Results of the operator.
        given: Tensors among its arguments.
        cost: Work of the device.
    """
    results = out if type(out) is list or type(out) is tuple else (out,)
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
    return Made(type(out), tuple(parts), cost)


def _is_whole(x: Tensor) -> bool:
    """Tell whether `torch.empty_strided` would make the same tensor, with as many bytes."""
    if type(x) is not Tensor or not is_meta(x) or x.layout != torch.strided or x.requires_grad:
        return False
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    num_bytes = (last + 1) * x.itemsize if x.numel() else 0
    return not x.storage_offset() and x.untyped_storage().nbytes() == num_bytes


def _flash_backward(args: Arguments, _kwargs: Keywords) -> list[Buffer]:
    q, k, starts = args[1], args[2], args[6]
    if starts is None:
        return []  # equal lengths: its buffers are not counted
    num_rows, heads, size = q.shape
    rounded = -(-size // _SIZE_MULTIPLE) * _SIZE_MULTIPLE if size <= _LARGE_HEAD else 256
    num_rows += _TILE * (starts.numel() - 1)
    buffers: list[Buffer] = [
        ((heads, num_rows), torch.float32),
        ((num_rows, heads, rounded), torch.float32),
    ]
    if k.shape[1] != heads:
        buffers += [((k.shape[0], heads, size), k.dtype)] * 2
    return buffers


def cast_input(args: Arguments, kwargs: Keywords) -> list[Buffer]:
    """Size the copy that a reduction such as a sum makes of its input before reading it."""
    x, dtype = args[0], kwargs.get("dtype")
    if dtype is None and not (x.is_floating_point() or x.is_complex()):
        dtype = torch.int64
    read_as_they_are = (torch.float16, torch.bfloat16) if dtype == torch.float32 else ()
    return [] if dtype in (None, x.dtype) or x.dtype in read_as_they_are else [(x.shape, dtype)]


WORKSPACES: Final[dict[str, Callable[[Arguments, Keywords], list[Buffer]]]] = {
    "aten::_flash_attention_backward": _flash_backward,
    "torch_attn::_varlen_attn_backward": _flash_backward,
    "aten::linalg_vector_norm": cast_input,
    "aten::mean": cast_input,
    "aten::prod": cast_input,
    "aten::sum": cast_input,
}
"""Functions that size the buffers of an operator, by its name without the overload."""
