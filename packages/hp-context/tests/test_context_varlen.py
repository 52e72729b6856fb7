"""Calls of variable lengths, by what their operators are defined to compute: all of it but CUDA."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from varlen_reference import Launches, on_cpu

from hp_context import (
    Attention,
    Causal,
    ContextParallel,
    Documents,
    EachSequence,
    Full,
    HeadTail,
    Mask,
    PositionMask,
    SlidingWindow,
    masked_attention,
    shard_sequence,
    unshard_sequence,
)
from hp_context.batch import CONTIGUOUS, SequenceLayout
from hp_context.methods.in_flight import OverlapRates
from hp_platform.testing import run_distributed

pytestmark = pytest.mark.usefixtures("one_thread")
SEQ = 24
DOCUMENTS = Documents((5, 1, 9, 2, 7))
OTHERS = Documents((11, 13))
EACH = EachSequence((DOCUMENTS, OTHERS))


@pytest.fixture
def launches() -> Iterator[Launches]:
    with on_cpu() as found:
        yield found


@dataclass(frozen=True)
class Case:
    mask: Mask
    heads: tuple[int, int] = (4, 2)
    sizes: tuple[int, int] = (8, 8)
    sinks: bool = False
    batch: int = 2
    layout: SequenceLayout = CONTIGUOUS
    degree: int | None = 1
    ring: bool = False
    strides: bool = False


def inputs(case: Case) -> list[Tensor]:
    """Whole q, k, v, the gradient of the output, and sinks: [B, S, heads, size]."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads = case.heads
    size, value_size = case.sizes
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size)]
    return [
        *(
            torch.randn(case.batch, SEQ, *each, dtype=torch.float64, generator=generator)
            for each in shapes
        ),
        torch.linspace(-1, 2, heads, dtype=torch.float64),
    ]


def by_definition(case: Case) -> list[Tensor]:
    """Out, dq, dk, dv, and the gradient of sinks if there are any."""
    q, k, v, grad, sinks = inputs(case)
    leaves = [x.requires_grad_() for x in ((q, k, v, sinks) if case.sinks else (q, k, v))]
    shared = case.heads[0] // case.heads[1]
    k_h, v_h = (x.repeat_interleave(shared, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k_h) * case.sizes[0] ** -0.5
    position = torch.arange(SEQ)
    allowed = case.mask.allowed(position[:, None], position)
    scores = scores.masked_fill(~allowed, -torch.inf)
    if case.sinks:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., :SEQ]
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v_h)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def assert_equal(actual: list[Tensor], expected: list[Tensor], bound: float = 1e-12) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape
        assert float((a - b).abs().max()) <= bound * max(1.0, float(b.abs().max()))


def at_once(case: Case) -> list[Tensor]:
    q, k, v, grad, sinks = inputs(case)
    leaves = [x.requires_grad_() for x in ((q, k, v, sinks) if case.sinks else (q, k, v))]
    out = masked_attention(q, k, v, mask=case.mask, sinks=sinks if case.sinks else None)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


WHOLE = [
    Case(Causal() & DOCUMENTS),
    Case(Causal() & EACH),
    Case(EACH, heads=(3, 3)),
    Case(SlidingWindow(4)),
    Case(SlidingWindow(4) & EACH, heads=(4, 1)),
    Case(SlidingWindow(2, 3) & DOCUMENTS),
    Case(Causal() & DOCUMENTS, sinks=True),
    Case(SlidingWindow(4) & EACH, sinks=True),
    Case(Causal(), sinks=True),
    Case(Full(), sinks=True),
    Case(Causal(), sizes=(12, 8), heads=(4, 4), sinks=True),
    Case(Causal() & EACH, sizes=(12, 8), heads=(4, 4)),
    Case(Causal() & EACH, sizes=(12, 8), heads=(4, 4), sinks=True),
]


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_whole_sequences_are_one_call_forward_and_one_backward(
    case: Case, launches: Launches
) -> None:
    assert_equal(at_once(case), by_definition(case))
    assert (len(launches.forward), len(launches.backward)) == (1, 1)
    queries, keys, _ = launches.forward[0]
    assert (queries, keys) == (case.batch * SEQ, case.batch * SEQ)


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_without_the_kernel_the_same_is_computed(case: Case) -> None:
    assert_equal(at_once(case), by_definition(case))


def test_heads_may_come_before_the_sequence(launches: Launches) -> None:
    case = Case(Causal() & EACH)
    q, k, v, *_ = inputs(case)
    expected = by_definition(case)[0]
    heads_first = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    out = masked_attention(*heads_first, mask=case.mask, seq_dim=2, head_dim=1)
    assert_equal([out.transpose(1, 2)], [expected])
    assert len(launches.forward) == 1


def test_what_the_kernel_does_not_take_goes_on_as_before(launches: Launches) -> None:
    q, k, v, *_ = inputs(Case(Causal()))
    masked_attention(q, k, v, mask=Causal())  # torch's own attention is one kernel as well
    masked_attention(q, k, v[..., :5], mask=Causal())
    masked_attention(q, k, v, mask=Causal() & DOCUMENTS, softcap=2.0)
    masked_attention(q, k, v, mask=Causal() & DOCUMENTS, dropout=0.5)
    masked_attention(q, k, v, mask=Causal() & PositionMask(lambda a, b: (a - b) % 2 == 0))
    masked_attention(q, k, v[..., :5].repeat(1, 1, 1, 2), mask=Causal() & DOCUMENTS)  # E > D
    assert not launches.forward


def test_a_batch_of_masks_goes_one_by_one_where_a_kernel_does_not_take_it() -> None:
    def parity(query: Tensor, key: Tensor) -> Tensor:
        return (query - key) % 2 == 0

    case = Case(Causal() & EachSequence((PositionMask(parity), OTHERS)))
    assert_equal(at_once(case), by_definition(case))
    q, k, v, *_ = inputs(case)
    out = masked_attention(q, k, v, mask=case.mask, softcap=3.0)
    rows = [
        masked_attention(*(x[b : b + 1] for x in (q, k, v)), mask=Causal() & mask, softcap=3.0)
        for b, mask in enumerate((PositionMask(parity), OTHERS))
    ]
    assert torch.equal(out, torch.cat(rows))


def test_a_batch_of_masks_says_what_does_not_fit() -> None:
    q, k, v, *_ = inputs(Case(Causal(), batch=3))
    with pytest.raises(ValueError, match=r"masks \(2\) must be one for each sequence of q \(3\)"):
        masked_attention(q, k, v, mask=Causal() & EACH)
    with pytest.raises(ValueError, match="must be one or more"):
        EachSequence(())
    with pytest.raises(ValueError, match="must be of one sequence each"):
        EachSequence((Causal() & EACH,))
    with pytest.raises(ValueError, match="must equal the length of the whole"):
        masked_attention(q[:2, :20], k[:2, :20], v[:2, :20], mask=EACH)


def test_a_batch_of_masks_describes_itself() -> None:
    mask = EachSequence((Causal() & DOCUMENTS, Causal() & OTHERS))
    assert mask.causal
    assert mask.of_batch
    assert (Full() & mask).of_batch
    assert mask.seen(range(12, 14)) == range(6, 14)
    kinds = {mask.block(range(2, 4), range(4, 8)), mask.block(range(14, 15), range(11, 12))}
    assert {kind.name for kind in kinds} == {"EMPTY", "FULL"}
    assert mask.block(range(12, 14), range(8, 10)).name == "PARTIAL"


def test_numbers_are_copied_once_for_all_layers_and_both_directions(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hp_context.attention import segmented  # noqa: PLC0415

    copied: list[Any] = []
    usual = segmented._copied

    def note(*args: Any) -> Any:
        copied.append(args)
        return usual(*args)

    monkeypatch.setattr(segmented, "_copied", note)
    documents = EachSequence((Documents((3, 21)), Documents((4, 20))))
    case = Case(Causal())
    for _ in range(3):
        at_once(replace(case, mask=Causal() & documents))
    assert len(copied) == 1
    assert len(launches.forward) == len(launches.backward) == 3
    monkeypatch.setattr(segmented, "MOST_NUMBERS", 1)
    for _ in range(2):  # of two plans the older one goes
        at_once(replace(case, mask=documents))
        at_once(replace(case, mask=SlidingWindow(1) & documents))
    assert len(copied) == 5


# Ranks.


class TwoStrides(OverlapRates):
    def strides(self, num_bytes: float, flops: float, most: int) -> int:
        del num_bytes, flops
        return min(2, most)


class InStrides(ContextParallel):
    """Gathers keys in two strides of heads."""

    def _rates(self, device_type: str) -> OverlapRates | None:
        del device_type
        return TwoStrides(1.0, 1.0, 0.0)


PARTS = [
    Case(Causal()),
    Case(Causal(), layout=HeadTail(), heads=(4, 4)),
    Case(Full(), layout=HeadTail()),
    Case(Causal() & EACH),
    Case(Causal() & EACH, layout=HeadTail(), sinks=True),
    Case(Causal() & DOCUMENTS, layout=HeadTail(), batch=1),
    Case(SlidingWindow(5), layout=HeadTail()),
    Case(SlidingWindow(9) & EACH),
    Case(SlidingWindow(9) & EACH, layout=HeadTail(), sinks=True),
    Case(SlidingWindow(3, 4) & DOCUMENTS, layout=HeadTail(), heads=(4, 1)),
    Case(Causal() & EACH, layout=HeadTail(), heads=(4, 4), sizes=(12, 8)),
    Case(EACH, sizes=(12, 8), sinks=True),
]


def modes(case: Case, num_ranks: int) -> list[Case]:
    degrees: list[tuple[int | None, bool]] = [(1, False), (1, True), (None, False)]
    if num_ranks == 4:
        degrees = [(2, False), (2, True), (1, True), (1, False)]
    found = [replace(case, degree=degree, ring=ring) for degree, ring in degrees]
    return [*found, replace(case, degree=1, strides=True)] if case.heads == (4, 4) else found


def split(cases: list[Case], nothing_seen: float) -> list[tuple[list[Tensor], list[int]]]:
    """Out, dq, dk, dv and the gradient of sinks; and calls forward and backward of this rank."""
    group = dist.group.WORLD
    assert group is not None
    results = []
    with on_cpu(nothing_seen) as launches:
        for case in cases:
            q, k, v, grad, sinks = inputs(case)
            core = Attention(case.mask, sinks=sinks if case.sinks else None)
            kind = InStrides if case.strides else ContextParallel
            parallel = kind(case.degree, ring=case.ring, layout=case.layout)
            parallel.apply(core, group)
            leaves = [
                shard_sequence(x, group, layout=case.layout).requires_grad_() for x in (q, k, v)
            ]
            launches.forward.clear()
            launches.backward.clear()
            out = core(*leaves)
            weights = [] if core.sinks is None else [core.sinks]
            part = shard_sequence(grad, group, layout=case.layout)
            grads = list(torch.autograd.grad(out, [*leaves, *weights], part))
            of_sinks = [grads.pop()] if weights else []
            for x in of_sinks:
                dist.all_reduce(x)
            wholes = [
                unshard_sequence(x, group, layout=case.layout) for x in (out.detach(), *grads)
            ]
            calls = [len(launches.forward), len(launches.backward)]
            results.append(([*wholes, *of_sinks], calls))
    return results


@pytest.mark.sample("2-inf", "2--inf", "3-inf")
@pytest.mark.parametrize(
    ("num_ranks", "nothing_seen"), [(2, math.inf), (2, -math.inf), (3, math.inf), (4, math.inf)]
)
def test_every_mode_computes_what_one_process_does(num_ranks: int, nothing_seen: float) -> None:
    cases = [
        mode
        for case in PARTS
        for mode in modes(case, num_ranks)
        if num_ranks != 3 or mode.degree == 1
    ]
    by_rank = run_distributed(split, cases, nothing_seen, world_size=num_ranks, timeout=240)
    for number, case in enumerate(cases):
        expected = by_definition(case)
        for found in by_rank:
            actual, (forward, backward) = found[number]
            assert_equal(actual, expected)
            steps = 2 if case.strides else 1
            if case.ring:
                steps = num_ranks // (case.degree or 1)
            by_torch = case.degree is None and case.mask in (Causal(), Full())
            has_window = "Window" in str(case.mask)
            assert forward == backward
            assert forward <= steps or has_window, (case, forward)
            assert forward >= 1 or by_torch
