"""Gathers between token order and expert order."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_expert import Permutation, gather_slots, sort_by_expert, sum_slots
from hp_expert.permute import gather_and_sum, gather_rows, permute_slots

choices = st.integers(1, 4).flatmap(
    lambda k: st.lists(st.lists(st.integers(0, 5), min_size=k, max_size=k), max_size=12).map(
        lambda rows: torch.tensor(rows, dtype=torch.int64).view(len(rows), k)
    )
)


@given(choices)
@settings(deadline=None, max_examples=50)
def test_slots_of_an_expert_stay_in_token_order(experts: Tensor) -> None:
    permutation = sort_by_expert(experts)
    flat = experts.flatten().tolist()
    assert permutation.order.tolist() == sorted(range(len(flat)), key=flat.__getitem__)
    assert permutation.token.tolist() == [s // experts.shape[1] for s in permutation.order.tolist()]
    assert permutation.inverse.shape == experts.shape
    slots = permutation.order[permutation.inverse.flatten()]
    assert slots.tolist() == list(range(len(flat)))


@given(choices, st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
@settings(deadline=None, max_examples=50)
def test_gathering_then_summing_multiplies_by_the_number_of_choices(
    experts: Tensor, dtype: torch.dtype
) -> None:
    permutation = sort_by_expert(experts)
    x = torch.randn(experts.shape[0], 3).to(dtype)
    rows = gather_slots(x, permutation)
    assert torch.equal(rows, x[permutation.token])
    y = sum_slots(rows, permutation)
    assert y.dtype == dtype
    assert torch.allclose(y, x * experts.shape[1])


def test_both_gathers_and_their_backwards_are_right() -> None:
    permutation = sort_by_expert(torch.tensor([[3, 0], [1, 3], [0, 1], [2, 0]]))
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: gather_slots(t, permutation), (x,))
    assert torch.autograd.gradgradcheck(lambda t: gather_slots(t, permutation), (x,))
    assert torch.autograd.gradcheck(lambda t: sum_slots(t, permutation), (rows,))
    assert torch.autograd.gradcheck(lambda t: permute_slots(t, permutation), (values,))


def test_sums_of_bf16_rows_are_rounded_once() -> None:
    torch.manual_seed(0)
    experts = torch.stack([torch.randperm(8)[:4] for _ in range(64)])
    permutation = sort_by_expert(experts)
    rows = torch.randn(256, 16).bfloat16()
    exact = rows.double()[permutation.inverse.flatten()].view(64, 4, 16).sum(1)
    assert torch.equal(sum_slots(rows, permutation), exact.float().bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_weighted_sums_of_infinite_rows_are_infinite(dtype: torch.dtype) -> None:
    permutation = sort_by_expert(torch.tensor([[1, 0], [0, 1]]))
    rows, weights = torch.ones(4, 3, dtype=dtype), torch.full((2, 2), 0.5, dtype=dtype)
    rows[permutation.inverse[0, 1]] = math.inf
    expected = torch.tensor([[math.inf] * 3, [1.0] * 3], dtype=dtype)
    assert torch.equal(sum_slots(rows, permutation, weights), expected)


def test_reruns_have_the_same_bits() -> None:
    torch.manual_seed(0)
    experts = torch.randint(0, 3, (500, 4))
    x, upstream = torch.randn(500, 8), torch.randn(500, 8)

    def run() -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        permutation = sort_by_expert(experts)
        y = sum_slots(torch.sin(gather_slots(leaf, permutation)), permutation)
        (gradient,) = torch.autograd.grad(y, leaf, upstream)
        return y.detach(), gradient

    first, second = run(), run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def with_gaps() -> Permutation:
    """Slots of four tokens: one is dropped of the first, none of the second, both of the third."""
    experts = torch.tensor([[3, -1], [1, 3], [-1, -1], [2, 0]])
    return sort_by_expert(experts).first(5)


def with_padding() -> Permutation:
    """The same slots with a row of padding in the middle and two at the end."""
    whole = with_gaps()
    order = torch.tensor([7, 2, -1, 6, 0, 3, -1, -1])
    token = torch.tensor([3, 1, -1, 3, 0, 1, -1, -1])
    inverse = torch.tensor([[4, -1], [1, 5], [-1, -1], [3, 0]])
    return whole._replace(order=order, token=token, inverse=inverse, padded=True)


def test_dropped_slots_come_last_and_are_left_out() -> None:
    permutation = with_gaps()
    assert permutation.partial
    assert permutation.order.tolist() == [7, 2, 6, 0, 3]
    assert permutation.token.tolist() == [3, 1, 3, 0, 1]
    assert permutation.inverse.tolist() == [[3, -1], [1, 4], [-1, -1], [2, 0]]
    whole = sort_by_expert(torch.tensor([[1, 0]]))
    assert whole.first(2) is whole


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int64])
def test_dropped_slots_come_after_those_of_every_expert(dtype: torch.dtype) -> None:
    experts = torch.tensor([[127, -1], [-1, 127], [3, 127]], dtype=dtype)
    assert sort_by_expert(experts).order.tolist() == [4, 0, 3, 5, 1, 2]


@pytest.mark.parametrize("make", [with_gaps, with_padding])
def test_gathers_with_gaps_are_right_in_both_directions(make: Callable[[], Permutation]) -> None:
    permutation = make()
    num_rows = permutation.token.numel()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(num_rows, 3, dtype=torch.float64, requires_grad=True)
    values = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: gather_slots(t, permutation), (x,))
    assert torch.autograd.gradgradcheck(lambda t: gather_slots(t, permutation), (x,))
    assert torch.autograd.gradcheck(lambda t: sum_slots(t, permutation), (rows,))
    assert torch.autograd.gradcheck(lambda t: permute_slots(t, permutation), (values,))
    gathered = gather_slots(x, permutation)
    for position, token in enumerate(permutation.token.tolist()):
        expected = x[token] if token >= 0 else torch.zeros_like(x[0])
        assert torch.equal(gathered[position], expected)


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rows_of_no_slot_leak_nothing(dtype: torch.dtype, num_choices: int) -> None:
    rows = torch.randn(num_choices + 2, 5).to(dtype)
    rows[[0, -1]] = math.nan
    inverse = torch.full((3, num_choices), -1)
    inverse[1] = torch.arange(1, num_choices + 1)
    y = gather_and_sum(rows, inverse, partial=True)
    wide = torch.promote_types(dtype, torch.float32)
    assert y.dtype == dtype
    assert not y[[0, 2]].any()
    assert torch.allclose(y[1], rows[1:-1].to(wide).sum(0).to(dtype))


def test_a_second_derivative_of_weighted_sums_is_refused() -> None:
    permutation = sort_by_expert(torch.tensor([[3, 0], [1, 3]]))
    rows, weights = torch.randn(4, 3, requires_grad=True), torch.rand(2, 2, requires_grad=True)
    y = sum_slots(rows, permutation, weights).sum()
    (gradient,) = torch.autograd.grad(y, rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (gradient.square().sum() + y).backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_may_be_changed_in_place(dtype: torch.dtype) -> None:
    permutation = with_gaps()
    rows = torch.randn(5, 3).to(dtype).requires_grad_()
    weights = torch.rand(4, 2, requires_grad=True)
    for scale in (None, weights):
        y = sum_slots(rows, permutation, scale)
        doubled = 2 * y.detach()
        assert torch.equal(y.mul_(2), doubled)
        y.sum().backward()


def test_without_rows_every_sum_is_zero() -> None:
    nowhere = sort_by_expert(torch.full((3, 2), -1)).first(0)
    rows = torch.empty(0, 4, requires_grad=True)
    y = sum_slots(rows, nowhere)
    assert torch.equal(y, torch.zeros(3, 4))
    y.sum().backward()
    assert rows.grad is not None
    x = torch.ones(3, 4, requires_grad=True)
    gather_slots(x, nowhere).sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 4))  # type: ignore[arg-type]


def test_rows_gathered_ahead_are_not_gathered_again() -> None:
    experts = torch.tensor([[3, -1], [1, 3]])
    permutation = sort_by_expert(experts)
    x = torch.randn(2, 3, requires_grad=True)
    ahead = gather_rows(x, permutation)
    assert not ahead.requires_grad
    rows = gather_slots(x, permutation.first(3), gathered=ahead)
    assert rows.data_ptr() == ahead.data_ptr()
    assert torch.equal(rows, x[[1, 0, 1]])
    (gradient,) = torch.autograd.grad(rows.sum(), x)
    assert torch.equal(gradient, torch.tensor([[1.0] * 3, [2.0] * 3]))
