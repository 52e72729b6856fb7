"""Every mode sends what the formula says, in as many exchanges as it needs and no more."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from hp_context import (
    AsyncContextParallel,
    Attention,
    Causal,
    Contiguous,
    Documents,
    ExchangedBytes,
    Full,
    HeadTail,
    Mask,
    SequenceLayout,
    SlidingWindow,
    exchanged_bytes,
    shard_sequence,
)
from hp_context.attention.spread import Needs, split_heads
from hp_context.checks import Dims
from hp_context.methods.hybrid import outer_runs
from hp_context.methods.in_flight import Exchange
from hp_context.methods.ring import routes
from hp_platform.testing import record_exchanges, run_distributed, run_in_threads

RANKS, SEQ, SIZE, BATCH = 4, 24, 8, 2
EVERYTHING, IN_ORDER = Full(), Contiguous()


@dataclass(frozen=True)
class Case:
    degree: int | None
    heads: tuple[int, int] = (4, 4)
    mask: Mask = EVERYTHING
    layout: SequenceLayout = IN_ORDER
    dtype: torch.dtype = torch.bfloat16
    value_size: int = SIZE
    ring: bool = False
    foreign: bool = False
    overlap: bool = False

    def bytes(self, rank: int | None) -> ExchangedBytes:
        return exchanged_bytes(
            seq_len=SEQ,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_size=SIZE,
            value_size=self.value_size,
            num_ranks=RANKS,
            ulysses_degree=self.degree,
            ring=self.ring,
            mask=self.mask,
            layout=self.layout,
            batch_size=BATCH,
            dtype=self.dtype,
            by_blocks=not self.foreign,
            rank=rank,
        )

    def kinds(self, rank: int) -> tuple[Counter[str], Counter[str]]:
        """Exchanges in forward and in backward."""
        degree = (1 if self.ring else RANKS) if self.degree is None else self.degree
        heads = Counter({"all_to_all": 4} if degree > 1 else {})
        if degree == RANKS:
            return heads, heads
        runs = outer_runs(self.layout, SEQ, RANKS, degree)
        if self.ring:
            at = [routes(runs, self.mask)[rank // degree - t] for t in range(len(runs))]
            on = sum(route.hops > t for t, route in enumerate(at))
            sums = sum(route.hops >= t > 0 for t, route in enumerate(at))
            passed = sum(route.hops >= t > 1 for t, route in enumerate(at))
            forward = heads + Counter(send=on, recv=sums)
            return forward, forward + Counter(send=sums, recv=passed + (at[0].hops > 0))
        strides = min(4, len(split_heads(*self.heads, degree).kv[rank % degree]))
        times = strides if self.overlap else 1
        dense = self.foreign or Needs(runs, self.mask).dense
        gather = Counter({"all_gather" if dense else "all_to_all": times})
        home = Counter(all_to_all=times)
        return heads + gather, heads + home + (Counter() if self.foreign else gather)


class Foreign(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=True)
        return out.transpose(1, 2)


def tensors(case: Case) -> tuple[list[Tensor], Tensor]:
    heads, kv_heads = case.heads
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads, SIZE), (kv_heads, SIZE), (kv_heads, case.value_size)]
    group = dist.group.WORLD
    assert group is not None
    q, k, v, grad = (
        shard_sequence(
            torch.randn(BATCH, SEQ, *shape, generator=generator).to(case.dtype),
            group,
            layout=case.layout,
        )
        for shape in (*shapes, (heads, case.value_size))
    )
    return [x.requires_grad_() for x in (q, k, v)], grad


def core(case: Case) -> Callable[..., Tensor]:
    group = dist.group.WORLD
    assert group is not None
    mask = case.mask if case.foreign else None
    module = Foreign() if case.foreign else Attention(case.mask)
    parallel = AsyncContextParallel(
        case.degree, ring=case.ring, mask=mask, layout=case.layout, overlap=case.overlap
    )
    parallel.apply(module, group)

    def attend(*qkv: Tensor) -> Tensor:
        out: Tensor = module(*(parallel.launch(x * 1, group) for x in qkv))
        return out

    return attend


Found = tuple[Counter[str], int]


def counted(cases: list[Case]) -> list[tuple[Found, Found]]:
    """Kinds and bytes of the exchanges of this rank, in forward and in backward."""
    found = []
    for case in cases:
        qkv, grad = tensors(case)
        attend = core(case)
        attend(*qkv)  # ranks compare notes
        with record_exchanges() as forward:
            out = attend(*qkv)
        with record_exchanges() as backward:
            torch.autograd.grad(out, qkv, grad)
        ways = [
            (Counter(e.kind for e in way), sum(e.num_bytes for e in way))
            for way in (forward, backward)
        ]
        found.append((ways[0], ways[1]))
    return found


DEGREES = (None, 1, 2)
RATIOS = ((4, 4), (4, 2), (8, 1), (6, 2), (12, 3))
MASKS = (Full(), Causal(), Causal() & Documents((1, 7, 3, 13)), SlidingWindow(3))
LAYOUTS = (Contiguous(), HeadTail())
CASES = [
    *(Case(*case) for case in product(DEGREES, RATIOS, MASKS, LAYOUTS)),
    *(Case(*case, ring=True) for case in product((1, 2), RATIOS, MASKS, LAYOUTS)),
    *(
        Case(degree, heads, Causal(), layout, foreign=True)
        for degree, heads, layout in product(DEGREES, RATIOS, LAYOUTS)
    ),
    *(
        Case(degree, heads, value_size=4, dtype=torch.float64, ring=ring)
        for degree, heads, ring in product(DEGREES, RATIOS, (False, True))
    ),
    *(Case(degree, heads, overlap=True) for degree, heads in product(DEGREES, RATIOS)),
]


@pytest.mark.sample("0")
@pytest.mark.parametrize("part", range(5))
def test_every_mode_sends_what_the_formula_says(part: int) -> None:
    """A part has every degree with every mask, layout and flag."""
    cases = CASES[part::5]
    for rank, found in enumerate(run_distributed(counted, cases, world_size=RANKS)):
        for case, (forward, backward) in zip(cases, found, strict=True):
            kinds, expected = case.kinds(rank), case.bytes(rank)
            assert forward == (kinds[0], expected.forward), (rank, case)
            assert backward == (kinds[1], expected.backward), (rank, case)


SHAPE: dict[str, Any] = {"seq_len": 4096, "num_heads": 32, "head_size": 128}


@pytest.mark.parametrize("num_kv_heads", [4, 8, 16, 32])
@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_gathering_keys_sends_less_forward_below_one_plus_the_ratio_of_heads(
    num_ranks: int, num_kv_heads: int
) -> None:
    ulysses, gathered = (
        exchanged_bytes(
            **SHAPE, num_kv_heads=num_kv_heads, num_ranks=num_ranks, ulysses_degree=degree
        ).forward
        for degree in (None, 1)
    )
    ratio = 32 // num_kv_heads
    if num_kv_heads % num_ranks:
        assert ulysses > gathered or num_ranks >= 1 + ratio
    else:
        assert (gathered < ulysses) == (num_ranks < 1 + ratio)


def test_alone_nothing_is_sent() -> None:
    assert exchanged_bytes(**SHAPE, num_kv_heads=8, num_ranks=1) == (0, 0)


@pytest.mark.parametrize("heads", RATIOS)
def test_the_rule_of_overlap_counts_the_same_bytes(heads: tuple[int, int]) -> None:
    """q, k, v by the rule; the output is as large as q."""
    case = Case(None, heads, dtype=torch.float32)
    split = split_heads(*heads, RANKS)
    q, k = (torch.empty(BATCH, SEQ // RANKS, count, SIZE) for count in heads)

    def rank(group: dist.ProcessGroup) -> float:
        of_queries = Exchange(group, Dims(1, 2), None, split.query_counts)
        of_keys = Exchange(group, Dims(1, 2), split.kv_index, split.kv_counts)
        return 2 * (of_queries.num_bytes(q) + of_keys.num_bytes(k))

    found = run_in_threads(rank, world_size=RANKS)
    assert found == pytest.approx([case.bytes(None).forward] * RANKS)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_kv_heads": 5}, r"num_kv_heads \(5\) must divide num_heads \(32\)"),
        ({"ulysses_degree": 3}, r"ulysses_degree \(3\) must divide the number of ranks \(4\)"),
        ({"num_ranks": 64}, r"ulysses_degree \(64\) must be <= num_heads \(32\)"),
        ({"seq_len": 4094}, r"sequence length \(4094\) must be divisible by .* pad it by 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(changed: dict[str, int], message: str) -> None:
    shape = {**SHAPE, "num_kv_heads": 8, "num_ranks": 4}
    with pytest.raises(ValueError, match=message):
        exchanged_bytes(**(shape | changed))
