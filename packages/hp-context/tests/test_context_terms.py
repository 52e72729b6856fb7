"""Sinks, soft caps, dropout, uneven heads and other head sizes of v, in every mode."""

from dataclasses import dataclass, replace
from typing import Any

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
    mask_tensor,
    shard_sequence,
    unshard_sequence,
)
from hp_context.kernels.reference import Dropout, draw_seed
from hp_platform.testing import run_distributed

pytestmark = pytest.mark.usefixtures("one_thread")

SEQ, SIZE = 24, 8
BSHD, BNSD = (1, 2), (2, 1)
CAUSAL, IN_ORDER = Causal(), Contiguous()


@dataclass(frozen=True)
class Case:
    degree: int | None = None
    mask: Mask = CAUSAL
    layout: SequenceLayout = IN_ORDER
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = BSHD
    value_size: int = SIZE
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    dtype: torch.dtype = torch.float64
    overlap: bool = False
    seq: int = SEQ


def inputs(case: Case) -> list[Tensor]:
    """Whole q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    result = []
    heads, kv_heads = case.heads
    for count, size in (
        (heads, SIZE),
        (kv_heads, SIZE),
        (kv_heads, case.value_size),
        (heads, case.value_size),
    ):
        shape = [2, 0, 0, size]
        shape[case.dims[0]], shape[case.dims[1]] = case.seq, count
        result.append(torch.randn(shape, dtype=torch.float64, generator=generator).to(case.dtype))
    return result


def attention(case: Case) -> Attention:
    seq_dim, head_dim = case.dims
    sinks = torch.linspace(-1, 2, case.heads[0], dtype=case.dtype) if case.sinks else None
    return Attention(
        case.mask,
        seq_dim=seq_dim,
        head_dim=head_dim,
        dropout=case.dropout,
        softcap=case.softcap,
        sinks=sinks,
    )


def by_definition(case: Case, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Scores of all pairs, one more column for the sink, a softmax."""
    q, k, v = (x.movedim(case.dims, (2, 1)) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = q @ k.mT * SIZE**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    scores = scores.masked_fill(~mask_tensor(case.mask, case.seq), -torch.inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1).nan_to_num()[..., : case.seq]
    if case.dropout:
        dropped = Dropout(case.dropout, draw_seed()).of_block(range(case.seq), range(case.seq))
        batch, heads = weights.shape[:2]
        weights = weights * dropped.factors(batch, heads, slice(None), slice(None), weights)
    out: Tensor = (weights @ v).movedim((2, 1), case.dims)
    return out


def gradients(out: Tensor, grad: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def alone(case: Case, *, definition: bool = False) -> list[Tensor]:
    q, k, v, grad = inputs(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    core = attention(case)
    parameters = list(core.parameters())
    torch.manual_seed(11)
    if definition:
        out = by_definition(case, q, k, v, parameters[0] if parameters else None)
    else:
        out = core(q, k, v)
    return gradients(out, grad, [*leaves, *parameters])


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def parallel_core(case: Case) -> tuple[Attention, ContextParallel]:
    seq_dim, head_dim = case.dims
    dims: Any = {"seq_dim": seq_dim, "head_dim": head_dim, "layout": case.layout}
    parallel = ContextParallel(case.degree, **dims)
    if case.overlap:
        parallel = AsyncContextParallel(case.degree, overlap=True, **dims)
    return parallel.apply(attention(case), world()), parallel


def together(case: Case, mine: list[Tensor]) -> list[Tensor]:
    """Output and gradients of the whole; the gradient of a parameter is the sum over ranks."""
    for grad in mine[4:]:
        dist.all_reduce(grad)
    seq_dim = case.dims[0]
    parts = (unshard_sequence(x, world(), seq_dim=seq_dim, layout=case.layout) for x in mine[:4])
    return [*parts, *mine[4:]]


def shards(case: Case) -> list[Tensor]:
    whole = inputs(case)
    return [shard_sequence(x, world(), seq_dim=case.dims[0], layout=case.layout) for x in whole]


def split(cases: list[Case]) -> list[list[Tensor]]:
    results = []
    for case in cases:
        core, parallel = parallel_core(case)
        q, k, v, grad = shards(case)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        for _ in range(1 + case.overlap):  # the first call of a shape is synchronous
            torch.manual_seed(11)
            if isinstance(parallel, AsyncContextParallel):
                q, k, v = (parallel.launch(x * 1, world()) for x in leaves)
            mine = gradients(core(q, k, v), grad, [*leaves, *core.parameters()])
        if isinstance(parallel, AsyncContextParallel):
            assert parallel.counts.overlapped == (3 if case.degree != 1 else 0)
        results.append(together(case, mine))
    return results


def errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    pairs = zip(actual, expected, strict=True)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def assert_equal(cases: list[Case], *, ranks: int, bound: float = 1e-12) -> None:
    expected = [alone(case) for case in cases]
    for results in run_distributed(split, cases, world_size=ranks):
        for case, whole, single in zip(cases, results, expected, strict=True):
            assert max(errors(whole, single)) <= bound, case


def lonely(query: Tensor, key: Tensor) -> Tensor:
    """Queries 5, 12, 19, ... see nothing."""
    return (query % 7 != 5) & ((query + key) % 3 != 0)


PACKED = Causal() & Documents((1, 7, 3, 13))
TERMS = [
    Case(sinks=True),
    Case(softcap=0.7),
    Case(softcap=2.0, sinks=True, mask=SlidingWindow(5)),
    Case(sinks=True, mask=PACKED, heads=(4, 1), value_size=5),
    Case(sinks=True, mask=PositionMask(lonely), dims=BNSD),
    Case(softcap=1.5, mask=Full(), dims=BNSD, value_size=3),
    Case(value_size=16, mask=PACKED),
]
DROPOUT = [
    Case(dropout=0.3),
    Case(dropout=0.3, mask=PACKED, heads=(4, 1), layout=HeadTail(), dims=BNSD, value_size=5),
    Case(dropout=0.1, heads=(5, 5), sinks=True, softcap=2.0),
]


@pytest.mark.parametrize("case", TERMS + DROPOUT)
def test_one_process_computes_the_definition(case: Case) -> None:
    assert max(errors(alone(case), alone(case, definition=True))) <= 1e-12


def test_every_mode_computes_sinks_soft_caps_and_other_sizes_of_v() -> None:
    cases = [
        replace(case, degree=degree, layout=layout)
        for case in TERMS
        for degree, layout in ((None, IN_ORDER), (1, HeadTail()), (2, HeadTail()), (2, IN_ORDER))
    ]
    assert_equal(cases, ranks=4)


UNEVEN = [(5, 5), (10, 5), (6, 2), (7, 1), (9, 3)]


@pytest.mark.sample("3")
@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_may_have_different_numbers_of_heads(ranks: int) -> None:
    cases = [
        Case(None, mask, layout, heads, dims, value_size, sinks=sinks, overlap=overlap)
        for heads in UNEVEN
        for mask, layout, dims, value_size, sinks, overlap in (
            (Causal(), IN_ORDER, BSHD, SIZE, False, False),
            (PACKED, HeadTail(), BNSD, 5, True, False),
            (Causal(), HeadTail(), BSHD, 16, False, True),
        )
    ]
    if ranks == 4:
        cases += [replace(case, degree=2, overlap=False) for case in cases]
    assert_equal(cases, ranks=ranks)


def test_uneven_heads_are_bit_equal_in_float32() -> None:
    cases = [
        Case(None, mask, heads=heads, dims=dims, dtype=torch.float32, overlap=overlap)
        for heads in ((5, 5), (10, 5), (7, 7))
        for mask in (Causal(), PACKED)
        for dims in (BSHD, BNSD)
        for overlap in (False, True)
    ]
    assert_equal(cases, ranks=3, bound=0.0)


def merged() -> list[Tensor]:
    """Five heads over three ranks; the output has them merged with the head size."""

    class Merged(Attention):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Mask | None = None) -> Tensor:
            return super().forward(q, k, v, attn_mask).flatten(2)

    case = Case(heads=(5, 5), value_size=5)
    core = ContextParallel().apply(Merged(Causal()), world())
    q, k, v, grad = shards(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    return together(case, gradients(core(q, k, v).unflatten(2, (5, 5)), grad, leaves))


def test_uneven_heads_may_be_merged_in_the_output() -> None:
    for whole in run_distributed(merged, world_size=3):
        assert max(errors(whole, alone(Case(heads=(5, 5), value_size=5)))) <= 1e-12


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_same_weights_are_dropped_on_any_number_of_ranks(ranks: int) -> None:
    """Ranks that are seeded alike, that is."""
    assert_equal([case for case in DROPOUT if case.heads[0] >= ranks], ranks=ranks)


def recomputed(case: Case) -> list[tuple[float, float]]:
    results = []
    for use_reentrant in (True, False):
        core, _ = parallel_core(case)
        q, k, v, grad = shards(case)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        passes = []
        for recompute in (False, True):
            torch.manual_seed(world().rank())  # every rank its own seed
            if recompute:
                out = checkpoint(core, q, k, v, use_reentrant=use_reentrant)
            else:
                out = core(q, k, v)
            torch.rand(3)  # what follows draws as well
            out.backward(grad)
            passes.append([x.grad for x in leaves if x.grad is not None])
            for x in leaves:
                x.grad = None
        results.append((max(errors(passes[1], passes[0])), float(passes[0][0].abs().max())))
    return results


def test_recomputation_drops_the_same_weights_again() -> None:
    for results in run_distributed(recomputed, Case(dropout=0.4), world_size=2):
        for error, size in results:
            assert error == 0.0
            assert size > 0


def dropped(core: Attention, *, heads: int = 4) -> Tensor:
    """Which weights are dropped, [B, H, Q, K]: all are equal and meet a unit matrix as v."""
    q = torch.zeros(2, SEQ, heads, SEQ)
    v = torch.eye(SEQ).view(1, SEQ, 1, SEQ).expand(2, SEQ, heads, SEQ)
    out: Tensor = core(q, q, v)
    return (out == 0).transpose(1, 2)


def test_every_batch_head_and_call_drops_its_own_share() -> None:
    core = Attention(Full(), dropout=0.3)
    masks = torch.cat([dropped(core) for _ in range(3)]).flatten(0, 1)
    assert abs(float(masks.float().mean()) - 0.3) < 0.02
    equal = (masks[:, None] == masks[None]).float().mean((-1, -2)) - torch.eye(len(masks))
    # Two independent masks agree in 0.3 * 0.3 + 0.7 * 0.7 of 576 places: 0.58 +- 0.02.
    assert float(equal[equal > 0].min()) > 0.48
    assert float(equal.max()) < 0.68
    # Nor do neighbours know of each other, in rows or in columns.
    for a, b in ((masks[..., 1:], masks[..., :-1]), (masks[:, 1:], masks[:, :-1])):
        assert abs(float((a & b).float().mean()) - 0.09) < 0.02
    assert not dropped(core.eval()).any()


def of_ranks() -> Tensor:
    torch.manual_seed(3)
    core = ContextParallel().apply(Attention(Full(), dropout=0.3), world())
    q = torch.randn(1, SEQ // 2, 2, 1).expand(1, SEQ // 2, 2, SEQ) * 0 + world().rank()
    v = torch.eye(SEQ)[SEQ // 2 * world().rank() :][: SEQ // 2].view(1, SEQ // 2, 1, SEQ)
    out: Tensor = core(q * 1e-9, q * 0, v.expand(1, SEQ // 2, 2, SEQ))
    return (unshard_sequence(out, world()) == 0)[0].transpose(0, 1)


def test_heads_of_other_ranks_drop_other_weights() -> None:
    first, second = run_distributed(of_ranks, world_size=2)[0]
    assert 0.2 < float(first.float().mean()) < 0.4
    assert 0.48 < float((first == second).float().mean()) < 0.68
