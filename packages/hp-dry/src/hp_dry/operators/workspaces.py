"""Memory that an operator has while it runs, beside what it is given and makes.

Known of flash attention of variable lengths, backward: from torch's copy of flash attention 2
(aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_varlen_bwd`), which sums the
gradient of queries in float32 and that of shared key/value heads once for every query head. Known
of reductions in a dtype that their input does not have: they cast all of it first, but for a half
type into float32 (`make_reduction` of aten/src/ATen/native/ReduceOpsUtils.h).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

Buffer = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""

_TILE: Final = 128  # rows that every segment may be rounded up by
_SIZE_MULTIPLE: Final = 32
_LARGE_HEAD: Final = 192


def _flash_backward(args: Sequence[Any], _kwargs: Mapping[str, Any]) -> list[Buffer]:
    q, k, starts = args[1], args[2], args[6]
    if starts is None:
        return []  # a rectangle: what it has meanwhile is not counted
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


def cast_input(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Buffer]:
    """Size the copy that a reduction such as a sum makes of its input before reading it."""
    x, dtype = args[0], kwargs.get("dtype")
    if dtype is None and not (x.is_floating_point() or x.is_complex()):
        dtype = torch.int64
    read_as_they_are = (torch.float16, torch.bfloat16) if dtype == torch.float32 else ()
    return [] if dtype in (None, x.dtype) or x.dtype in read_as_they_are else [(x.shape, dtype)]


WORKSPACES: Final[dict[str, Callable[[Sequence[Any], Mapping[str, Any]], list[Buffer]]]] = {
    "aten::_flash_attention_backward": _flash_backward,
    "torch_attn::_varlen_attn_backward": _flash_backward,
    "aten::linalg_vector_norm": cast_input,
    "aten::mean": cast_input,
    "aten::prod": cast_input,
    "aten::sum": cast_input,
}
"""What gives the buffers of an operator from its arguments, by its name without the overload."""
