"""A whole sequence is attended by blocks where its mask leaves most pairs of positions out."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from hp_context import (
    Attention,
    Causal,
    ContextParallel,
    Documents,
    Full,
    Mask,
    PositionMask,
    SlidingWindow,
    mask_tensor,
    masked_attention,
    shard_sequence,
    unshard_sequence,
)
from hp_context.attention.softmax import blocks_pay, whole_plan
from hp_platform.testing import run_distributed, watch_operators

pytestmark = pytest.mark.usefixtures("one_thread")


LONG = [
    Causal() & Documents((100, 70, 2, 3, 145, 192)),
    Documents((200, 312)),
    SlidingWindow(63),
    SlidingWindow(40, 10) & Documents((300, 212)),
]


def inputs(seq: int, *, dtype: torch.dtype = torch.float64, heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, seq, n, 8, generator=generator, dtype=dtype) for n in (heads, 2, 2, heads)
    ]


def by_blocks(mask: Mask, *, dtype: torch.dtype = torch.float64, seq: int = 512) -> list[Tensor]:
    *qkv, grad = inputs(seq, dtype=dtype)
    leaves = [x.requires_grad_() for x in qkv]
    out = masked_attention(*leaves, mask=mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def by_mask_tensor(mask: Mask) -> list[Tensor]:
    *qkv, grad = inputs(512)
    leaves = [x.requires_grad_() for x in qkv]
    q, k, v = (x.transpose(1, 2) for x in leaves)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask_tensor(mask, 512), enable_gqa=True
    ).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("mask", LONG, ids=str)
def test_blocks_equal_the_mask_tensor(mask: Mask) -> None:
    assert blocks_pay(mask, 512, "cpu")
    for a, b in zip(by_blocks(mask), by_mask_tensor(mask), strict=True):
        assert error(a, b) <= 1e-13


def split(masks: list[Mask], dtype: torch.dtype) -> list[list[Tensor]]:
    group = dist.group.WORLD
    assert group is not None
    results = []
    for mask in masks:
        core = ContextParallel().apply(Attention(mask), group)
        *qkv, grad = (shard_sequence(x, group) for x in inputs(512, dtype=dtype))
        leaves = [x.requires_grad_() for x in qkv]
        out = core(*leaves)
        mine = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        results.append([unshard_sequence(x, group) for x in mine])
    return results


def test_ulysses_by_blocks_is_bit_equal_to_one_process() -> None:
    for results in run_distributed(split, LONG, torch.float32, world_size=2):
        for mask, whole in zip(LONG, results, strict=True):
            alone = by_blocks(mask, dtype=torch.float32)
            assert all(torch.equal(a, b) for a, b in zip(whole, alone, strict=True)), mask


@pytest.mark.parametrize("mask", LONG)
def test_blocks_return_the_dtype_of_autocast(mask: Mask) -> None:
    *qkv, grad = (x.float() for x in inputs(512))
    leaves = [x.requires_grad_() for x in qkv]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = masked_attention(*leaves, mask=mask)
        exact = by_blocks(mask)
    assert out.dtype == torch.bfloat16
    assert [x.dtype for x in exact] == [torch.float64] * 4  # autocast leaves it alone
    narrow = [out.detach(), *torch.autograd.grad(out, leaves, grad.bfloat16())]
    for a, b in zip(narrow, exact, strict=True):
        assert error(a.double(), b) <= 4e-2


def largest(mask: Mask, seq: int) -> int:
    """Elements of the largest tensor that any operator of forward and backward takes."""
    sizes = [0]

    def see(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        del name
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        sizes.extend(x.untyped_storage().nbytes() // x.element_size() for x in tensors)

    with watch_operators(see):
        by_blocks(mask, seq=seq)
    return max(sizes)


def test_packed_documents_make_no_tensor_of_all_pairs() -> None:
    """16 documents of 128: the largest tensor is q, as it would be without a mask."""
    seq = 2048
    q_elements = seq * 4 * 8
    assert largest(Causal() & Documents((128,) * 16), seq) == q_elements
    assert largest(SlidingWindow(100), seq) == q_elements
    assert largest(PositionMask(lambda query, key: key <= query), seq) == seq**2


@pytest.mark.parametrize(
    ("mask", "seq", "pays"),
    [
        (Causal() & Documents((1024,) * 16), 16384, True),
        (SlidingWindow(1024), 16384, True),
        (Causal() & Documents((8,) * 8), 64, False),
        (PositionMask(lambda query, key: key <= query), 1024, False),
        (Full() & Causal(), 1024, True),
    ],
)
def test_the_work_decides(mask: Mask, seq: int, pays: bool) -> None:
    assert blocks_pay(mask, seq, "cpu") is pays


def test_a_gpu_wants_larger_blocks() -> None:
    mask = SlidingWindow(64)
    assert blocks_pay(mask, 1024, "cpu")
    assert not blocks_pay(mask, 1024, "cuda")
    assert blocks_pay(SlidingWindow(1024), 16384, "cuda")


class Growing(Mask):
    """A window whose width somebody changes between calls."""

    width = 10

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        return (query - key).abs() <= self.width

    def visible(self, query: int) -> range:
        return range(max(0, query - self.width), query + self.width + 1)

    def query_cuts(self, run: range) -> set[int]:
        return set(run[64::64])


def test_a_mask_that_changes_is_planned_anew() -> None:
    mask = Growing()
    for mask.width in (10, 60, 30):
        assert blocks_pay(mask, 512, "cpu")
        for a, b in zip(by_blocks(mask), by_mask_tensor(mask), strict=True):
            assert error(a, b) <= 1e-13


def test_plans_of_masks_that_cannot_change_are_remembered() -> None:
    mask = Causal() & Documents((32, 32))
    assert whole_plan(mask, 64) is whole_plan(Causal() & Documents((32, 32)), 64)
