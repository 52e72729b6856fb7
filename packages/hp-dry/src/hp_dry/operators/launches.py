"""Number of kernels that CUDA launches for an operator: a table, with the source of each line.

Kernels, copies and fills of memory count alike, since the host submits each of them to a stream.
The numbers are from torch's sources (paths below are in `aten/src/ATen/native/cuda` unless they
begin elsewhere) for contiguous operands. Libraries that choose by measuring (cuBLAS, cuDNN) count
as their usual choice. An operator that is not listed counts as 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from hp_dry._internals import Arguments, Keywords, Operator
from hp_dry.operators.results import MASKS, cast_input
from hp_dry.recording.tensors import tensors_in

Rule: TypeAlias = Callable[[Arguments, Keywords], int]
"""Counts kernels from the arguments of an operator."""

_INT32: Final = 2**31
_CHUNK: Final = 65_536
# Builds for CUDA 13 pass kernels arguments of 32 KB, older ones of 4 KB; a build without CUDA
# counts as one for 13, which is what torch's own wheels are.
_OLDER: Final = (torch.version.cuda or "13").startswith(("11.", "12."))
_BLOCKS: Final = 320 if _OLDER else 2_240
_TENSORS: Final = (110, 64, 48, 36, 30) if _OLDER else (770, 448, 336, 252, 210)
_MOST_WITH_SCALARS: Final = 96 if _OLDER else 672
_NORMS: Final = 480
_CAT_INPUTS: Final = 128
_SMALL_SORT: Final = 4_096
_ONE_TILE: Final = 2_048
_FULL_SORT_SEGMENTS: Final = 128
_FULL_SORT_LENGTH: Final = 1_000_000
_EMBEDDING_ATOMIC: Final = 3_072
_GLOBAL_REDUCE_VALUES: Final = 256
_GLOBAL_REDUCE_OUTPUTS: Final = 16_384

OVERWRITES: Final = frozenset(
    f"aten::{name}"
    for name in (
        "_foreach_zero_",
        "_foreach_copy_",
        "copy_",
        "exponential_",
        "fill_",
        "normal_",
        "random_",
        "uniform_",
        "zero_",
    )
)
"""Operators that write an argument and do not read it."""

GATHERS: Final = frozenset(("aten::embedding", "aten::gather", "aten::index", "aten::index_select"))
"""Operators that read no more of their first argument than they return."""


def num_kernels(
    func: Operator,
    args: Arguments,
    kwargs: Keywords | None = None,
) -> int:
    """Count the kernels, copies and fills that an operator launches on CUDA.

    Args:
        func: Overload of an operator, such as `torch.ops.aten.mm.default`.
        args: Positional arguments of the call; only shapes, strides and dtypes are used.
        kwargs: Keyword arguments of the call.

    Returns:
        0 for views, allocations and operators whose tensors are all empty.
    """
    rule = _rule(func)
    tensors = tensors_in(*args)
    if rule == 0 or (tensors and not any(tensor.numel() for tensor in tensors)):
        return 0
    return rule if isinstance(rule, int) else rule(args, kwargs or {})


def is_silent(func: Operator) -> bool:
    """Tell whether an operator launches nothing on CUDA for any arguments."""
    return _rule(func) == 0


_IN_PLACE = {torch.ops.aten.addmm_: torch.ops.aten.addmm}  # torch counts no operations for it


def flops_of(func: Operator) -> Callable[..., int] | None:
    """Return the function that counts the flops of an operator in torch's flop counter, or None."""
    if func.name() == "aten::_grouped_mm":  # torch counts none
        return _grouped_flops
    if func.name().startswith(_OF_SEGMENTS):
        return _flops_of_segments
    packet = _IN_PLACE.get(func.overloadpacket, func.overloadpacket)
    counted: Callable[..., int] | None = flop_registry.get(packet)
    if counted is None or "_scaled_dot_product_" not in func.name():
        return counted
    first = 1 if "backward" in func.name() else 0  # of query, key and value

    def count(*args: Any, **kwargs: object) -> int:
        q, k, v = args[first : first + 3]
        if k.shape[1] != q.shape[1]:  # torch 2.11 counts none for heads that are shared
            k, v = (x[:, :1].expand(-1, q.shape[1], -1, -1) for x in (k, v))
        return counted(*args[:first], q, k, v, *args[first + 3 :], **kwargs)

    return count


def _grouped_flops(a: Tensor, b: Tensor, *_: object, **__: object) -> int:
    """Count products in groups: rows [R, D] by [E, D, F], or [D, R] by [R, F] in E runs of R."""
    return 2 * a.numel() * b.shape[-1]


_OF_SEGMENTS: Final = ("aten::_flash_attention_", "torch_attn::_varlen_attn")
"""Beginnings of names of operators whose arguments include the starts of segments."""


def _flops_of_segments(*args: Any, **_: object) -> int:
    """Count as if every segment had as many keys as the longest segment.

    The lengths of segments are on the device. torch counts as many queries per segment, too.
    """
    backward = isinstance(args[5], Tensor)
    (q, k, v), others = (args[1:4], args[6:]) if backward else (args[:3], args[3:])
    starts, _, _, longest = others[:4]
    if starts is None:
        batch, rows, heads, size = q.shape
        longest = k.shape[1]
    else:
        batch, (rows, heads, size) = 1, q.shape
    shape, keys = (batch, heads, rows, size), (batch, heads, longest, size)
    values = (*keys[:3], v.shape[-1])
    if backward:
        return int(sdpa_backward_flop_count((*shape[:3], v.shape[-1]), shape, keys, values))
    return int(sdpa_flop_count(shape, keys, values))


@cache
def _rule(func: Operator) -> int | Rule:
    full = str(func)
    name = full.rpartition(".")[0]
    if (known := _TABLE.get(full, _TABLE.get(name))) is not None:
        return known
    if func.is_view or name.startswith(_WITHOUT):
        return 0
    if name.startswith("aten._foreach_"):
        return _foreach_rule(full)
    return _elements if torch.Tag.pointwise in func.tags else 1


def _given(args: Arguments, kwargs: Keywords, at: int, name: str) -> Any:
    """Return an argument by place or name; None if it was left out."""
    return args[at] if len(args) > at else kwargs.get(name)


# TensorIterator halves an operand until 32 bits address it: Loops.cuh, Reduce.cuh.


def _elements(args: Arguments, _kwargs: Keywords) -> int:
    """Count one kernel, or as many as split every operand into parts of at most 2 GiB."""
    largest = max((each.numel() * each.element_size() for each in tensors_in(*args)), default=0)
    return 1 << max(math.ceil(largest / _INT32) - 1, 0).bit_length()


def _copied_first(args: Arguments, kwargs: Keywords) -> int:
    """Count a copy of the first operand, then the operator in place."""
    return 2 * _elements(args, kwargs)


# Reduce.cuh, setReduceConfig: several blocks for one output need their semaphores zeroed first.


def _reduction(args: Arguments, kwargs: Keywords) -> int:
    operand = tensors_in(*args)[0]
    dims = _given(args, kwargs, 1, "dim")
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = [dims]
    reduced, innermost = operand.numel(), True
    if isinstance(dims, (list, tuple)) and dims and operand.dim():
        reduced = math.prod(operand.shape[dim] for dim in dims)
        innermost = operand.dim() - 1 in {dim % operand.dim() for dim in dims}
    outputs = operand.numel() // max(reduced, 1)
    threads = 512 if innermost else 16
    split = reduced >= _GLOBAL_REDUCE_VALUES * threads and outputs <= _GLOBAL_REDUCE_OUTPUTS
    return _elements(args, kwargs) + split


def _cast_reduction(args: Arguments, kwargs: Keywords) -> int:
    return _reduction(args, kwargs) + len(cast_input(args, kwargs))


# MultiTensorApply.cuh, ForeachFunctors.cuh, FusedAdamKernel.cu: a launch is full with `_TENSORS`
# tensors (by the number of lists) or with `_BLOCKS` chunks of 65,536 elements.


def _multi_tensor(tensors: Sequence[Tensor], depth: int, *, scalars: bool = False) -> int:
    most = _MOST_WITH_SCALARS if scalars and depth == 1 else _TENSORS[min(depth, 5) - 1]
    launches = blocks = held = 0
    for tensor in tensors:
        chunks = -(-tensor.numel() // _CHUNK)
        if not chunks:
            continue
        full, blocks = divmod(blocks + chunks, _BLOCKS)
        launches += full
        # A tensor that was cut stays in the next launch as its first.
        held = held + 1 if not full else int(blocks > 0)
        if held == most and blocks:
            launches, blocks, held = launches + 1, 0, 0
    return launches + (blocks > 0)


def _foreach_rule(full: str) -> Rule:
    name, _, overload = full.removeprefix("aten._foreach_").rpartition(".")
    scalars = overload.startswith("ScalarList")

    def rule(args: Arguments, _kwargs: Keywords) -> int:
        lists = [each for each in args if isinstance(each, (list, tuple)) and tensors_in(each)]
        depth = len(lists) + (not name.endswith("_"))
        return _multi_tensor(lists[0], depth, scalars=scalars)

    return rule


def _foreach_norm(args: Arguments, _kwargs: Keywords) -> int:
    """Count fills, partial norms and their sums per tensor (ForeachReduceOp.cu)."""
    return 1 + _multi_tensor(args[0], 1) + -(-len(args[0]) // _NORMS)


def _foreach_copy(args: Arguments, _kwargs: Keywords) -> int:
    """Count one launch for tensors of one pair of dtypes, or a copy each between layouts."""
    alike = {(a.dtype, b.dtype) for a, b in zip(args[0], args[1], strict=False)}
    same = all(a.stride() == b.stride() for a, b in zip(args[0], args[1], strict=False))
    return _multi_tensor(args[0], 2) if same and len(alike) == 1 else len(args[0])


def _fused_adam(args: Arguments, kwargs: Keywords) -> int:
    return _multi_tensor(args[0], 5 if _given(args, kwargs, 4, "max_exp_avg_sqs") else 4)


# Shape.cu: so many inputs per launch, half as many where one is strided.


def _cat(args: Arguments, _kwargs: Keywords) -> int:
    parts = [each for each in args[0] if each.numel()]
    if not parts:
        return 0
    if len({each.dtype for each in parts}) > 1 or parts[0].dim() > 4:
        return len(parts)
    per_launch = _CAT_INPUTS if all(each.is_contiguous() for each in parts) else _CAT_INPUTS // 2
    return -(-len(parts) // per_launch)


# cub/device/device_radix_sort: one block for few keys; else a histogram, a scan, and 8 bits a pass.


def _radix_sort(num_keys: int, bits: int) -> int:
    return 1 if num_keys <= _ONE_TILE else 2 + -(-bits // 8)


def _bits(largest: int) -> int:
    return max(largest, 1).bit_length()


# Sort.cpp, Sort.cu, SortStable.cu: short rows are copied with their indices and sorted in place.


def _sort(args: Arguments, kwargs: Keywords) -> int:
    keys: Tensor = args[0]
    if keys.dim() == 0:
        return 2
    dim = next((each for each in args[1:3] if type(each) is int), kwargs.get("dim", -1))
    length = keys.shape[dim]
    if length <= _SMALL_SORT:
        return 4
    segments = keys.numel() // length
    bits = 8 * keys.element_size()
    if segments == 1 or length >= _FULL_SORT_LENGTH:
        return 1 + segments * _radix_sort(length, bits)
    if segments < _FULL_SORT_SEGMENTS:
        return 2 + _radix_sort(keys.numel(), bits) + _radix_sort(keys.numel(), _bits(segments))
    return 1 + -(-bits // 8)


def _topk(args: Arguments, kwargs: Keywords) -> int:
    """Count the selection (TensorTopK.cu), then the sort."""
    return 2 if args[1] > 1 and _given(args, kwargs, 4, "sorted") is not False else 1


def _scan(args: Arguments, _kwargs: Keywords) -> int:
    """Count CUB's scan of one row, which prepares its tiles first, or torch's of several rows."""
    values: Tensor = args[0]
    return 2 if values.dim() == 0 or values.numel() == values.shape[args[1]] else 1


# Indexing.cu.


def _index(args: Arguments, _kwargs: Keywords) -> int:
    """Count the kernels of an index, with those that convert masks to indices first."""
    return 1 + _NONZERO * sum(each is not None and each.dtype in MASKS for each in args[1])


def _index_put(args: Arguments, kwargs: Keywords) -> int:
    written = _index(args, kwargs)
    if not _given(args, kwargs, 3, "accumulate"):
        return written
    indices = [each for each in args[1] if each is not None]
    num_keys = max((each.numel() for each in indices), default=0)
    # Rows as one number (a remainder, and a product and a sum per further index), and the order of
    # the sorted ones; then equal ones are added.
    prepared = 1 + 2 * (len(indices) - 1) + 2
    return prepared + _radix_sort(num_keys, _bits(args[0].numel())) + written


# Embedding.cu, EmbeddingBackwardKernel.cu: atomic additions up to 3072 tokens, sorted ones above.


def _embedding_backward(args: Arguments, _kwargs: Keywords) -> int:
    num_tokens, num_rows = args[1].numel(), args[2]
    small = num_tokens <= _EMBEDDING_ATOMIC
    return 2 if small else 1 + _radix_sort(num_tokens, _bits(num_rows)) + 9


# transformers/cuda/attention_backward.cu: fewer heads of keys are expanded and added up again.


def _flash_backward(heads: int) -> Rule:
    """Return the rule of a backward whose query and key have their heads in this dim."""
    return lambda args, _: 3 if args[1].shape[heads] == args[2].shape[heads] else 5


def _two_sums(args: Arguments, _kwargs: Keywords) -> int:
    """Count the input, then weight and bias, in parts for many rows (layer_norm_kernel.cu)."""
    return 2 if args[1].numel() // max(math.prod(args[2]), 1) <= 64 * 1024 else 4


_NONZERO: Final = 5
"""Kernels of Nonzero.cu: the count (two), its copy, and the selection (two)."""

_WITHOUT: Final = (
    "aten.empty",
    "aten.new_empty",
    "aten.resize",
    "aten.set_",
    "aten.sym_",
    "aten.record_stream",
    "aten.is_",
    "aten.lift_fresh",
    "aten.detach",
    "aten.alias",
    "aten._version",
    "prim.",
    "profiler.",
    "_c10d_functional.",
    "c10d.",
)
"""Beginnings of names of operators that only read shapes, allocate, or do not run on CUDA."""

_TABLE: Final[dict[str, int | Rule]] = {
    # Shapes only, though not declared as views.
    "aten._unsafe_view": 0,
    "aten._reshape_alias": 0,
    "aten.equal": 3,  # compared, reduced, copied to the host
    "aten.is_nonzero": 1,
    "aten._local_scalar_dense": 1,  # a copy to the host
    # Copy.cu: a copy engine or one kernel. BinaryOps, Fill, Distributions: one kernel.
    "aten.copy_": _elements,
    "aten.clone": _elements,
    "aten._to_copy": _elements,
    # blas: one product; a bias is an epilogue of cublasLt, another addend is copied first.
    "aten.mm": 1,
    "aten.bmm": 1,
    "aten.addmm": 1,
    "aten.addmm_": 1,
    "aten.baddbmm": 2,
    "aten.addbmm": 2,
    "aten.addmv": 2,
    "aten.dot": 2,
    "aten.mv": 1,
    "aten._scaled_mm": 1,
    "aten._grouped_mm": 2,  # GroupedBlas.cpp: pointers of the products are written first
    "aten._scaled_grouped_mm": 2,
    # Convolution through cuDNN: the product, the bias; weight, input and bias backward.
    "aten.convolution": 2,
    "aten.convolution_backward": 3,
    # transformers/cuda/attention.cu.
    "aten._scaled_dot_product_flash_attention": 1,
    "aten._scaled_dot_product_flash_attention_backward": _flash_backward(-3),
    "aten._flash_attention_forward": 1,
    "aten._flash_attention_backward": _flash_backward(-2),
    "torch_attn._varlen_attn": 1,
    "torch_attn._varlen_attn_backward": _flash_backward(-2),
    "aten._scaled_dot_product_efficient_attention": 1,
    "aten._scaled_dot_product_efficient_attention_backward": 2,
    "aten._efficient_attention_forward": 1,
    "aten._efficient_attention_backward": 2,
    "aten._scaled_dot_product_cudnn_attention": 1,
    "aten._scaled_dot_product_cudnn_attention_backward": 3,
    # SoftMax.cu, Loss.cu, NLLLoss2d.cu: the gradient of the loss is zeroed first.
    "aten._softmax": 1,
    "aten._log_softmax": 1,
    "aten.nll_loss_forward": 1,
    "aten.nll_loss_backward": 2,
    "aten.logsumexp": 9,  # ReduceOps.cpp composes it
    # layer_norm_kernel.cu, group_norm_kernel.cu, Normalization.cu.
    "aten.native_layer_norm": 1,
    "aten.native_layer_norm_backward": _two_sums,
    "aten._fused_rms_norm": 1,
    "aten._fused_rms_norm_backward": _two_sums,
    "aten.native_group_norm": 3,
    "aten.native_group_norm_backward": 4,
    # Embedding.cu, Indexing.cu, ScatterGatherKernel.cu: what is not in place copies first.
    "aten.embedding": 1,
    "aten.embedding_dense_backward": _embedding_backward,
    "aten.index": _index,
    "aten._unsafe_index": _index,
    "aten.index_put_": _index_put,
    "aten._index_put_impl_": _index_put,
    "aten.index_put": lambda args, kwargs: 1 + _index_put(args, kwargs),
    "aten._unsafe_index_put": lambda args, kwargs: 1 + _index_put(args, kwargs),
    "aten.index_add": 2,
    "aten.index_copy": 2,
    "aten.index_fill": 2,
    "aten.scatter": 2,
    "aten.scatter_add": 2,
    "aten.scatter_reduce": 2,
    "aten.masked_fill": _copied_first,
    "aten.masked_scatter": 4,
    "aten.masked_select": 1 + _NONZERO,
    "aten.nonzero": _NONZERO,
    "aten.repeat_interleave": 4,
    "aten.slice_backward": _copied_first,
    "aten.select_backward": _copied_first,
    "aten.slice_scatter": _copied_first,
    "aten.select_scatter": _copied_first,
    "aten.constant_pad_nd": _copied_first,
    # Reduce.cuh.
    "aten.sum": _cast_reduction,
    "aten.mean": _cast_reduction,
    "aten.prod": _cast_reduction,
    "aten.amax": _reduction,
    "aten.amin": _reduction,
    "aten.max": _reduction,
    "aten.min": _reduction,
    "aten.argmax": _reduction,
    "aten.argmin": _reduction,
    "aten.all": _reduction,
    "aten.any": _reduction,
    "aten.var": _reduction,
    "aten.std": _reduction,
    "aten.var_mean": _reduction,
    "aten.linalg_vector_norm": lambda args, kwargs: _cast_reduction(
        (args[0], _given(args, kwargs, 2, "dim")), {"dtype": kwargs.get("dtype")}
    ),
    "aten.count_nonzero": 2,
    # Sort.cpp, TensorTopK.cu, ScanKernels.cpp, SummaryOps.cu, Unique.cu, Randperm.cu.
    "aten.sort": _sort,
    "aten.topk": _topk,
    "aten.cumsum": _scan,
    "aten.cumsum_": _scan,
    "aten.cumprod": _scan,
    "aten.logcumsumexp": _scan,
    "aten.bincount": 6,
    "aten.histc": 4,
    "aten._unique2": 12,
    "aten.randperm": 6,
    "aten.multinomial": 6,
    # Shape.cu; FSDP's own operators (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
    "aten.cat": _cat,
    "aten.stack": _cat,
    "aten._chunk_cat": 2,
    "fsdp.chunk_cat": 2,
    "fsdp.all_gather_copy_in": 1,
    "aten.split_with_sizes_copy": 2,
    "fsdp.split_with_sizes_copy": 2,
    # ForeachReduceOp.cu, ForeachBinaryOpList.cu, Fused*Kernel.cu.
    "aten._foreach_norm": _foreach_norm,
    "aten._foreach_copy_": _foreach_copy,
    "aten._fused_adam_": _fused_adam,
    "aten._fused_adamw_": _fused_adam,
    "aten._fused_sgd_": lambda args, kwargs: _multi_tensor(
        args[0], 3 if _given(args, kwargs, 2, "momentum_buffer_list") else 2
    ),
    "aten._fused_adagrad_": lambda args, _: _multi_tensor(args[0], 3),
}
