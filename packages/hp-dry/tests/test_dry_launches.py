"""Kernels per operator are those that torch's CUDA sources launch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp  # registers operators
import torch.nn.attention.varlen  # likewise

from hp_dry.operators.launches import _TABLE, num_kernels

aten = torch.ops.aten


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_views_and_allocations_launch_nothing() -> None:
    x = meta(4, 8)
    assert num_kernels(aten.view.default, (x, [32])) == 0
    assert num_kernels(aten.t.default, (x,)) == 0
    assert num_kernels(aten._unsafe_view.default, (x, [32])) == 0
    assert num_kernels(aten.empty.memory_format, ([4, 8],)) == 0
    assert num_kernels(aten.detach.default, (x,)) == 0


def test_an_operator_that_is_not_listed_is_one_kernel() -> None:
    assert num_kernels(aten.tril.default, (meta(8, 8),)) == 1
    assert num_kernels(aten.silu.default, (meta(8, 8),)) == 1


def test_nothing_is_launched_for_no_elements() -> None:
    assert num_kernels(aten.silu.default, (meta(0, 8),)) == 0
    assert num_kernels(aten.mm.default, (meta(0, 8), meta(8, 0))) == 0
    assert num_kernels(aten.zeros.default, ([3],)) == 1


@pytest.mark.parametrize(("gib", "kernels"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 4), (9, 8)])
def test_an_operand_that_32_bits_do_not_address_is_halved(gib: int, kernels: int) -> None:
    x = meta(gib, 2**28)
    assert num_kernels(aten.add.Tensor, (x, x)) == kernels
    assert num_kernels(aten.copy_.default, (x, x)) == kernels


def test_a_long_reduction_zeroes_its_semaphores() -> None:
    bias = meta(8192, 4096)
    assert num_kernels(aten.sum.dim_IntList, (bias, [0])) == 2
    assert num_kernels(aten.sum.dim_IntList, (bias, [-1])) == 1
    assert num_kernels(aten.sum.default, (bias,)) == 2
    assert num_kernels(aten.sum.default, (meta(100),)) == 1
    assert num_kernels(aten.linalg_vector_norm.default, (bias,)) == 2
    assert num_kernels(aten.linalg_vector_norm.default, (bias, 2, [1])) == 1


def test_a_reduction_in_another_dtype_casts_first() -> None:
    x, double = meta(100), {"dtype": torch.float64}
    assert num_kernels(aten.sum.default, (x,), double) == 2
    assert num_kernels(aten.linalg_vector_norm.default, (x,), double) == 2
    assert num_kernels(aten.sum.default, (x.bool(),)) == 2
    assert num_kernels(aten.sum.default, (x.bfloat16(),), {"dtype": torch.float32}) == 1


def test_foreach_operators_launch_when_tensors_or_chunks_are_full() -> None:
    small = [meta(10) for _ in range(771)]
    assert num_kernels(aten._foreach_mul_.Scalar, (small, 2.0)) == 2
    assert num_kernels(aten._foreach_mul_.Scalar, (small[:770], 2.0)) == 1
    assert num_kernels(aten._foreach_mul.Scalar, (small, 2.0)) == 2  # depth 2: 448 tensors
    assert num_kernels(aten._foreach_add_.List, (small[:449], small[:449])) == 2
    large = [meta(65_536 * 2240 + 1)]
    assert num_kernels(aten._foreach_zero_.default, (large,)) == 2
    assert num_kernels(aten._foreach_zero_.default, ([meta(65_536 * 2240)],)) == 1
    assert num_kernels(aten._foreach_zero_.default, ([meta(0), meta(3)],)) == 1


def test_a_launch_that_blocks_cut_keeps_the_tensor_as_its_first() -> None:
    # Chunks of the first fill a launch and leave one: it and 769 others are the second launch.
    cut = [meta(65_536 * 2240 + 1), *[meta(1) for _ in range(769)]]
    assert num_kernels(aten._foreach_zero_.default, (cut,)) == 2
    assert num_kernels(aten._foreach_zero_.default, ([*cut, meta(1)],)) == 3


def test_fused_adamw_launches_by_chunks_of_all_parameters() -> None:
    parameters = [meta(65_536 * 100) for _ in range(45)]  # 4500 chunks
    lists = (parameters, parameters, parameters, parameters)
    assert num_kernels(aten._fused_adamw_.default, (*lists, [], [])) == 3
    assert num_kernels(aten._fused_adamw_.default, (*lists, parameters, [])) == 3
    many = [meta(8) for _ in range(253)]
    assert num_kernels(aten._fused_adamw_.default, (many, many, many, many, [], [])) == 2


def test_the_norm_of_many_tensors_is_three_kernels() -> None:
    assert num_kernels(aten._foreach_norm.Scalar, ([meta(10) for _ in range(100)],)) == 3


def test_attention_backward_with_fewer_heads_of_keys_adds_them_up() -> None:
    q, k = meta(1, 32, 128, 64), meta(1, 8, 128, 64)
    backward = aten._scaled_dot_product_flash_attention_backward.default
    assert num_kernels(aten._scaled_dot_product_flash_attention.default, (q, q, q)) == 1
    assert num_kernels(backward, (q, q, q, q)) == 3
    assert num_kernels(backward, (q, q, k, k)) == 5


def test_sort_topk_and_cumsum() -> None:
    assert num_kernels(aten.sort.default, (meta(128, 64), -1)) == 4
    keys = meta(1 << 20, dtype=torch.int64)
    assert num_kernels(aten.sort.default, (keys,)) == 1 + 2 + 8
    assert num_kernels(aten.sort.stable, (keys,), {"stable": True, "dim": 0}) == 1 + 2 + 8
    assert num_kernels(aten.topk.default, (meta(4096, 128), 8, -1)) == 2
    assert num_kernels(aten.topk.default, (meta(4096, 128), 8, -1, True, False)) == 1
    assert num_kernels(aten.cumsum.default, (meta(4096), 0)) == 2
    assert num_kernels(aten.cumsum.default, (meta(4096, 16), 0)) == 1


def test_index_put_that_accumulates_sorts() -> None:
    x, index = meta(1000, 64), meta(8192, dtype=torch.int64)
    values = meta(8192, 64)
    assert num_kernels(aten.index_put_.default, (x, [index], values)) == 1
    sorted_ones = num_kernels(aten.index_put_.default, (x, [index], values, True))
    assert sorted_ones == 3 + (2 + 2) + 1
    assert num_kernels(aten.index_put.default, (x, [index], values, True)) == sorted_ones + 1
    mask = meta(1000, dtype=torch.bool)
    assert num_kernels(aten.index.Tensor, (x, [index])) == 1
    assert num_kernels(aten.index.Tensor, (x, [mask])) == 6


def test_the_gradient_of_an_embedding_sorts_above_3072_tokens() -> None:
    few, many = meta(3072, dtype=torch.int64), meta(3073, dtype=torch.int64)
    backward = aten.embedding_dense_backward.default
    assert num_kernels(backward, (meta(3072, 64), few, 151_936, -1, False)) == 2
    assert num_kernels(backward, (meta(3073, 64), many, 151_936, -1, False)) == 1 + 5 + 9


def test_cat_takes_128_inputs_at_once() -> None:
    parts = [meta(4, 8) for _ in range(129)]
    assert num_kernels(aten.cat.default, (parts,)) == 2
    assert num_kernels(aten.cat.default, (parts[:128],)) == 1
    assert num_kernels(aten.cat.default, ([meta(8, 4).t() for _ in range(65)],)) == 2
    assert num_kernels(aten.cat.default, ([meta(4, 8), meta(4, 8, dtype=torch.float16)],)) == 2


def test_what_is_not_in_place_copies_first() -> None:
    x, index = meta(8, 8), meta(8, 8, dtype=torch.int64)
    assert num_kernels(aten.scatter_add.default, (x, 0, index, x)) == 2
    assert num_kernels(aten.scatter_add_.default, (x, 0, index, x)) == 1
    assert num_kernels(aten.masked_fill.Scalar, (x, x, 0.0)) == 2
    assert num_kernels(aten.masked_fill_.Scalar, (x, x, 0.0)) == 1


def test_the_table_names_operators_that_torch_has() -> None:
    missing = []
    for name in _TABLE:
        namespace, operator = name.split(".")[:2]
        if not hasattr(getattr(torch.ops, namespace), operator):
            missing.append(name)
    assert missing == []
