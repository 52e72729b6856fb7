"""Ranks that run a model on the same tokens, as tensor-parallel ranks do, send a part of them each.

The tests need `transformers` (`nox -s transformers`).
"""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hp_expert import apply_to_transformers, save_routing
from hp_platform.testing import compare, run_in_threads

transformers: Any = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.arange(10).view(2, 5) % 7 + 3


def build() -> Any:
    """A Mixtral in fp64, the same in every rank."""
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_local_experts=8,
        experts_implementation="eager",
    )
    model = transformers.MixtralForCausalLM(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn / 4 if parameter.ndim > 1 else 1 + drawn / 4)
    return model.train()


def step(model: Any) -> dict[str, Tensor]:
    """Logits and gradients."""
    out = model(input_ids=TOKENS, labels=TOKENS, use_cache=False)
    out.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"logits": out.logits.detach(), **gradients}


def is_of_experts(name: str) -> bool:
    return ".experts." in name


def require_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    comparison = compare(found, wanted, bound=1e-12)
    assert comparison.ok, str(comparison)


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_of_them_have_what_one_process_has(world_size: int) -> None:
    """Ten tokens: four ranks have parts of two lengths."""

    def rank_main(group: dist.ProcessGroup) -> dict[str, Tensor]:
        return step(apply_to_transformers(build(), group, same_tokens=group))

    wanted = step(build())
    results = run_in_threads(rank_main, world_size=world_size)

    for found in results:
        others = {name: t for name, t in found.items() if not is_of_experts(name)}
        require_same(others, {name: wanted[name] for name in others})
    whole = {n: torch.cat([found[n] for found in results]) for n in wanted if is_of_experts(n)}
    require_same(whole, {name: wanted[name] for name in whole})


def test_a_choice_that_is_kept_for_backward_is_that_of_all_tokens() -> None:
    def rank_main(group: dist.ProcessGroup) -> None:
        plain = step(apply_to_transformers(build(), group, same_tokens=group))
        model = apply_to_transformers(build(), group, same_tokens=group)
        for layer in model.model.layers:
            again = partial(checkpoint, use_reentrant=False, context_fn=save_routing)
            layer.mlp.forward = partial(again, layer.mlp.forward)
        require_same(step(model), plain)

    run_in_threads(rank_main, world_size=2)
