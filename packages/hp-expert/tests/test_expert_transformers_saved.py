"""Bytes that the experts keep for backward, against the blocks of transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hp_expert import LocalDispatcher, routed_swiglu_fused

transformers = pytest.importorskip("transformers")

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 32, 512, 1024, 64, 8


def saved(run: Callable[[], Tensor], parameters: list[Tensor]) -> int:
    """Bytes that autograd keeps, each storage once, without the parameters."""
    known = {p.untyped_storage().data_ptr() for p in parameters}
    storages: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        y = run()  # alive, so that no address is used twice
    del y
    return sum(storages.values())


def block_of(family: str) -> Any:
    """A model's block, its experts computed by grouped products."""
    sizes = {"hidden_size": DIM, "num_experts_per_tok": TOP_K}
    if family == "Qwen3Moe":
        sizes |= {"num_experts": EXPERTS, "moe_intermediate_size": HIDDEN}
    else:
        sizes |= {"num_local_experts": EXPERTS, "intermediate_size": HIDDEN}
    config = getattr(transformers, f"{family}Config")(**sizes)
    config._experts_implementation = "grouped_mm"  # what its from_pretrained sets
    name = {"Qwen3Moe": "qwen3_moe", "Mixtral": "mixtral"}[family]
    modeling = getattr(transformers.models, name)
    module = getattr(getattr(modeling, f"modeling_{name}"), f"{family}SparseMoeBlock")(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return module.to(torch.bfloat16)


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_backward_keeps_at_most_two_fifths_of_what_the_block_keeps(family: str) -> None:
    torch.manual_seed(0)
    block = block_of(family)
    x = torch.randn(1, TOKENS, DIM).bfloat16().requires_grad_()
    gate_up, down = block.experts.gate_up_proj, block.experts.down_proj
    dispatcher = LocalDispatcher(EXPERTS)

    def ours() -> Tensor:
        rows = x.view(-1, DIM)
        _, weights, chosen = block.gate(rows)
        batch = dispatcher.finish_dispatch(*dispatcher.prepare(rows, chosen, weights))
        return routed_swiglu_fused(batch, gate_up, down)

    def theirs() -> Tensor:
        return torch.as_tensor(block(x)).view(-1, DIM)

    parameters = list(block.parameters())
    assert saved(ours, parameters) / saved(theirs, parameters) <= 0.41
    assert (ours() - theirs()).abs().max() <= 2e-2 * theirs().abs().max()
