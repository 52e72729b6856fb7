"""Experts with another activation than SwiGLU give what a plain formula gives."""

import pytest
import torch
from torch import Tensor

from hp_expert import ClampedSwiGLU, GroupedExperts, GroupedProducts, SwiGLU
from hp_expert.experts.activation import Activation
from hp_platform.testing import compare


def _clamped(gate: Tensor, up: Tensor, *, limit: float, alpha: float) -> Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(gate * alpha)


def _problem(activation: Activation) -> tuple[GroupedExperts, Tensor, Tensor]:
    torch.manual_seed(0)
    experts = GroupedExperts(3, 8, 6, bias=True, activation=activation, dtype=torch.float64)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    rows = torch.randn(12, 8, dtype=torch.float64, requires_grad=True)
    return experts, rows, torch.tensor([5, 0, 7])


@pytest.mark.parametrize("limit", [1.0, 7.0])
def test_a_clamped_swiglu_is_its_formula(limit: float) -> None:
    experts, rows, counts = _problem(ClampedSwiGLU(limit=limit, alpha=1.5))
    experts(rows, counts).square().sum().backward()
    actual = {n: p.grad.clone() for n, p in experts.named_parameters() if p.grad is not None}
    assert rows.grad is not None
    actual["rows"] = rows.grad.clone()
    experts.zero_grad()
    rows.grad = None
    of = torch.repeat_interleave(counts)
    assert experts.b1 is not None
    assert experts.b2 is not None
    assert experts.b3 is not None
    gate = torch.einsum("nd,nhd->nh", rows, experts.w1[of]) + experts.b1[of]
    up = torch.einsum("nd,nhd->nh", rows, experts.w3[of]) + experts.b3[of]
    assert bool((gate > limit).any()) == (limit == 1.0)
    h = _clamped(gate, up, limit=limit, alpha=1.5)
    y = torch.einsum("nh,ndh->nd", h, experts.w2[of]) + experts.b2[of]
    y.square().sum().backward()
    assert rows.grad is not None
    expected = {n: p.grad for n, p in experts.named_parameters() if p.grad is not None}
    comparison = compare(actual, expected | {"rows": rows.grad}, bound=1e-13)
    assert comparison.ok, comparison


class _InTurn(GroupedProducts):
    """Products one expert after the other, for dtypes that the grouped ones do not take."""

    def forward(self, x_PK: Tensor, weight_LMK: Tensor, ends: Tensor) -> Tensor:
        return torch.cat([x @ w.T for x, w in zip(_by(x_PK, ends), weight_LMK, strict=True)])

    def input_gradient(self, dy_PM: Tensor, weight_LMK: Tensor, ends: Tensor) -> Tensor:
        return torch.cat([dy @ w for dy, w in zip(_by(dy_PM, ends), weight_LMK, strict=True)])

    def weight_gradient(self, dy_PM: Tensor, x_PK: Tensor, ends: Tensor) -> Tensor:
        pairs = zip(_by(dy_PM, ends), _by(x_PK, ends), strict=True)
        return torch.stack([dy.T @ x for dy, x in pairs])


def _by(x: Tensor, ends: Tensor) -> list[Tensor]:
    return list(x.tensor_split(ends[:-1].tolist()))


@pytest.mark.parametrize("activation", [SwiGLU(), ClampedSwiGLU(limit=1.0)])
def test_grouped_products_give_what_the_loop_gives(activation: Activation) -> None:
    results = []
    for products in (None, _InTurn()):
        experts, rows, counts = _problem(activation)
        for name in ("b1", "b2", "b3"):  # gradients of biases would be real grouped products
            experts.register_parameter(name, None)
        experts.products = products
        y = experts(rows, counts)
        y.square().sum().backward()
        assert rows.grad is not None
        grads = {n: p.grad for n, p in experts.named_parameters() if p.grad is not None}
        results.append(grads | {"rows": rows.grad, "y": y.detach()})
    comparison = compare(results[1], results[0], bound=1e-13)
    assert comparison.ok, comparison
