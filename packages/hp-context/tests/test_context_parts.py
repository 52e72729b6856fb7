"""Attention over keys that arrive in parts equals one process: rings, and gathers in strides.

Many cases share one launch of ranks. They go through the kinds of recomputation in turn.
"""

import os
from dataclasses import dataclass, replace
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
    OverlapRates,
    PositionMask,
    SequenceLayout,
    SlidingWindow,
    shard_sequence,
    unshard_sequence,
)
from hp_platform.collectives.pending import release_completed
from hp_platform.testing import run_distributed, watch_operators

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
    terms: bool = False


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
IN_ORDER = Contiguous()
LAYOUTS = [IN_ORDER, HeadTail()]
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


def attention(case: Case) -> Attention:
    if not case.terms:
        return Attention(case.mask)
    sinks = torch.linspace(-1, 2, case.heads[0], dtype=case.dtype)
    return Attention(case.mask, softcap=1.5, sinks=sinks)


def alone(case: Case) -> list[Tensor]:
    *qkv, grad = inputs(case)
    leaves = [x.requires_grad_() for x in qkv]
    core = attention(case)
    out = core(*leaves)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *core.parameters()], grad)]


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
    core = parallel.apply(attention(case), world())
    *qkv, grad = (shard_sequence(x, world(), layout=case.layout) for x in inputs(case))
    leaves = [x.requires_grad_() for x in qkv]
    if case.recompute == "none":
        out = core(*leaves)
    else:
        out = checkpoint(core, *leaves, use_reentrant=case.recompute == "reentrant")
    out.backward(grad)
    of_parameters = [x.grad for x in core.parameters() if x.grad is not None]
    for grad in of_parameters:
        dist.all_reduce(grad)
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None), *of_parameters]


def split(cases: list[Case]) -> list[list[Tensor]]:
    parallels: Parallels = {}
    parts = [(case, mine(case, parallels)) for case in cases]
    assert release_completed() == 0
    return [[unsharded(x, case.layout) for x in xs] for case, xs in parts]


def unsharded(x: Tensor, layout: SequenceLayout) -> Tensor:
    """The whole of a part; a gradient of sinks is whole already."""
    return x if x.ndim == 1 else unshard_sequence(x, world(), layout=layout)


def errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    pairs = zip(actual, expected, strict=True)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def sampled(cases: list[Case]) -> list[Case]:
    """Half of them, in which every two settings meet; all under HP_WHOLE.

    Args:
        cases: A product of settings, of which those of layouts (2) and heads (3) come last.
    """
    if os.environ.get("HP_WHOLE") == "1":
        return cases
    return [case for i, case in enumerate(cases) if (i + i // 6) % 2 == 0]


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


@pytest.mark.sample("3")
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_outputs_and_gradients_equal_one_process(ranks: int) -> None:
    kinds = cycle(RECOMPUTE)
    ratios = RATIOS.get(ranks, [(8, 2)])
    grid = product(WAYS[ranks], MASKS, LAYOUTS, ratios)
    cases = [
        Case(way, degree, mask, layout, heads, next(kinds))
        for (way, degree), mask, layout, heads in grid
    ]
    assert_equal(sampled(cases), ranks=ranks)


def test_sinks_soft_caps_and_uneven_heads_equal_one_process() -> None:
    ways: list[tuple[Way, int]] = [("ring", 1), ("ring", 2), ("strides", 1), ("strides", 2)]
    kinds = cycle(RECOMPUTE)
    cases = [
        Case(way, degree, mask, layout, heads, next(kinds), terms=terms)
        for way, degree in ways
        for mask in (Causal(), SlidingWindow(7), Causal() & PositionMask(lonely))
        for layout in LAYOUTS
        for heads, terms in (((4, 2), True), ((5, 5), True), ((6, 2), False))
    ]
    assert_equal(sampled(cases), ranks=4)


def test_the_head_size_of_values_may_differ() -> None:
    ways: list[tuple[Way, int]] = [("ring", 1), ("ring", 2), ("strides", 2)]
    assert_equal(
        [
            Case(way, degree, mask, layout, value_size=size)
            for way, degree in ways
            for mask in (Causal(), SlidingWindow(7))
            for layout in LAYOUTS
            for size in (5, 12)
        ],
        ranks=4,
    )


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 4e-6), (torch.bfloat16, 4e-2)], ids=str
)
def test_narrow_types_come_close(dtype: torch.dtype, bound: float) -> None:
    cases = [Case("ring", 1, Causal(), layout, dtype=dtype) for layout in LAYOUTS]
    assert_equal(cases, ranks=4, bound=bound)


BIT_EQUAL = [
    Case("strides", degree, mask, layout, heads, recompute, seq=128, dtype=torch.float32)
    for degree in (1, 2)
    for mask, recompute in ((Causal(), "none"), (SlidingWindow(5), "saved"))
    for layout in LAYOUTS
    for heads in ((8, 4), (6, 6))
]


def test_strides_of_heads_have_the_bits_of_one_gather() -> None:
    gathered = [replace(case, way="gather") for case in BIT_EQUAL]
    for results in run_distributed(split, [*BIT_EQUAL, *gathered], world_size=4):
        strided, plain = results[: len(BIT_EQUAL)], results[len(BIT_EQUAL) :]
        for case, one, other in zip(BIT_EQUAL, strided, plain, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), case


def test_a_ring_gives_the_same_bits_again() -> None:
    cases = [Case("ring", degree, Causal(), HeadTail(), dtype=torch.float32) for degree in (1, 2)]
    for results in run_distributed(split, [*cases, *cases], world_size=4):
        for one, other in zip(results[:2], results[2:], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


Names = list[str]


def operations(cases: list[Case]) -> list[tuple[Names, Names]]:
    """What the group does in forward and in backward, in order, and when blocks are computed."""
    results = []
    for case in cases:
        core = make(case).apply(Attention(case.mask), world())
        *qkv, grad = (shard_sequence(x, world(), layout=case.layout) for x in inputs(case))
        leaves = [x.requires_grad_() for x in qkv]
        core(*leaves)  # ranks compare notes
        names: Names = []

        def see(name: str, *_: object, names: Names = names) -> None:
            namespace, operator = name.split("::")
            if namespace == "c10d":
                names.append({"_allgather_base_": "gather", "alltoall_base_": "home"}[operator])
            elif "flash_attention" in operator:
                names.append("block")

        with watch_operators(see):
            out = core(*leaves)
            forward = list(names)
            names.clear()
            torch.autograd.grad(out, leaves, grad)
        results.append((forward, names))
    return results


def test_two_strides_are_in_flight_behind_the_one_that_computes() -> None:
    cases = [Case("strides", 1, Full(), IN_ORDER, (8, kv_heads)) for kv_heads in (4, 2, 1, 8)]
    for four, two, one, many in run_distributed(operations, cases, world_size=2):
        gather, block, home = (["gather"], ["block"], ["home"])
        assert four[0] == [*gather * 3, *block, *gather, *block * 3]
        step = [*block, *home]
        assert four[1] == [*gather * 3, *step, *gather, *step * 3]
        assert two == ([*gather * 2, *block * 2], [*gather * 2, *step * 2])
        assert one == ([*gather, *block], [*gather, *step])
        assert many == four


def test_the_number_of_strides_follows_from_the_rates() -> None:
    even = OverlapRates(link=1.0, compute=1.0, overhead=0.05)
    assert even.strides(1.0, 1.0, most=8) == 4  # (2 + 3) / 4 + 0.2 against 1.25 + 0.25 for five
    assert even.strides(1.0, 0.01, most=8) == 1  # nothing to hide behind
    assert even.strides(0.01, 1.0, most=8) == 1  # nothing to hide
    assert even.strides(9.0, 9.0, most=8) == 8
    assert OverlapRates(link=1.0, compute=1.0, overhead=0.0).strides(1.0, 1.0, most=6) == 6


def by_rates(overhead: float) -> int:
    rates = OverlapRates(link=1e6, compute=1e6, overhead=overhead)
    parallel = AsyncContextParallel(1, overlap="auto", rates=rates)
    core = parallel.apply(Attention(Causal()), world())
    q, k, v, _ = (shard_sequence(x, world()) for x in inputs(Case("gather", 1, Full(), IN_ORDER)))
    gathers = 0

    def see(name: str, *_: object) -> None:
        nonlocal gathers
        gathers += name == "c10d::alltoall_base_"

    core(q, k, v)
    with watch_operators(see):
        core(q, k, v)
    return gathers


def test_automatic_overlap_takes_strides_where_they_pay() -> None:
    assert run_distributed(by_rates, 1e-6, world_size=2) == [2, 2]
    assert run_distributed(by_rates, 10.0, world_size=2) == [1, 1]
