"""The plan of a rank: every pair that a mask allows is in one block, and few others are."""

from itertools import chain

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hp_context import (
    BlockKind,
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Mask,
    PositionMask,
    SequenceLayout,
    SlidingWindow,
    mask_tensor,
)
from hp_context.masks.blocks import QueryRun, plan

SEQ = 24
odd = PositionMask(lambda query, key: (query * key) % 3 == 1)
masks = st.one_of(
    st.sampled_from([Full(), Causal(), odd]),
    st.builds(SlidingWindow, st.integers(0, 9), st.integers(0, 3)),
    st.sampled_from([Documents((1, 7, 3, 13)), Documents((12, 12)), Documents((24,))]),
)
combined = st.one_of(masks, st.builds(lambda a, b: a & b, masks, masks))


def chunked(order: list[int]) -> list[range]:
    return [range(4 * i, 4 * i + 4) for i in order]


parts = st.permutations(range(6)).map(lambda order: chunked(list(order)))


@settings(deadline=None)
@given(combined, parts, parts, st.integers(1, 6), st.integers(1, 9))
@example(odd & Causal(), chunked([*range(6)]), chunked([*range(6)]), 6, 1)
@example(Causal() & odd, chunked([*range(6)]), chunked([*range(6)]), 6, 1)
def test_each_allowed_pair_is_in_one_block(
    mask: Mask, queries: list[range], keys: list[range], taken: int, min_run: int
) -> None:
    queries = queries[:taken]
    query_at, key_at = (list(chain(*runs)) for runs in (queries, keys))
    computed = torch.zeros(SEQ, SEQ, dtype=torch.int64)
    allowed = mask_tensor(mask, SEQ)
    for run in plan(mask, queries, keys, min_run=min_run):
        assert query_at[run.start : run.start + len(run.query)] == list(run.query)
        for block in run.blocks:
            assert key_at[block.start : block.start + len(block.key)] == list(block.key)
            rows = slice(run.query.start, run.query.stop)
            columns = slice(block.key.start, block.key.stop)
            inside = allowed[rows, columns]
            if block.kind is BlockKind.FULL:
                assert inside.all()
            elif block.kind is BlockKind.CAUSAL:
                assert run.query == block.key
                assert torch.equal(inside, torch.ones_like(inside).tril())
            else:
                assert block.kind is BlockKind.PARTIAL
            computed[rows, columns] += inside
    expected = torch.zeros_like(computed)
    expected[query_at] = allowed[query_at].long()
    assert torch.equal(computed, expected)


def costs(mask: Mask, layout: SequenceLayout, *, seq: int, ranks: int) -> list[int]:
    """Scores that each rank computes."""
    return [
        sum(run.cost for run in plan(mask, runs, [range(seq)])) for runs in layout.runs(seq, ranks)
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_head_tail_gives_all_ranks_the_same_half_of_the_causal_scores(ranks: int) -> None:
    seq = 128 * ranks
    each = costs(Causal(), HeadTail(), seq=seq, ranks=ranks)
    assert len(set(each)) == 1
    assert sum(each) == seq * (seq + 1) // 2


def test_contiguous_parts_leave_the_last_rank_most_of_the_causal_scores() -> None:
    each = costs(Causal(), Contiguous(), seq=512, ranks=4)
    assert sum(each) == 512 * 513 // 2
    assert each[3] > 6 * each[0]


def kinds(runs: list[QueryRun]) -> list[list[tuple[int, int, BlockKind]]]:
    return [[(b.key.start, b.key.stop, b.kind) for b in run.blocks] for run in runs]


def test_a_causal_part_takes_two_kernel_calls() -> None:
    planned = plan(Causal(), [range(256, 384)], [range(512)])
    assert kinds(planned) == [[(0, 256, BlockKind.FULL), (256, 384, BlockKind.CAUSAL)]]


def test_long_documents_need_no_mask_tensor() -> None:
    mask = Causal() & Documents((100, 300, 112))
    planned = plan(mask, [range(256)], [range(512)])
    assert kinds(planned) == [
        [(0, 100, BlockKind.CAUSAL)],
        [(100, 256, BlockKind.CAUSAL)],
    ]
    later = plan(mask, [range(256, 512)], [range(512)])
    assert kinds(later) == [
        [(100, 256, BlockKind.FULL), (256, 400, BlockKind.CAUSAL)],
        [(400, 512, BlockKind.CAUSAL)],
    ]


def test_short_documents_share_blocks() -> None:
    mask = Causal() & Documents((8,) * 64)
    planned = plan(mask, [range(256)], [range(512)])
    assert len(planned) == 4
    assert all(len(run.blocks) == 1 for run in planned)


def test_a_window_costs_about_twice_its_width_for_each_query() -> None:
    planned = plan(SlidingWindow(127), [range(1024, 2048)], [range(4096)])
    assert sum(run.cost for run in planned) <= 1024 * 256


def test_queries_that_see_nothing_have_no_blocks() -> None:
    (run,) = plan(Causal(), [range(4)], [range(4, 8)])
    assert (run.query, run.blocks) == (range(4), ())


def test_whole_blocks_side_by_side_are_one_call() -> None:
    """The tail of rank 0 sees both parts of rank 2 of four whole, as a ring brings them."""
    (run,) = plan(Causal(), [range(28, 32)], [range(8, 12), range(20, 24)])
    assert len(run.blocks) == 2
    ((columns, block),) = run.calls
    assert (columns, block.kind) == (slice(0, 8), BlockKind.FULL)
    (apart,) = plan(Causal(), [range(20, 24)], [range(8, 12), range(20, 24), range(4)])
    kinds = [(columns, block.kind) for columns, block in apart.calls]
    assert kinds == [
        (slice(0, 4), BlockKind.FULL),
        (slice(4, 8), BlockKind.CAUSAL),
        (slice(8, 12), BlockKind.FULL),
    ]
