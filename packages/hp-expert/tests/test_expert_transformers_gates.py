"""Experts of transformers that multiply gate and up by a function of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hp_expert.hugging_face.modules import experts_forward, has_own_gate, refusal

transformers: Any = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("one_thread")

EXPERTS, CHOICES, TOKENS, WIDTH = 4, 2, 10, 8


def experts(kind: str) -> Any:
    """Experts in float64, clamped or not."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts  # noqa: PLC0415

    class Clamped(Qwen3MoeExperts):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            product: Tensor = self.act_fn(gate.clamp(max=0.1)) * (up.clamp(-0.2, 0.2) + 1)
            return product

    config = transformers.Qwen3MoeConfig(
        hidden_size=WIDTH, moe_intermediate_size=6, num_experts=EXPERTS, num_experts_per_tok=CHOICES
    )
    config._experts_implementation = "batched_mm"  # which asks for the gate
    made = {"own": Clamped, "default": Qwen3MoeExperts}[kind](config).double()
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    return made


def computed(function: Any, module: Any, *, chosen: Tensor) -> list[Tensor]:
    """Output, and gradients of rows, weights and parameters."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    weights = torch.rand(TOKENS, CHOICES, generator=generator, dtype=torch.float64).requires_grad_()
    module.zero_grad()
    out: Tensor = function(x, chosen, weights)
    (out * torch.arange(WIDTH)).sum().backward()
    gradients = [p.grad for p in (x, weights, *module.parameters())]
    return [out.detach(), *(g for g in gradients if g is not None)]


@pytest.mark.parametrize("kind", ["own", "default"])
def test_experts_give_what_transformers_gives(kind: str) -> None:
    module = experts(kind)
    # No token goes to the last expert.
    scores = torch.rand(TOKENS, EXPERTS - 1, generator=torch.Generator().manual_seed(2))
    chosen = scores.argsort(dim=1)[:, :CHOICES]

    ours = computed(lambda *args: experts_forward(module, *args), module, chosen=chosen)
    theirs = computed(module, module, chosen=chosen)

    assert has_own_gate(module) == (kind == "own")
    assert refusal(module) is None
    assert len(ours) == len(theirs) == 5
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
