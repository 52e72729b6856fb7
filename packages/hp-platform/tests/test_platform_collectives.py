"""Differentiable collectives against their definition, on real Gloo ranks in threads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from hp_platform import (
    all_gather_uneven,
    all_to_all,
    all_to_all_lazy,
    all_to_all_wait,
    initialize,
    is_waited,
    launch_all_to_all,
    reduce_scatter_uneven,
    shutdown,
    start_all_to_all,
    sync_hook,
    wait_tensor,
)
from hp_platform.testing import RankError, run_in_threads

Exchange = Callable[..., Tensor]

# rows[source][destination]; rank 1 sends nothing at all, rank 2 gets nothing at all.
ROWS = [[2, 1, 0], [0, 0, 0], [3, 2, 0]]


def split_phase(x: Tensor, **arguments: object) -> Tensor:
    return all_to_all_wait(start_all_to_all(x, **arguments))  # type: ignore[arg-type]


EXCHANGES = [all_to_all, all_to_all_lazy, split_phase]


def _input(rank: int, rows: list[list[int]], dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(sum(rows[rank]), 3, generator=generator, dtype=dtype)


def _expected(rank: int, rows: list[list[int]], inputs: list[Tensor]) -> Tensor:
    blocks = [x.split(rows[source])[rank] for source, x in enumerate(inputs)]
    return torch.cat(blocks)


def _splits(rank: int, rows: list[list[int]]) -> dict[str, list[int]]:
    return {"output_splits": [row[rank] for row in rows], "input_splits": rows[rank]}


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_uneven_blocks_arrive_in_rank_order(exchange: Exchange, dtype: torch.dtype) -> None:
    def rank_main(group: ProcessGroup) -> Tensor:
        x = _input(group.rank(), ROWS, dtype)
        return wait_tensor(exchange(x, **_splits(group.rank(), ROWS), group=group))

    results = run_in_threads(rank_main, world_size=3)
    inputs = [_input(rank, ROWS, dtype) for rank in range(3)]
    for rank, result in enumerate(results):
        assert torch.equal(result, _expected(rank, ROWS, inputs))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_backward_returns_every_row_to_its_sender(exchange: Exchange) -> None:
    def rank_main(group: ProcessGroup) -> Tensor:
        rank = group.rank()
        x = _input(rank, ROWS).requires_grad_()
        y = exchange(x * 1.0, **_splits(rank, ROWS), group=group)
        (y * (rank + 1)).sum().backward()
        assert x.grad is not None
        return wait_tensor(x.grad)

    for rank, grad in enumerate(run_in_threads(rank_main, world_size=3)):
        receivers = torch.tensor([r + 1.0 for r in range(3)], dtype=torch.float64)
        expected = receivers.repeat_interleave(torch.tensor(ROWS[rank]))
        assert torch.equal(grad, expected[:, None].expand(-1, 3))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_equal_blocks_need_no_splits_and_a_gradient_may_be_strided(exchange: Exchange) -> None:
    def rank_main(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        x = torch.arange(8.0).reshape(4, 2).requires_grad_()
        y = exchange(x + 8 * group.rank(), group=group)
        y.t().matmul(torch.ones(4, 1)).sum().backward()
        assert x.grad is not None
        return wait_tensor(y).detach(), wait_tensor(x.grad)

    first, second = run_in_threads(rank_main, world_size=2)
    assert torch.equal(first[0], torch.tensor([[0.0, 1], [2, 3], [8, 9], [10, 11]]))
    assert torch.equal(second[0], torch.tensor([[4.0, 5], [6, 7], [12, 13], [14, 15]]))
    assert torch.equal(first[1], torch.ones(4, 2))


@settings(deadline=None, max_examples=15)
@given(rows=st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=2, max_size=2))
def test_all_to_all_is_its_own_transpose(rows: list[list[int]]) -> None:
    """<A x, y> summed over ranks equals <x, A' y>, whatever the splits."""

    def rank_main(group: ProcessGroup) -> tuple[float, float]:
        rank = group.rank()
        x = _input(rank, rows).requires_grad_()
        y = all_to_all_lazy(x * 1.0, **_splits(rank, rows), group=group)
        generator = torch.Generator().manual_seed(rank + 7)
        other = torch.randn(y.shape, dtype=torch.float64, generator=generator)
        forward = (y * other).sum()
        forward.backward()
        assert x.grad is not None
        return forward.item(), (x * x.grad).sum().item()

    results = run_in_threads(rank_main, world_size=2)
    assert sum(r[0] for r in results) == pytest.approx(sum(r[1] for r in results), abs=1e-12)


def test_lazy_results_are_unwaited_in_both_directions_until_something_reads_them() -> None:
    def rank_main(group: ProcessGroup) -> dict[str, bool]:
        seen: dict[str, bool] = {}
        x = torch.ones(4, 2, requires_grad=True)
        h = x * 2
        h.register_hook(lambda grad: seen.update(backward=is_waited(grad)))
        y = all_to_all_lazy(h, group=group)
        seen["forward"] = is_waited(y)
        seen["view"] = is_waited(y.view(2, 4))
        y.sum().backward()
        seen["read"] = is_waited(y)
        seen["eager"] = is_waited(all_to_all(h, group=group))
        return seen

    expected = {"forward": False, "view": False, "backward": False, "read": True, "eager": True}
    assert run_in_threads(rank_main, world_size=2) == [expected] * 2


def test_eager_gradient_is_a_plain_tensor() -> None:
    def rank_main(group: ProcessGroup) -> bool:
        x = torch.ones(4, 2, requires_grad=True)
        all_to_all(x, group=group).sum().backward()
        assert x.grad is not None
        return type(x.grad) is Tensor

    assert all(run_in_threads(rank_main, world_size=2))


def test_wait_tensor_keeps_the_graph_and_leaves_plain_tensors_alone() -> None:
    def rank_main(group: ProcessGroup) -> bool:
        x = torch.ones(4, 2, requires_grad=True)
        y = wait_tensor(all_to_all_lazy(x * 3, group=group))
        y.sum().backward()
        assert x.grad is not None
        return is_waited(y) and torch.equal(x.grad, torch.full((4, 2), 3.0)) and wait_tensor(x) is x

    assert all(run_in_threads(rank_main, world_size=2))


def test_split_phase_launches_in_backward_where_forward_waited() -> None:
    """What forward ran between start and wait runs between launch and wait in backward as well."""

    def rank_main(group: ProcessGroup) -> list[str]:
        order: list[str] = []

        def mark(x: Tensor, name: str) -> Tensor:
            return sync_hook(x, backward=lambda: order.append(name))

        x = torch.ones(4, 2, requires_grad=True)
        started = start_all_to_all(mark(x * 2, "gradient of what was sent"), group=group)
        between = mark(x * 3, "computed in between")
        y = mark(all_to_all_wait(started), "gradient of what was received")
        (y + between).sum().backward()
        assert torch.equal(x.grad, torch.full((4, 2), 5.0))  # type: ignore[arg-type]
        return order

    names = ["gradient of what was received", "computed in between", "gradient of what was sent"]
    assert run_in_threads(rank_main, world_size=2) == [names] * 2


def test_split_phase_survives_a_second_backward() -> None:
    def rank_main(group: ProcessGroup) -> Tensor:
        x = torch.ones(4, 2, requires_grad=True)
        y = all_to_all_wait(start_all_to_all(x * 2, group=group)).sum()
        y.backward(retain_graph=True)
        y.backward()
        assert x.grad is not None
        return x.grad

    for grad in run_in_threads(rank_main, world_size=2):
        assert torch.equal(grad, torch.full((4, 2), 4.0))


def test_a_started_exchange_is_waited_for_once() -> None:
    def rank_main(group: ProcessGroup) -> None:
        started = start_all_to_all(torch.ones(2), group=group)
        all_to_all_wait(started)
        with pytest.raises(RuntimeError, match="once"):
            all_to_all_wait(started)

    run_in_threads(rank_main, world_size=2)


def test_launched_exchange_takes_an_unwaited_input() -> None:
    def rank_main(group: ProcessGroup) -> Tensor:
        there = all_to_all_lazy(torch.arange(2.0) + 2 * group.rank(), group=group)
        return launch_all_to_all(there, group=group).wait()

    first, second = run_in_threads(rank_main, world_size=2)
    assert first.tolist() == [0, 1]
    assert second.tolist() == [2, 3]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_recomputation_exchanges_again(exchange: Exchange, use_reentrant: bool) -> None:
    def rank_main(group: ProcessGroup) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return torch.exp(exchange(torch.sin(x), **_splits(group.rank(), ROWS), group=group))

        x = _input(group.rank(), ROWS).requires_grad_()
        y = checkpoint(block, x, use_reentrant=use_reentrant)
        y.sum().backward()
        assert x.grad is not None
        return wait_tensor(x.grad)

    for rank, grad in enumerate(run_in_threads(rank_main, world_size=3)):
        x = _input(rank, ROWS).requires_grad_()
        torch.exp(torch.sin(x)).sum().backward()
        assert torch.equal(grad, x.grad)  # type: ignore[arg-type]


# The compiler makes such an object for itself.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("exchange", [all_to_all, all_to_all_lazy])
def test_a_compiled_region_may_exchange(exchange: Exchange) -> None:
    def function(x: Tensor, group: ProcessGroup) -> Tensor:
        return exchange(x * 2, output_splits=[4], input_splits=[4], group=group) * 3

    try:
        control = initialize(device_type="cpu").control
        x = torch.arange(4.0).requires_grad_()
        y = torch.compile(function, backend="aot_eager", fullgraph=True)(x, control)
        y.sum().backward()
    finally:
        shutdown()
    assert y.tolist() == [0.0, 6.0, 12.0, 18.0]
    assert torch.equal(x.grad, torch.full((4,), 6.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"group size \(2\) must divide rows of x \(5\)"),
        ({"input_splits": [2, 3]}, "must be given together"),
        ({"output_splits": [2, 3]}, "must be given together"),
        ({"output_splits": [1, 1, 1], "input_splits": [2, 3]}, r"len\(output_splits\) \(3\)"),
        ({"output_splits": [1, 1], "input_splits": [2, 2]}, r"\(4\) must equal rows of x \(5\)"),
        ({"output_splits": [1, -1], "input_splits": [2, 3]}, "must not be negative"),
    ],
)
@pytest.mark.parametrize("exchange", [all_to_all, all_to_all_lazy, launch_all_to_all, split_phase])
def test_wrong_splits_are_refused_before_anything_is_sent(
    exchange: Exchange, arguments: dict[str, list[int]], message: str
) -> None:
    def rank_main(group: ProcessGroup) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            exchange(torch.ones(5, 2), **arguments, group=group)
        assert str(caught.value).startswith(f"rank {group.rank()} of 2: ")
        # The group is still in step.
        all_to_all(torch.ones(2), group=group)

    run_in_threads(rank_main, world_size=2)


def test_a_scalar_cannot_be_exchanged() -> None:
    run = partial(run_in_threads, lambda g: all_to_all(torch.tensor(1.0), group=g), world_size=1)
    with pytest.raises(RankError, match=r"x.ndim \(0\) must be at least 1"):
        run()


SIZES = [[3, 0, 2], [2, 2, 2]]


def _shard(rank: int, sizes: list[int], dim: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    shard = torch.randn(sizes[rank], 2, dtype=torch.float64, generator=generator)
    return shard.movedim(0, dim)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_concatenates_shards_and_backward_sums_over_ranks(
    sizes: list[int], dim: int
) -> None:
    def rank_main(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        x = _shard(group.rank(), sizes, dim).requires_grad_()
        y = all_gather_uneven(x, sizes=sizes, dim=dim, group=group)
        assert not y._is_view()  # or FSDP2 warns of the module that returns it
        (y.pow(2) * (group.rank() + 1)).sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    whole = torch.cat([_shard(rank, sizes, dim) for rank in range(3)], dim)
    for rank, (y, grad) in enumerate(run_in_threads(rank_main, world_size=3)):
        assert torch.equal(y, whole)
        torch.testing.assert_close(grad, 2 * 6 * _shard(rank, sizes, dim), rtol=1e-12, atol=0)


@pytest.mark.parametrize("by_exchange", [True, False])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter_sums_shards_and_backward_gathers(
    dim: int, sizes: list[int], by_exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_exchange:  # Gloo has the reduction of other backends too
        monkeypatch.setattr("hp_platform._internals.backend_name", lambda *_: "another")
    length = sum(sizes)
    whole = torch.arange(2.0 * length, dtype=torch.float64).reshape(length, 2).movedim(0, dim)

    def rank_main(group: ProcessGroup) -> tuple[Tensor, Tensor]:
        x = (whole * (group.rank() + 1)).requires_grad_()
        y = reduce_scatter_uneven(x, sizes=sizes, dim=dim, group=group)
        assert not y._is_view()  # or FSDP2 warns of the module that returns it
        (y * (group.rank() + 1)).sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    parts = (whole * 6).split(sizes, dim)
    scale = torch.tensor([1.0, 2, 3], dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
    expected = scale[:, None].expand(length, 2).movedim(0, dim)
    for (y, grad), part in zip(run_in_threads(rank_main, world_size=3), parts, strict=True):
        assert torch.equal(y, part)
        assert torch.equal(grad, expected)


def test_shards_may_all_be_empty() -> None:
    def rank_main(group: ProcessGroup) -> Tensor:
        y = all_gather_uneven(torch.ones(0, 2), sizes=[0, 0], group=group)
        return reduce_scatter_uneven(y, sizes=[0, 0], group=group)

    assert [y.shape for y in run_in_threads(rank_main, world_size=2)] == [(0, 2), (0, 2)]


@pytest.mark.parametrize(
    ("sizes", "dim", "message"),
    [
        ([3], 0, r"len\(sizes\) \(1\) must equal the group size \(2\)"),
        ([3, -1], 0, "must not be negative"),
        ([2, 2], 0, r"\(2\) must equal the length of x \(3\)"),
        ([3, 3], 2, r"dim \(2\) must be in \[-2, 2\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: list[int], dim: int, message: str) -> None:
    def rank_main(group: ProcessGroup) -> None:
        with pytest.raises(ValueError, match=message):
            all_gather_uneven(torch.ones(3, 2), sizes=sizes, dim=dim, group=group)

    run_in_threads(rank_main, world_size=2)


def test_reduce_scatter_refuses_sizes_that_do_not_add_up() -> None:
    def rank_main(group: ProcessGroup) -> None:
        with pytest.raises(
            ValueError, match=r"sum\(sizes\) \(4\) must equal the length of x \(5\)"
        ):
            reduce_scatter_uneven(torch.ones(5), sizes=[2, 2], group=group)

    run_in_threads(rank_main, world_size=2)
