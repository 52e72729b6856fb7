"""Gathers between token order and expert order."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hp_expert import gather_slots, sort_by_expert, sum_slots
from hp_expert.permute import permute_slots

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
