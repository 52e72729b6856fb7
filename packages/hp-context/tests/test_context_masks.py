"""Masks answer for pairs of global positions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_context import (
    Attention,
    BlockKind,
    Causal,
    Documents,
    Full,
    Mask,
    PositionMask,
    SlidingWindow,
    mask_tensor,
    masked_attention,
)
from hp_context.masks import block_tensor

lengths = st.lists(st.integers(1, 7), min_size=1, max_size=6).map(tuple)


def pairs(mask: Mask, seq_len: int) -> set[tuple[int, int]]:
    return {(q, k) for q, k in mask_tensor(mask, seq_len).nonzero().tolist()}


def parity(query: Tensor, key: Tensor) -> Tensor:
    return (query + key) % 2 == 0


known: st.SearchStrategy[Mask] = st.recursive(
    st.one_of(
        st.sampled_from([Full(), Causal()]),
        st.builds(SlidingWindow, st.integers(0, 9), st.integers(0, 3)),
        st.builds(Documents, lengths),
    ),
    lambda inner: st.builds(lambda a, b: a & b, inner, inner),
    max_leaves=3,
)
runs = st.tuples(st.integers(0, 20), st.integers(1, 12)).map(lambda x: range(x[0], x[0] + x[1]))


def kind_of(mask: Mask, query: range, key: range) -> BlockKind:
    """Tell the kind by looking at each pair."""
    allowed = block_tensor(mask, query, key)
    if not allowed.any():
        return BlockKind.EMPTY
    if allowed.all():
        return BlockKind.FULL
    if query == key and torch.equal(allowed, torch.ones_like(allowed).tril()):
        return BlockKind.CAUSAL
    return BlockKind.PARTIAL


@settings(deadline=None)
@given(known, runs, runs)
def test_the_kind_of_a_block_is_exact_for_masks_that_tell_their_keys(
    mask: Mask, query: range, key: range
) -> None:
    assert mask.block(query, key) is kind_of(mask, query, key)
    assert mask.block(query, query) is kind_of(mask, query, query)


@settings(deadline=None)
@given(known, runs, runs)
def test_an_unknown_mask_never_makes_a_block_more_than_it_is(
    mask: Mask, query: range, key: range
) -> None:
    combined = mask & PositionMask(parity)
    told = combined.block(query, key)
    assert told is BlockKind.PARTIAL or told is kind_of(combined, query, key)
    if mask.block(query, key) is BlockKind.EMPTY:
        assert told is BlockKind.EMPTY


@settings(deadline=None)
@given(known, runs)
def test_the_keys_that_a_run_of_queries_sees_are_told_exactly(mask: Mask, query: range) -> None:
    keys = range(query.stop + 16)
    columns = block_tensor(mask, query, keys).any(0).nonzero().flatten().tolist()
    assert [key for key in keys if key in mask.seen(query)] == columns


@given(known, runs)
def test_an_unknown_mask_may_see_everything_that_its_companion_allows(
    mask: Mask, query: range
) -> None:
    unknown = PositionMask(parity)
    assert unknown.seen(query) == Full().seen(query)
    assert (mask & unknown).seen(query) == mask.seen(query)


@given(known, runs)
def test_cuts_of_queries_are_inside_the_run(mask: Mask, run: range) -> None:
    assert mask.query_cuts(run) <= set(run[1:])


@settings(deadline=None)
@given(runs, runs)
def test_a_function_of_positions_is_a_mask(query: range, key: range) -> None:
    expected = [[(q + k) % 2 == 0 for k in key] for q in query]
    assert block_tensor(PositionMask(parity), query, key).tolist() == expected


def test_a_function_that_returns_no_bool_of_the_right_shape_is_refused() -> None:
    message = r"must return bool \(4, 4\), but it returned torch.int64 \(4, 1\)"
    with pytest.raises(ValueError, match=message):
        mask_tensor(PositionMask(lambda query, _: query), 4)


def test_a_mask_whose_runs_miss_the_query_is_refused() -> None:
    class Ahead(Full):
        def visible(self, query: int) -> range:
            return range(query + 1, query + 3)

    with pytest.raises(ValueError, match=r"must be a run with \d+ in it"):
        Ahead().block(range(4, 6), range(4))


def all_pairs(seq_len: int) -> set[tuple[int, int]]:
    return {(q, k) for q in range(seq_len) for k in range(seq_len)}


def test_full_allows_every_pair() -> None:
    assert pairs(Full(), 5) == all_pairs(5)


def test_causal_allows_the_past_and_itself() -> None:
    assert pairs(Causal(), 5) == {(q, k) for q, k in all_pairs(5) if k <= q}


@given(st.integers(0, 6), st.integers(0, 6))
def test_window_counts_the_keys_beside_the_position(left: int, right: int) -> None:
    expected = {(q, k) for q, k in all_pairs(6) if q - left <= k <= q + right}
    assert pairs(SlidingWindow(left, right), 6) == expected


@given(lengths)
def test_documents_see_themselves_only(lengths: tuple[int, ...]) -> None:
    owner = [i for i, n in enumerate(lengths) for _ in range(n)]
    expected = {(q, k) for q, k in all_pairs(len(owner)) if owner[q] == owner[k]}
    assert pairs(Documents(lengths), len(owner)) == expected


@given(lengths)
def test_and_allows_what_both_allow(lengths: tuple[int, ...]) -> None:
    total = sum(lengths)
    both = pairs(Causal() & Documents(lengths), total)
    assert both == pairs(Causal(), total) & pairs(Documents(lengths), total)


def test_a_mask_of_some_positions_is_a_part_of_the_whole() -> None:
    mask, positions = Causal() & Documents((3, 5)), torch.tensor([6, 1, 4])
    part = mask.allowed(positions[:, None], torch.arange(8))
    assert torch.equal(part, mask_tensor(mask, 8)[positions])


@pytest.mark.parametrize("mask", [Documents((3, 4)), Causal() & Documents((3, 4))])
def test_documents_must_fill_the_sequence(mask: Mask) -> None:
    with pytest.raises(ValueError, match=r"sum of Documents lengths \(7\) must equal .* \(8\)"):
        mask_tensor(mask, 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindow(-1), r"left \(-1\) must be >= 0"),
        (lambda: Documents((2, 0)), "must be >= 1"),
        (lambda: Documents(()), "not empty"),
    ],
)
def test_impossible_masks_are_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "mask", [Full(), Causal(), SlidingWindow(2), Causal() & Documents((1, 4, 3))]
)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_masked_attention_is_softmax_over_the_allowed_keys(mask: Mask, num_kv_heads: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 8, 4, 6, dtype=torch.float64)
    k, v = (torch.randn(2, 8, num_kv_heads, 6, dtype=torch.float64) for _ in "kv")
    wide_k, wide_v = (x.repeat_interleave(4 // num_kv_heads, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, wide_k) / 6**0.5
    weights = scores.masked_fill(~mask_tensor(mask, 8), -torch.inf).softmax(-1)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, wide_v)
    assert (masked_attention(q, k, v, mask=mask) - expected).abs().max() < 1e-14


def test_the_two_layouts_of_attention_agree() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 8, 4, 6, dtype=torch.float64) for _ in "qkv")
    bshd = Attention(Causal())(q, k, v)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    bnsd = Attention(Causal(), seq_dim=2, head_dim=1)(*heads_first)
    assert torch.equal(bshd, bnsd.transpose(1, 2))
