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
    ContextParallel,
    Contiguous,
    Documents,
    ExchangedBytes,
    Full,
    HeadTail,
    Mask,
    SequenceLayout,
    exchanged_bytes,
    shard_sequence,
)
from hp_context.checks import Dims
from hp_context.heads import kv_head_index
from hp_context.in_flight import Exchange
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
    foreign: bool = False
    overlap: bool = False

    @property
    def bytes(self) -> ExchangedBytes:
        return exchanged_bytes(
            seq_len=SEQ,
            num_heads=self.heads[0],
            num_kv_heads=self.heads[1],
            head_size=SIZE,
            value_size=self.value_size,
            num_ranks=RANKS,
            ulysses_degree=self.degree,
            batch_size=BATCH,
            dtype=self.dtype,
            gathers_again=not self.foreign,
        )

    @property
    def kinds(self) -> tuple[Counter[str], Counter[str]]:
        """Exchanges in forward and in backward."""
        heads, keys = self.degree != 1, self.degree not in (None, RANKS)
        forward = Counter({"all_to_all": 4 * heads, "all_gather": 1 * keys})
        backward = forward + Counter({"all_to_all": 1 * keys})
        if self.foreign:
            backward["all_gather"] = 0
        return +forward, +backward


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
    if not case.overlap:
        return ContextParallel(case.degree, mask=mask, layout=case.layout).apply(module, group)
    parallel = AsyncContextParallel(case.degree, mask=mask, layout=case.layout, overlap=True)
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
RATIOS = ((4, 4), (4, 2), (8, 1), (12, 3))
MASKS = (Full(), Causal(), Causal() & Documents((1, 7, 3, 13)))
LAYOUTS = (Contiguous(), HeadTail())
CASES = [
    *(Case(*case) for case in product(DEGREES, RATIOS, MASKS, LAYOUTS)),
    *(
        Case(degree, heads, Causal(), layout, foreign=True)
        for degree, heads, layout in product(DEGREES, RATIOS, LAYOUTS)
    ),
    *(
        Case(degree, heads, value_size=4, dtype=torch.float64)
        for degree, heads in product(DEGREES, RATIOS)
    ),
    *(Case(degree, heads, overlap=True) for degree, heads in product((None, 2), RATIOS)),
]


def test_every_mode_sends_what_the_formula_says() -> None:
    for found in run_distributed(counted, CASES, world_size=RANKS):
        for case, (forward, backward) in zip(CASES, found, strict=True):
            kinds = case.kinds
            assert forward == (kinds[0], case.bytes.forward), case
            assert backward == (kinds[1], case.bytes.backward), case


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
    index = kv_head_index(*heads, RANKS)
    q, k = (torch.empty(BATCH, SEQ // RANKS, count, SIZE) for count in heads)

    def rank(group: dist.ProcessGroup) -> float:
        exchanges = [Exchange(group, Dims(1, 2), heads) for heads in (None, index, index, None)]
        return sum(e.num_bytes(x) for e, x in zip(exchanges, (q, k, k, q), strict=True))

    assert run_in_threads(rank, world_size=RANKS) == [case.bytes.forward] * RANKS


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_kv_heads": 5}, r"num_kv_heads \(5\) must divide num_heads \(32\)"),
        ({"ulysses_degree": 3}, r"ulysses_degree \(3\) must divide the number of ranks \(4\)"),
        ({"num_ranks": 5}, r"ulysses_degree \(5\) must divide num_heads \(32\); legal degrees: "),
        ({"seq_len": 4094}, r"sequence length \(4094\) must be divisible by .* pad it by 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(changed: dict[str, int], message: str) -> None:
    shape = {**SHAPE, "num_kv_heads": 8, "num_ranks": 4}
    with pytest.raises(ValueError, match=message):
        exchanged_bytes(**(shape | changed))
