import pytest
import torch
from torch import Tensor

from hp_expert import (
    GroupedExperts,
    MoE,
    SwiGLU,
    TopKRouter,
    sequence_balance_loss,
    take_loads,
)
from hp_expert.routing.recompute import save_routing

B, S, D, E, K = 3, 8, 6, 4, 2
PADS = torch.tensor([[False] * 8, [False] * 5 + [True] * 3, [True] * 7 + [False]])


def _layer() -> MoE:
    torch.manual_seed(0)
    router = TopKRouter(D, E, K, correction_bias=True, dtype=torch.float64)
    experts = GroupedExperts(E, D, 5, activation=SwiGLU(), dtype=torch.float64)
    return MoE(router, experts)


def _run(layer: MoE, x: Tensor, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    y, routing = layer(x, padding=padding)
    losses = sequence_balance_loss(
        routing.scores.view(*x.shape[:2], E),
        routing.chosen.view(*x.shape[:2], K),
        num_experts=E,
        padding=padding,
    )
    return y, losses


def test_padding_changes_no_output_no_balance_no_load_and_no_gradient() -> None:
    layer, x = _layer(), torch.randn(B, S, D, dtype=torch.float64)
    y, losses = _run(layer, x, PADS)
    assert torch.equal(y[PADS], torch.zeros_like(y[PADS]))
    (y.sin().sum() + losses.sum()).backward()
    found = {name: part.grad for name, part in layer.named_parameters()}
    load = take_loads(layer)["router"]

    layer.zero_grad()
    total, values = torch.zeros((), dtype=torch.float64), []
    for sequence, pads in zip(x, PADS, strict=True):
        y_one, loss = _run(layer, sequence[None, ~pads], None)
        total = total + y_one.sin().sum() + loss.sum()
        values.append(loss)
    total.backward()
    torch.testing.assert_close(losses, torch.cat(values), rtol=0, atol=1e-14)
    assert torch.equal(load, take_loads(layer)["router"])
    assert int(load.sum()) == int((~PADS).sum()) * K
    for name, part in layer.named_parameters():
        torch.testing.assert_close(found[name], part.grad, rtol=1e-12, atol=1e-14)


def test_a_recompute_leaves_the_same_tokens_out() -> None:
    layer, x = _layer(), torch.randn(B, S, D, dtype=torch.float64, requires_grad=True)
    y = torch.utils.checkpoint.checkpoint(
        lambda x: layer(x, padding=PADS)[0], x, use_reentrant=False, context_fn=save_routing
    )
    y.sum().backward()
    assert x.grad is not None
    assert (x.grad[PADS] == 0).all()
    assert int(take_loads(layer)["router"].sum()) == int((~PADS).sum()) * K


def test_padding_of_another_shape_or_beside_a_capacity_is_refused() -> None:
    x = torch.randn(B, S, D)
    with pytest.raises(ValueError, match="padding"):
        TopKRouter(D, E, K)(x, padding=PADS[:2])
    with pytest.raises(ValueError, match="padding"):
        TopKRouter(D, E, K)(x, padding=PADS.long())
    with pytest.raises(ValueError, match="capacity_factor"):
        TopKRouter(D, E, K, capacity_factor=1.0)(x, padding=PADS)
