"""Masks as segments: every pair of positions that a mask allows, and no other, in few calls."""

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from hp_context import Causal, Documents, Full, HeadTail, Mask, PositionMask, SlidingWindow
from hp_context.batch import CONTIGUOUS
from hp_context.masks import block_tensor
from hp_context.masks.segments import Call, calls, is_known

SEQ = 24
DOCUMENTS = Documents((5, 1, 9, 2, 7))
MASKS: list[Mask] = [
    Full(),
    Causal(),
    DOCUMENTS,
    Causal() & DOCUMENTS,
    Causal() & Documents((1,) * SEQ),
    SlidingWindow(4),
    SlidingWindow(0),
    SlidingWindow(3, 2),
    SlidingWindow(4) & DOCUMENTS,
    SlidingWindow(30) & Documents((11, 13)),
    SlidingWindow(2, 3) & DOCUMENTS & Documents((12, 12)),
    SlidingWindow(5, 4) & Causal(),
]


def pairs(planned: tuple[Call, ...], num_queries: int, num_keys: int) -> Tensor:
    """How often each query meets each key."""
    met = torch.zeros(num_queries, num_keys, dtype=torch.int64)
    for call in planned:
        keys = torch.cat([torch.arange(r.start, r.stop, r.step) for r in call.keys])
        queries = torch.arange(call.queries.start, call.queries.stop)
        assert call.starts[-1] == len(queries)
        assert call.key_starts[-1] == len(keys)
        assert len(call.starts) == len(call.key_starts)
        seen = torch.zeros(len(queries), dtype=torch.bool)
        for (a, b), (c, d) in zip(pairwise(call.starts), pairwise(call.key_starts), strict=True):
            aligned = torch.arange(b - a)[:, None] + (d - c) - (b - a)
            key = torch.arange(d - c)
            left, right = call.window
            allowed = torch.ones(b - a, d - c, dtype=torch.bool)
            allowed &= (key >= aligned - left) | (left < 0)
            allowed &= (key <= aligned + right) | (right < 0)
            if a < b and c < d:
                assert allowed.any(1).all(), "a query of a segment sees a key"
            seen[a:b] = allowed.any(1)
            met[queries[a:b, None], keys[None, c:d]] += allowed
        assert call.has_gaps == (not bool(seen.all()))
        assert call.longest[0] == max(b - a for a, b in pairwise(call.starts))
        added = torch.cat([keys[r.start : r.stop] for each in call.rounds for r, _ in each])
        for each in call.rounds:
            rows = [row for _, run in each for row in run]
            assert len(rows) == len(set(rows))
            for at, run in each:
                assert keys[at.start : at.stop].tolist() == list(run)
        assert sorted(added.tolist()) == sorted(keys.tolist())
    return met


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_a_whole_sequence_is_one_call(mask: Mask) -> None:
    whole = (range(SEQ),)
    planned = calls((mask,) * 2, whole, whole, alternate=False)
    assert len(planned) == 1
    assert planned[0].is_view
    met = pairs(planned, 2 * SEQ, 2 * SEQ)
    allowed = block_tensor(mask, range(SEQ), range(SEQ))
    assert torch.equal(met, torch.block_diag(allowed.long(), allowed.long()))


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", [CONTIGUOUS, HeadTail()], ids=["contiguous", "head-tail"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("batch", [1, 2])
def test_parts_of_a_sequence_meet_as_the_mask_says(
    mask: Mask, layout: HeadTail, num_ranks: int, batch: int
) -> None:
    """Each rank's queries with all keys, as a gather has them, and with those of each rank."""
    other = MASKS[(MASKS.index(mask) + 1) % len(MASKS)]
    masks = (mask, other)[:batch]
    runs = layout.runs(SEQ, num_ranks)
    for queries in runs:
        for keys in ((range(SEQ),), *runs):
            planned = calls(masks, queries, keys, alternate=True)
            num = sum(map(len, queries)), sum(map(len, keys))
            met = pairs(planned, batch * num[0], batch * num[1])
            met = met.unflatten(0, (batch, -1)).unflatten(2, (-1, batch))
            rows, columns = (torch.tensor([p for run in x for p in run]) for x in (queries, keys))
            for b, each in enumerate(masks):
                allowed = each.allowed(rows[:, None], columns[None])
                assert torch.equal(met[b, :, :, b], allowed.long())
                met[b, :, :, b] = 0
            assert not met.any(), "sequences do not meet"


def test_documents_and_causal_masks_are_one_call_for_each_part_of_the_keys() -> None:
    generator = random.Random(0)
    for _ in range(40):
        ends = sorted({*generator.sample(range(1, 64), generator.randrange(12)), 64})
        masks = tuple(
            Causal() & Documents(tuple(b - a for a, b in pairwise([0, *ends[i:]])))
            for i in (0, len(ends) // 2)
        )
        for layout in (CONTIGUOUS, HeadTail()):
            runs = layout.runs(64, 4)
            for queries in runs:
                for keys in ((range(64),), *runs):
                    assert len(calls(masks, queries, keys, alternate=True)) <= 1
    assert len(calls((SlidingWindow(20),), (range(16, 32),), (range(16),), alternate=True)) == 1


def test_head_and_tail_of_a_rank_are_one_triangle() -> None:
    mine = (range(8), range(24, 32))
    (call,) = calls((Causal(),), mine, mine, alternate=True)
    assert (call.starts, call.key_starts, call.window) == ((0, 16), (0, 16), (-1, 0))
    assert call.is_view


def test_other_masks_are_not_known() -> None:
    class Mine(SlidingWindow):
        pass

    assert not is_known(PositionMask(lambda query, key: key <= query))
    assert not is_known(Causal() & Mine(3))
    assert is_known(Causal() & Documents((3,)) & SlidingWindow(2))
