"""Tokens that cross to a rank once: when it pays, what arrives, and what it gives."""

import math
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_expert import (
    AllToAllDispatcher,
    deduplication_pays,
    dispatch_bytes,
    expected_rows_per_token,
)
from hp_expert.batch import ExpertBatch
from hp_expert.dispatch.deduplicated import unpack
from hp_expert.testing import Case, check_parity
from hp_expert.testing.problem import Batch, apply_experts, make_batch, make_matrices
from hp_platform.testing import run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("num_experts", "top_k", "num_ranks"), [(8, 3, 2), (12, 4, 4), (6, 6, 3)])
def test_expected_rows_are_the_mean_over_all_choices(
    num_experts: int, top_k: int, num_ranks: int
) -> None:
    num_local = num_experts // num_ranks
    choices = list(combinations(range(num_experts), top_k))
    mean = sum(len({e // num_local for e in choice}) for choice in choices) / len(choices)
    assert expected_rows_per_token(num_experts, top_k, num_ranks) == pytest.approx(mean)


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 16), st.integers(8, 10000))
@settings(deadline=None, max_examples=50)
def test_no_token_goes_to_more_ranks_than_it_has_experts(
    num_local: int, top_k: int, num_ranks: int, row_bytes: int
) -> None:
    num_experts = num_local * num_ranks
    top_k = min(top_k, num_experts)
    rows = expected_rows_per_token(num_experts, top_k, num_ranks)
    assert 1 - 1e-9 <= rows <= min(top_k, num_ranks) + 1e-9
    cost = dispatch_bytes(num_experts, top_k, num_ranks, row_bytes=row_bytes, weight_bytes=0)
    assert cost.plain == 4 * top_k * row_bytes
    assert cost.deduplicated == pytest.approx(4 * rows * row_bytes + top_k)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "num_ranks", "pays"),
    [
        (16, 4, 2, True),
        (64, 8, 4, True),
        (64, 8, 8, True),  # 5.4 of 8 rows
        (64, 8, 16, False),  # 6.7 of 8 rows
        (256, 8, 32, False),
        (8, 2, 2, False),  # 1.6 of 2 rows
        (8, 1, 2, False),
    ],
)
def test_it_pays_where_ranks_are_few_and_experts_per_token_many(
    num_experts: int, top_k: int, num_ranks: int, pays: bool
) -> None:
    assert deduplication_pays(num_experts, top_k, num_ranks, row_bytes=4096) == pays
    assert not deduplication_pays(num_experts, top_k, num_ranks, row_bytes=1, weight_bytes=8)


def test_automatic_choice_follows_the_formula_and_one_choice_never_needs_it() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        x, experts = torch.zeros(3, 512), torch.zeros(3, 8, dtype=torch.int64)
        assert AllToAllDispatcher(group, 64).deduplicates(x, experts)
        assert not AllToAllDispatcher(group, 64, False).deduplicates(x, experts)
        assert not AllToAllDispatcher(group, 64).deduplicates(x, experts[:, :2])
        forced = AllToAllDispatcher(group, 64, True)
        assert forced.deduplicates(x, experts[:, :2])
        assert not forced.deduplicates(x, experts[:, :1])
        message = r"deduplicate \(sometimes\) must be True, False or 'auto'"
        with pytest.raises(ValueError, match=message):
            AllToAllDispatcher(group, 64, "sometimes")  # type: ignore[arg-type]

    run_in_threads(rank_main, world_size=2)


def arrived(dispatcher: Any, batch: Batch) -> tuple[ExpertBatch, Any]:
    rows, state = dispatcher.prepare(batch.x, batch.experts, batch.weights)
    rows, state = dispatcher.launch_dispatch(rows, state)
    return dispatcher.finish_dispatch(rows, state), state


def test_a_row_arrives_once_with_all_its_slots() -> None:
    case = Case(num_experts=8, top_k=4)

    def rank_main(group: dist.ProcessGroup) -> None:
        sources = [make_batch(case, rank, group.size()) for rank in range(group.size())]
        dispatcher = AllToAllDispatcher(group, 8, True)
        got, _ = arrived(dispatcher, sources[group.rank()])
        first = group.rank() * 4
        wanted = [
            (source.x[t], [(int(e) - first, source.weights[t, k]) for k, e in enumerate(of_token)])
            for source in sources
            for t, of_token in enumerate(source.experts)
            if source.weights is not None
        ]
        wanted = [(x, [(e, w) for e, w in slots if 0 <= e < 4]) for x, slots in wanted]
        wanted = [(x, slots) for x, slots in wanted if slots]
        assert torch.equal(got.rows, torch.stack([x for x, _ in wanted]))
        assert got.num_slots_per_row == 4
        assert got.weights is not None
        expert_of = {
            slot: e for e, span in enumerate(got.spans()) for slot in got.order[span].tolist()
        }
        assert len(expert_of) == sum(len(slots) for _, slots in wanted)
        for row, (_, slots) in enumerate(wanted):
            for choice, (e, w) in enumerate(slots):
                assert expert_of[row * 4 + choice] == e
                assert got.weights[row, choice] == w
            assert not got.weights[row, len(slots) :].any()

    run_in_threads(rank_main, world_size=2)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_results_are_those_of_one_process(world_size: int, top_k: int) -> None:
    """Also where a token has more experts than a rank, or all of them."""
    case = Case(num_experts=8, top_k=top_k, num_tokens=6)
    run_in_threads(
        lambda group: check_parity(lambda g, e: AllToAllDispatcher(g, e, True), group, case),
        world_size=world_size,
    )


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [0], [3]], ids=str)
def test_a_token_may_choose_an_expert_twice(ranks: list[int]) -> None:
    """On all ranks, or on some: what arrives has as many slots as the source needs."""

    def rank_main(group: dist.ProcessGroup) -> list[Tensor]:
        case, found = Case(num_experts=4), []
        experts = torch.tensor([[3, 1, 2], [0, 3, 1], [1, 0, -1], [2, 0, 3]])
        if group.rank() in ranks:
            experts = torch.tensor([[3, 3, 3], [0, 3, 0], [1, 1, -1], [2, 0, 2]])
        for deduplicate in (True, False):
            generator = torch.Generator().manual_seed(group.rank())
            batch = Batch(
                torch.randn(4, 8, generator=generator, dtype=torch.float64).requires_grad_(),
                experts,
                torch.rand(4, 3, generator=generator, dtype=torch.float64).requires_grad_(),
            )
            dispatcher = AllToAllDispatcher(group, 4, deduplicate)
            got, state = arrived(dispatcher, batch)
            matrices = make_matrices(case, group.rank(), group.size())
            out = apply_experts(got, matrices)
            y = dispatcher.finish_combine(dispatcher.launch_combine(out, state), state)
            y.sin().sum().backward()
            assert batch.weights is not None
            found.append([y, batch.x.grad, batch.weights.grad, matrices.grad])
        for shared, plain in zip(*found, strict=True):
            assert shared is not None
            assert torch.allclose(shared, plain, rtol=1e-13, atol=1e-13)
        return []

    run_in_threads(rank_main, world_size=4)


def test_more_experts_on_a_rank_than_fit_into_a_byte() -> None:
    case = Case(num_experts=258, top_k=2)  # 129 on a rank

    def rank_main(group: dist.ProcessGroup) -> None:
        dispatcher = AllToAllDispatcher(group, 258, True)
        batch = make_batch(case, group.rank(), group.size())
        batch.experts[0] = torch.tensor([128, 257])
        _, state = dispatcher.prepare(batch.x, batch.experts, batch.weights)
        assert state.slots is not None
        assert state.slots.codes.dtype == torch.int32
        check_parity(lambda g, e: AllToAllDispatcher(g, e, True), group, case, routings=["random"])

    run_in_threads(rank_main, world_size=2)


def test_codes_are_numbered_by_their_beginnings() -> None:
    codes = torch.tensor([2 * 3 + 1, 2 * 0, 2 * 1 + 1, 2 * 0 + 1, 2 * 2], dtype=torch.uint8)
    slots, order = unpack(codes, num_slots_per_row=3)
    assert slots.tolist() == [0, 1, 3, 6, 7]
    assert order.tolist() == [1, 6, 3, 7, 0]
    nothing, _ = unpack(codes[:0], num_slots_per_row=3)
    assert nothing.shape == (0,)


def test_ranks_that_deduplicate_and_ranks_that_do_not_find_out() -> None:
    case = Case(num_experts=8, top_k=4)

    def rank_main(group: dist.ProcessGroup) -> None:
        batch = make_batch(case, group.rank(), group.size())
        dispatcher = AllToAllDispatcher(group, 8, group.rank() == 1)
        with pytest.raises(ValueError, match=r"4 of 8 experts.*, deduplicated\)"):
            dispatcher.prepare(batch.x, batch.experts, batch.weights)

    run_in_threads(rank_main, world_size=4, timeout=20)


def test_plain_and_deduplicated_agree_about_every_number_told() -> None:
    """The rows sent are the (token, rank) pairs, and the slots those of the plain exchange."""
    case = Case(num_experts=8, top_k=4, num_tokens=50)

    def rank_main(group: dist.ProcessGroup) -> None:
        batch = make_batch(case, group.rank(), group.size(), routing="some slots dropped")
        _, shared = AllToAllDispatcher(group, 8, True).prepare(batch.x, batch.experts)
        _, plain = AllToAllDispatcher(group, 8, False).prepare(batch.x, batch.experts)
        assert shared.slots is not None
        assert shared.slots.input_splits == plain.input_splits
        assert shared.slots.output_splits == plain.output_splits
        assert shared.counts == plain.counts
        ranks = [{int(e) // 4 for e in chosen if e >= 0} for chosen in batch.experts]
        rows_to = tuple(sum(rank in of_token for of_token in ranks) for rank in range(2))
        assert shared.input_splits == rows_to
        assert math.fsum(rows_to) < sum(plain.input_splits)

    run_in_threads(rank_main, world_size=2)
