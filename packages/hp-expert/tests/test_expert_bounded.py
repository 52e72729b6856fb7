"""Buffers of a fixed size: no host reads, constant shapes, and an overflow that nobody misses."""

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_expert import (
    BoundedAllToAllDispatcher,
    BufferOverflowError,
    GroupedExperts,
    LocalDispatcher,
    RunAhead,
    rows_per_pair,
)
from hp_expert.testing import Case, host_reads
from hp_expert.testing.problem import Batch, apply_experts, make_batch, make_matrices
from hp_platform import PeerError, RankInfo, initialize, shutdown
from hp_platform.testing import run_distributed, run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

CASE = Case(num_experts=8, top_k=2, num_tokens=10)


def bounded(group: dist.ProcessGroup, num_rows: int, **options: Any) -> BoundedAllToAllDispatcher:
    return BoundedAllToAllDispatcher(group, CASE.num_experts, num_rows, "cpu", **options)


def forward(
    dispatcher: BoundedAllToAllDispatcher, batch: Batch, compute: Callable[[Any], Tensor]
) -> Tensor:
    rows, state = dispatcher.prepare(batch.x, batch.experts, batch.weights)
    rows, state = dispatcher.launch_dispatch(rows, state)
    out = compute(dispatcher.finish_dispatch(rows, state))
    return dispatcher.finish_combine(dispatcher.launch_combine(out, state), state)


@given(st.integers(1, 200), st.integers(1, 8), st.integers(1, 16), st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None, max_examples=50)
def test_a_buffer_for_the_worst_case_holds_every_routing(
    num_tokens: int, top_k: int, num_local: int, num_ranks: int
) -> None:
    num_experts = num_local * num_ranks
    top_k = min(top_k, num_experts)
    largest = rows_per_pair(num_tokens, top_k, num_experts, num_ranks, factor=math.inf)
    assert largest == num_tokens * min(top_k, num_local)
    balanced = rows_per_pair(num_tokens, top_k, num_experts, num_ranks, factor=1)
    assert balanced == min(-(-num_tokens * top_k // num_ranks), largest)
    with pytest.raises(ValueError, match=r"factor \(0.5\) must be at least 1"):
        rows_per_pair(num_tokens, top_k, num_experts, num_ranks, factor=0.5)


def reads_and_shapes() -> list[Any]:
    """Two routings with other counts, through all calls and backward."""
    group = dist.group.WORLD
    assert group is not None
    dispatcher, found = bounded(group, 30), []
    for routing in ("random", "all tokens choose the same experts", "some slots dropped"):
        batch = make_batch(CASE, group.rank(), group.size(), routing=routing)
        shapes: list[Any] = []

        def double(arrived: Any, shapes: list[Any] = shapes) -> Tensor:
            shapes += [t.shape for t in arrived if isinstance(t, Tensor)]
            out: Tensor = arrived.rows * arrived.weights * 2
            return out

        with host_reads() as reads:
            y = forward(dispatcher, batch, double)
            y.square().sum().backward()
        dispatcher.check()
        assert batch.x.grad is not None
        found.append((reads, shapes))
    return found


def test_the_host_is_never_read_and_shapes_do_not_depend_on_the_routing() -> None:
    for found in run_distributed(reads_and_shapes, world_size=2):
        for reads, shapes in found:
            assert reads == []
            assert shapes == found[0][1]
            assert shapes[0] == (2 * 30, CASE.dim)


@pytest.mark.parametrize("crowded", [0, 2])
def test_a_buffer_that_overflows_on_one_rank_poisons_all_until_they_are_told(crowded: int) -> None:
    """Only rank `crowded` has more than three rows for a rank, and only for the first one."""

    def rank_main(group: dist.ProcessGroup) -> None:
        dispatcher = bounded(group, 3)
        for _ in range(2):
            experts = torch.arange(8).view(4, 2)
            if group.rank() == crowded:
                experts = experts % 2
            x = torch.randn(4, CASE.dim, dtype=torch.float64, requires_grad=True)
            batch = Batch(x, experts, torch.rand(4, 2, requires_grad=True))
            y = forward(dispatcher, batch, lambda arrived: arrived.rows * 2)
            assert y.isnan().all()
            y.sum().backward()
            assert x.grad is not None
            assert x.grad[0].isnan().all()  # of a token that fitted
            forward(dispatcher, fitting(group), lambda arrived: arrived.rows)
            message = r"rows from one rank to another \(8\) must not exceed rows_per_pair \(3\)"
            with pytest.raises(BufferOverflowError, match=message) as caught:
                dispatcher.check()
            assert caught.value.rows_needed == 8
            dispatcher.check()

    def fitting(group: dist.ProcessGroup) -> Batch:
        x = torch.randn(1, CASE.dim, dtype=torch.float64)
        return Batch(x, torch.tensor([[2 * group.rank(), 0]]), torch.rand(1, 2))

    run_in_threads(rank_main, world_size=4)


def test_what_an_overflow_makes_nan_does_not_say_how_many_rows_there_are() -> None:
    """A router sends all tokens that are NaN, as they are in later layers, to the same experts."""

    def rank_main(group: dist.ProcessGroup) -> None:
        dispatcher = bounded(group, 3)
        first, later = torch.tensor([[0, 1], [2, 4], [0, 5]]), torch.tensor([[0, 1]] * 3)
        for experts, weight in ((first, 1.0), (later, math.nan)):
            x = torch.full((3, CASE.dim), weight, dtype=torch.float64)
            batch = Batch(x, experts, torch.full((3, 2), weight))
            y = forward(dispatcher, batch, lambda arrived: arrived.rows)
            assert y.isnan().all()
        with pytest.raises(BufferOverflowError) as caught:
            dispatcher.check()
        assert caught.value.rows_needed == 4

    run_in_threads(rank_main, world_size=2)


def test_a_buffer_that_is_just_large_enough_gives_the_right_answer() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        batch = make_batch(CASE, group.rank(), group.size())
        ranks = batch.experts.flatten() // 4
        told = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
        dist.all_gather(told, ranks.bincount(minlength=2), group=group)
        needed = int(torch.stack(told).max())
        matrices = make_matrices(CASE, group.rank(), group.size())
        enough, short = bounded(group, needed), bounded(group, needed - 1)
        y = forward(enough, batch, lambda arrived: apply_experts(arrived, matrices))
        enough.check()
        assert y.isfinite().all()
        y = forward(short, batch, lambda arrived: apply_experts(arrived, matrices))
        assert y.isnan().all()
        with pytest.raises(BufferOverflowError) as caught:
            short.check()
        assert caught.value.rows_needed == needed

    run_in_threads(rank_main, world_size=2)


def test_padding_arrives_as_zeros_and_what_experts_make_of_it_is_never_read() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        dispatcher = bounded(group, 25)
        batch = make_batch(CASE, group.rank(), group.size(), routing="some slots dropped")

        def compute(arrived: Any) -> Tensor:
            num_valid = int(arrived.num_tokens_per_expert.sum())
            padding = arrived.order[num_valid:]
            assert not arrived.rows[padding].any()
            assert not arrived.weights[padding].any()
            out: Tensor = (arrived.rows * arrived.weights).index_fill(0, padding, math.nan)
            return out

        y = forward(dispatcher, batch, compute)
        weights = batch.weights
        assert weights is not None
        scale = weights.where(batch.experts >= 0, 0).sum(1, keepdim=True)
        assert torch.allclose(y, batch.x * scale, rtol=1e-13)
        y.sum().backward()
        assert batch.x.grad is not None
        assert torch.allclose(batch.x.grad, scale.expand_as(batch.x), rtol=1e-13)

    run_in_threads(rank_main, world_size=2)


def test_grouped_experts_work_on_bounded_buffers() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        experts = GroupedExperts(8, CASE.dim, 6, dtype=torch.float64)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        found = []
        for dispatcher in (bounded(group, 20), LocalDispatcher(8)):
            batch = make_batch(CASE, group.rank(), group.size(), routing="some slots dropped")
            y = forward(dispatcher, batch, experts)  # type: ignore[arg-type]
            y.sin().sum().backward()
            assert batch.weights is not None
            found.append([y, batch.x.grad, batch.weights.grad, experts.w1.grad])
            experts.zero_grad()
        for actual, expected in zip(*found, strict=True):
            assert actual is not None
            assert torch.allclose(actual, expected, rtol=1e-12, atol=1e-13)

    run_in_threads(rank_main, world_size=1)


def wrong_experts(rank: int) -> Tensor:
    experts = torch.zeros(3, 2, dtype=torch.int64)
    if rank == 1:
        experts[0] = torch.tensor([8, -2])
    return experts


def test_experts_that_do_not_exist_poison_all_ranks_and_raise_at_the_check() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        dispatcher = bounded(group, 20)
        batch = Batch(torch.ones(3, CASE.dim), wrong_experts(group.rank()), None)
        y = forward(dispatcher, batch, lambda arrived: arrived.rows)
        assert y.isnan().all()
        with pytest.raises(ValueError, match=r"or -1 for none, but up to 2 of a rank are not"):
            dispatcher.check()

    run_in_threads(rank_main, world_size=4)


def test_ranks_with_other_numbers_of_experts_find_out_at_the_check() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        num_experts = 16 if group.rank() else 8
        dispatcher = BoundedAllToAllDispatcher(group, num_experts, 20, "cpu")
        batch = make_batch(CASE, group.rank(), group.size())
        y = forward(dispatcher, batch, lambda arrived: arrived.rows)
        assert y.isnan().all()
        with pytest.raises(ValueError, match="num_experts must be of one kind on all ranks"):
            dispatcher.check()

    run_in_threads(rank_main, world_size=2)


def test_with_a_control_group_every_rank_raises_before_anything_is_sent() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        batch = make_batch(CASE, group.rank(), group.size())
        last = group.rank() == group.size() - 1
        dispatcher = bounded(group, 20, control=group)
        with pytest.raises(ValueError if last else PeerError, match="rows of experts"):
            dispatcher.prepare(batch.x, batch.experts[:-1] if last else batch.experts)
        with pytest.raises(ValueError, match=r"x \(width 8, .*must equal that of rank"):
            dispatcher.prepare(batch.x.float() if last else batch.x, batch.experts)
        uneven = bounded(group, 20 + last, control=group)
        with pytest.raises(
            ValueError, match=r"rows_per_pair \(\[20, 20, 20, 21\]\) must be the same"
        ):
            uneven.prepare(batch.x, batch.experts)

    run_in_threads(rank_main, world_size=4, timeout=20)


def test_sizes_that_cannot_be_are_refused() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"num_experts \(7\) must be divisible by the size"):
            BoundedAllToAllDispatcher(group, 7, 3, "cpu")
        with pytest.raises(ValueError, match=r"rows_per_pair \(0\) must be at least 1"):
            bounded(group, 0)

    run_in_threads(rank_main, world_size=2)


def test_threads_that_overflow_at_once_are_all_noted() -> None:
    """The largest need is kept, whichever thread comes last."""

    def rank_main(group: dist.ProcessGroup) -> None:
        dispatcher = bounded(group, 1)

        def work(num_tokens: int) -> None:
            x, experts = torch.ones(num_tokens, CASE.dim), torch.zeros(num_tokens, 2).long()
            for _ in range(20):
                dispatcher.prepare(x, experts)

        threads = [threading.Thread(target=partial(work, count)) for count in (3, 9, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(BufferOverflowError) as caught:
            dispatcher.check()
        assert caught.value.rows_needed == 18

    run_in_threads(rank_main, world_size=1)


def test_every_prepare_marks_the_bound_on_running_ahead() -> None:
    marks = []

    class Mark:
        def record(self) -> None:
            marks.append("record")

        def synchronize(self) -> None:
            marks.append("wait")

    def rank_main(group: dist.ProcessGroup) -> None:
        run_ahead = RunAhead(2, make_mark=lambda _: Mark())
        dispatcher = bounded(group, 30, run_ahead=run_ahead)
        batch = make_batch(CASE, 0, 1)
        for _ in range(4):
            forward(dispatcher, batch, lambda arrived: arrived.rows)

    run_in_threads(rank_main, world_size=1)
    assert marks == ["record", "record", "record", "wait", "record", "wait"]


def graph_main(address: str) -> list[bool]:
    """Capture forward and backward of a layer, replay with other tokens and routing."""
    shutdown()
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cuda", init_method=address)
    group = dist.group.WORLD
    assert group is not None
    case = Case(num_experts=8, dim=64, num_tokens=64, dtype=torch.bfloat16, device=runtime.device)
    rank, size = group.rank(), group.size()
    experts = GroupedExperts(8, 64, 32, device=runtime.device, dtype=torch.bfloat16)
    dispatcher = BoundedAllToAllDispatcher(group, 8, 2 * 64 * 2, runtime.device)
    held = make_batch(case, 0, size)  # every rank has as many tokens
    assert held.weights is not None
    compute: Any = experts if size == 1 else lambda arrived: arrived.rows * arrived.weights[:, :1]

    def step() -> tuple[Tensor, Tensor]:
        y = forward(dispatcher, held, compute)
        (dx,) = torch.autograd.grad(y.float().square().sum(), held.x)
        return y.detach(), dx

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph, same = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        y, dx = step()
    for seed in range(3):
        fresh = make_batch(case, 0, size, seed=10 * rank + seed)
        with torch.no_grad():
            held.x.copy_(fresh.x)
            held.experts.copy_(fresh.experts)
        graph.replay()
        replayed = (y.clone(), dx.clone())
        with host_reads("cuda") as reads:
            eager = step()
        same.append(reads == [] and all(map(torch.equal, replayed, eager)))
        dispatcher.check()
    with torch.no_grad():
        held.experts.zero_()
    graph.replay()
    same.append(bool(y.isfinite().all()))
    shutdown()
    return same


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_graph_replays_other_routings(tmp_path: Any) -> None:
    world_size = torch.cuda.device_count()
    address = f"file://{tmp_path}/rendezvous"
    for same in run_distributed(graph_main, address, world_size=world_size, timeout=120):
        assert all(same)
