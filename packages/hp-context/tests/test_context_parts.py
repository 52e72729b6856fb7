"""Attention over keys that arrive in parts equals one process: rings, and gathers in strides.

Many cases share one launch of ranks. They go through the kinds of recomputation in turn.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, product
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_context import (
    AsyncContextParallel,
    Attention,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Mask,
    PositionMask,
    SequenceLayout,
    SlidingWindow,
    masked_attention,
    shard_sequence,
    unshard_sequence,
)
from hp_platform.pending import release_completed
from hp_platform.testing import run_distributed

pytestmark = pytest.mark.usefixtures("one_thread")

Way = Literal["ring", "strides", "gather"]
Parallels = dict[tuple[Way, int, SequenceLayout], ContextParallel]


@dataclass(frozen=True)
class Case:
    way: Way
    degree: int
    mask: Mask
    layout: SequenceLayout
    heads: tuple[int, int] = (4, 2)
    recompute: str = "none"
    seq: int = 48
    value_size: int = 8
    dtype: torch.dtype = torch.float64


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lonely(query: Tensor, key: Tensor) -> Tensor:
    """Queries 5, 12, 19, ... see nothing."""
    return (query % 7 != 5) & ((query + key) % 3 != 0)


MASKS = [
    Full(),
    Causal(),
    SlidingWindow(5),
    SlidingWindow(3, 2),
    SlidingWindow(9) & Documents((20, 28)),
    Causal() & Documents((1, 7, 3, 13, 24)),
    Documents((5, 30, 13)),
    PositionMask(lonely),
    Causal() & PositionMask(lonely),
]
LAYOUTS = [Contiguous(), HeadTail()]
RECOMPUTE = ["none", "reentrant", "saved"]


def inputs(case: Case) -> list[Tensor]:
    """Whole q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(case.seq)
    heads, kv_heads = case.heads
    shapes = [(heads, 8), (kv_heads, 8), (kv_heads, case.value_size), (heads, case.value_size)]
    return [
        torch.randn(2, case.seq, *shape, dtype=torch.float64, generator=generator).to(case.dtype)
        for shape in shapes
    ]


def alone(case: Case) -> list[Tensor]:
    *qkv, grad = inputs(case)
    leaves = [x.requires_grad_() for x in qkv]
    out = masked_attention(leaves[0], leaves[1], leaves[2], mask=case.mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def make(case: Case) -> ContextParallel:
    if case.way == "strides":
        return AsyncContextParallel(case.degree, layout=case.layout, overlap=True)
    return ContextParallel(case.degree, ring=case.way == "ring", layout=case.layout)


def mine(case: Case, parallels: Parallels) -> list[Tensor]:
    """Output and gradients of this rank."""
    parallel = parallels.setdefault((case.way, case.degree, case.layout), make(case))
    core = parallel.apply(Attention(case.mask), world())
    *qkv, grad = (shard_sequence(x, world(), layout=case.layout) for x in inputs(case))
    leaves = [x.requires_grad_() for x in qkv]
    if case.recompute == "none":
        out = core(*leaves)
    else:
        out = checkpoint(core, *leaves, use_reentrant=case.recompute == "reentrant")
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def split(cases: list[Case]) -> list[list[Tensor]]:
    parallels: Parallels = {}
    parts = [(case, mine(case, parallels)) for case in cases]
    assert release_completed() == 0
    return [[unshard_sequence(x, world(), layout=case.layout) for x in xs] for case, xs in parts]


def errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    pairs = zip(actual, expected, strict=True)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def assert_equal(cases: list[Case], *, ranks: int, bound: float = 1e-12) -> None:
    expected = [alone(case) for case in cases]
    for results in run_distributed(split, cases, world_size=ranks, timeout=300):
        for case, whole, single in zip(cases, results, expected, strict=True):
            assert max(errors(whole, single)) <= bound, case


WAYS: dict[int, list[tuple[Way, int]]] = {
    2: [("ring", 1), ("strides", 1)],
    3: [("ring", 1), ("strides", 1)],
    4: [("ring", 1), ("ring", 2), ("strides", 1), ("strides", 2)],
    8: [("ring", 1), ("ring", 2), ("ring", 4), ("strides", 2)],
}
RATIOS = {2: [(4, 4), (4, 2), (3, 1)], 3: [(4, 4), (4, 2), (3, 1)], 4: [(4, 4), (4, 2), (4, 1)]}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_outputs_and_gradients_equal_one_process(ranks: int) -> None:
    kinds = cycle(RECOMPUTE)
    ratios = RATIOS.get(ranks, [(8, 2)])
    grid = product(WAYS[ranks], MASKS, LAYOUTS, ratios)
    cases = [
        Case(way, degree, mask, layout, heads, next(kinds))
        for (way, degree), mask, layout, heads in grid
    ]
    assert_equal(cases, ranks=ranks)
