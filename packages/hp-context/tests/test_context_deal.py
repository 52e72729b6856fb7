"""Layouts that change by call: who is dealt what, what it costs, and that results are the same."""

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_context import (
    Attention,
    Causal,
    ContextParallel,
    Deal,
    Documents,
    EachSequence,
    Mask,
    SlidingWindow,
    deal_cost,
    deal_documents,
    local_positions,
    mask_tensor,
    masked_attention,
    shard_sequence,
    unshard_sequence,
)
from hp_context.batch import without_deal
from hp_context.batch.deal import _smallest_root
from hp_context.batch.deal_cost import Work
from hp_platform.testing import RankError, run_distributed, watch_operators

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS, SEQ = 4, 64
LENGTHS = [(64,), (1,) * 64, (40, 3, 20, 1), (9, 30, 2, 2, 21), (33, 31), (5, 5, 5, 49)]
MODES = {"gather": (1, False), "ring": (None, True), "heads": (4, False), "hybrid": (2, False)}


def _lengths(seed: int, seq_len: int, largest: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    found: list[int] = []
    while sum(found) < seq_len:
        drawn = min(int(rng.lognormvariate(7.6, 1.1)) + 1, largest)
        found.append(min(drawn, seq_len - sum(found)))
    return tuple(found)


@given(st.integers(2, 400), st.data())
def test_the_size_of_a_swap_is_the_largest_that_moves_no_more_than_wanted(
    distance: int, data: st.DataObject
) -> None:
    most = data.draw(st.integers(1, distance // 2))
    wanted = data.draw(st.floats(0, most * (distance - most), exclude_max=True))
    sizes = range(distance // 2 + 1)
    fitting = [size for size in sizes if size * (distance - size) <= wanted]
    assert _smallest_root(distance, wanted) == max(fitting)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=40),
    st.integers(1, 6),
    st.lists(st.one_of(st.none(), st.integers(0, 30)), min_size=1, max_size=3),
    st.sampled_from([0.0, 1.0, 1e6]),
)
@example([3], 4, [None], 1.0)  # no two pieces of a third of it fit the room of one
def test_every_position_goes_to_one_rank_and_costs_are_those_of_the_mask(
    lengths: list[int], num_ranks: int, windows: list[int | None], pairs_per_key: float
) -> None:
    lengths = [*lengths, -sum(lengths) % num_ranks or num_ranks]
    deal = deal_documents(lengths, num_ranks, windows=windows, pairs_per_key=pairs_per_key)
    assert set(deal.sizes) == {sum(lengths) // num_ranks}
    cost = deal_cost(deal, lengths, windows=windows)
    pairs, fetched = torch.zeros(num_ranks), torch.zeros(num_ranks)
    for window in windows:
        mask: Mask = Causal() & Documents(tuple(lengths))
        allowed = mask_tensor(
            mask if window is None else mask & SlidingWindow(window), deal.seq_len
        )
        for rank, part in enumerate(deal.parts):
            mine = torch.cat([torch.arange(run.start, run.stop) for run in part])
            pairs[rank] += allowed[mine].sum() / len(windows)
            seen = allowed[mine].any(0)
            seen[mine] = False
            fetched[rank] += seen.sum() / len(windows)
    torch.testing.assert_close(torch.tensor(cost.pairs), pairs)
    torch.testing.assert_close(torch.tensor(cost.fetched), fetched)


@pytest.mark.parametrize("node", [4, 8])
def test_nodes_keep_their_documents_and_costs_know_what_is_far(node: int) -> None:
    for seed in range(6):
        lengths = _lengths(seed, 16 * 4096, 6_000)
        costs = [
            deal_cost(deal_documents(lengths, 16, pairs_per_key=0.0, node=near), lengths, node=node)
            for near in (node, None)
        ]
        deal = deal_documents(lengths, 16, pairs_per_key=0.0, node=node)
        assert costs[0].imbalance <= 1.02
        assert sum(costs[0].far) < 0.5 * sum(costs[1].far)
        mask = Causal() & Documents(lengths)
        whole = [
            [run for part in deal.parts[i : i + node] for run in part] for i in range(0, 16, node)
        ]
        for rank in (0, 7, 15):
            seen = torch.zeros(deal.seq_len, dtype=torch.bool)
            for run in deal.parts[rank]:
                for p in range(run.start, run.stop):
                    keys = mask.visible(p)
                    assert keys is not None
                    seen[keys.start : keys.stop] = True
            for run in whole[rank // node]:
                seen[run.start : run.stop] = False
            assert int(seen.sum()) == costs[0].far[rank]


def test_ranks_that_share_heads_are_dealt_to_as_rows_of_them() -> None:
    lengths = _lengths(0, 16 * 4096, 6_000)
    rows = deal_documents(lengths, 8, pairs_per_key=0.0, node=4)
    deal = deal_documents(lengths, 16, pairs_per_key=0.0, node=8, heads=2)
    for row, runs in enumerate(rows.parts):
        mine = [p for part in deal.parts[2 * row : 2 * row + 2] for run in part for p in run]
        assert mine == [p for run in runs for p in run]


@pytest.mark.parametrize("num_ranks", [8, 16, 32])
@pytest.mark.parametrize("windows", [(None,), (None, 1023, 1023, 1023), (1023,)], ids=str)
def test_work_is_even_to_two_percent(num_ranks: int, windows: tuple[int | None, ...]) -> None:
    for seed in range(8):
        lengths = _lengths(seed, 16384 * num_ranks, 131_072)
        deal = deal_documents(lengths, num_ranks, windows=windows, pairs_per_key=0.0)
        assert deal_cost(deal, lengths, windows=windows).imbalance <= 1.02


def test_a_document_that_fits_stays_on_one_rank_and_keys_decide_where_they_are_dear() -> None:
    deal = deal_documents((16,) * 8, 4)
    assert sum(deal_cost(deal, (16,) * 8).fetched) == 0
    lengths = (100, 20, 8)
    near = deal_documents(lengths, 4, pairs_per_key=1e6)
    even = deal_documents(lengths, 4, pairs_per_key=0.0)
    costs = [deal_cost(each, lengths) for each in (near, even)]
    assert sum(costs[0].fetched) < sum(costs[1].fetched)
    assert costs[0].imbalance > costs[1].imbalance


def test_a_deal_is_made_once_and_quickly() -> None:
    assert deal_documents((5, 3), 2) is deal_documents([5, 3], 2)
    work = Work((None, None, 3))
    assert work.kinds == ((None, 2 / 3), (3, 1 / 3))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((range(2),), (range(3, 4),)), "each once"),
        (((range(3),), (range(2, 4),)), "each once"),
        (((range(4),), ()), "positions"),
    ],
)
def test_what_is_no_layout_is_refused(parts: tuple[tuple[range, ...], ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Deal(parts)


def test_lengths_that_ranks_cannot_share_are_refused() -> None:
    for lengths in ((3, 2), (4, 0), ()):
        with pytest.raises(ValueError, match="lengths"):
            deal_documents(lengths, 2)
    with pytest.raises(ValueError, match="windows"):
        deal_documents((4,), 2, windows=(-1,))


def _deals(seed: int) -> Iterator[tuple[tuple[int, ...], Deal]]:
    """Layouts of every kind: planned, of random runs, and with parts of different lengths."""
    for lengths in LENGTHS:
        yield lengths, deal_documents(lengths, RANKS, pairs_per_key=0.0)
    rng = random.Random(seed)
    for lengths in LENGTHS:
        runs = [range(i * 4, i * 4 + 4) for i in range(SEQ // 4)]
        rng.shuffle(runs)
        yield lengths, Deal(tuple(tuple(runs[rank::RANKS]) for rank in range(RANKS)))
        yield (
            lengths,
            Deal((tuple(runs[:7]), tuple(runs[7:8]), tuple(runs[8:10]), tuple(runs[10:]))),
        )


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _whole(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(8, 8), (4, 8), (4, 8), (8, 8)]
    return [
        torch.randn(1, SEQ, *shape, dtype=torch.float64, generator=generator) for shape in shapes
    ]


def _errors(mode: str) -> list[float]:
    degree, ring = MODES[mode]
    cores = [Attention(Causal()), Attention(SlidingWindow(9))]
    context = ContextParallel(degree, ring=ring)
    for core in cores:
        context.apply(core, _world())
    found = []
    for number, (lengths, deal) in enumerate(_deals(0)):
        if len(set(deal.sizes)) > 1 and mode in ("heads", "hybrid"):
            continue
        core = cores[number % 2]
        limits = Documents(lengths)
        whole = _whole(number)
        want = [x.clone().requires_grad_() for x in whole[:3]]
        out = masked_attention(*want, mask=core.mask & limits)
        out.backward(whole[3])
        mine = [shard_sequence(x, _world(), layout=deal).requires_grad_() for x in whole[:3]]
        result = core(*mine, attn_mask=core.mask & limits & deal)
        result.backward(shard_sequence(whole[3], _world(), layout=deal))
        pairs = [(result.detach(), out.detach())]
        pairs += [(a.grad, b.grad) for a, b in zip(mine, want, strict=True)]  # type: ignore[misc]
        for part, full in pairs:
            gathered = unshard_sequence(part, _world(), layout=deal)
            found.append(float((gathered - full).abs().max() / full.abs().max().clamp_min(1.0)))
        places = local_positions(SEQ, _world(), layout=deal)
        assert torch.equal(
            places, shard_sequence(torch.arange(SEQ)[None], _world(), layout=deal)[0]
        )
    return found


@pytest.mark.sample("ring", "hybrid")
@pytest.mark.parametrize("mode", MODES)
def test_a_layout_of_the_call_equals_one_process(mode: str) -> None:
    for errors in run_distributed(partial(_errors, mode), world_size=RANKS):
        assert max(errors) < 1e-12
        assert len(errors) >= 4 * (12 if mode in ("heads", "hybrid") else 18)


def _sent_straight() -> tuple[int, int]:
    """Keys that this rank sends in a forward of two documents on two ranks each, and messages."""
    runs = [range(16), range(32, 48), range(48, 64), range(16, 32)]
    deal = Deal(tuple((run,) for run in runs))
    core = ContextParallel(ring=True).apply(Attention(Causal()), _world())
    q = shard_sequence(_whole(0)[0], _world(), layout=deal)
    mask = Causal() & Documents((32, 32)) & deal
    core(q, q, q, attn_mask=mask)  # ranks compare what they have
    sizes: list[int] = []

    def see(name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        del kwargs
        if name == "c10d::send":
            assert isinstance(args[0], list)
            sizes.extend(x.size(0) for x in args[0])

    with watch_operators(see):
        core(q, q, q, attn_mask=mask)
    return sum(sizes), len(sizes)


def test_in_a_ring_keys_go_straight_to_ranks_that_see_them() -> None:
    sent = run_distributed(_sent_straight, world_size=RANKS)
    assert sent == [(16, 1), (16, 1), (0, 0), (0, 0)]


def _different_deals() -> None:
    rank = _world().rank()
    core = ContextParallel(1).apply(Attention(Causal()), _world())
    runs = [range(32), range(32, 64)]
    deal = Deal(((runs[rank],), (runs[1 - rank],)))
    x = torch.randn(1, 32, 4, 8)
    core(x, x, x, attn_mask=Causal() & Documents((64,)) & deal)


def test_ranks_that_disagree_learn_it() -> None:
    with pytest.raises(RankError, match="masks of ranks"):
        run_distributed(_different_deals, world_size=2)


def _wrong_part() -> None:
    core = ContextParallel(1).apply(Attention(Causal()), _world())
    x = torch.randn(1, 16 if _world().rank() else 32, 4, 8)
    core(x, x, x, attn_mask=Causal() & Deal(((range(32),), (range(32, 64),))))


def test_a_part_of_another_length_than_dealt_is_refused_on_all_ranks() -> None:
    with pytest.raises(RankError, match="what the Deal gives rank 1"):
        run_distributed(_wrong_part, world_size=2)


def _unequal_heads() -> None:
    core = ContextParallel().apply(Attention(Causal()), _world())
    x = torch.randn(1, 24 if _world().rank() else 40, 4, 8)
    core(x, x, x, attn_mask=Causal() & Deal(((range(40),), (range(40, 64),))))


def test_ranks_that_share_heads_need_equal_parts() -> None:
    with pytest.raises(RankError, match="must be equal where 2 ranks share heads"):
        run_distributed(_unequal_heads, world_size=2)


def test_a_call_has_one_layout() -> None:
    one, other = Deal(((range(2),), (range(2, 4),))), Deal(((range(2, 4),), (range(2),)))
    core = Attention(Causal())
    assert without_deal(core.mask & one) == (core.mask, one)
    assert without_deal(one & core.mask & one) == (core.mask, one)
    assert without_deal(one) == (None, one)
    each = EachSequence((Documents((4,)) & one, Documents((1, 3)) & one))
    assert without_deal(each) == (EachSequence((Documents((4,)), Documents((1, 3)))), one)
    for mixed in (one & other, EachSequence((one, other)), EachSequence((one, Documents((4,))))):
        with pytest.raises(ValueError, match="one Deal"):
            without_deal(mixed)


def test_ranks_whose_pieces_are_alike_still_swap_parts_of_them() -> None:
    """Pieces of one length, swapped whole, would move no work; parts of them do."""
    rng = random.Random(6)
    for _ in range(20):
        lengths = [1024] * 24 + [rng.randint(1024, 8192) for _ in range(76)] + [8192] * 23
        lengths.append(32 - sum(lengths) % 32)
        deal = deal_documents(lengths, 32, pairs_per_key=0.0, node=8)
        assert deal_cost(deal, lengths).imbalance < 1.012 * 1.005
