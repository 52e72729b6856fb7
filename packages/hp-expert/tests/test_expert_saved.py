"""Bytes that the experts keep for backward, against the block that most models have."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_expert import (
    ExpertBatch,
    GroupedExperts,
    LocalDispatcher,
    MoE,
    TopKRouter,
    routed_swiglu,
    routed_swiglu_fused,
)
from hp_expert.experts import loop
from hp_expert.experts.grouped import Grouped
from hp_expert.experts.swiglu import routed_swiglu_by
from hp_expert.experts.types import Backend, ExpertWeights, Projections

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 256, 64, 128, 64, 8


class Layer(NamedTuple):
    """Tokens, router, and fused weights."""

    x: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor

    def route(self) -> tuple[Tensor, Tensor]:
        """Routing weights and experts of each token, as Qwen3-MoE routes."""
        scores = F.linear(self.x, self.router).softmax(-1, dtype=torch.float32)
        weights, experts = scores.topk(TOP_K)
        return (weights / weights.sum(-1, keepdim=True)).to(self.x.dtype), experts

    def batch(self) -> ExpertBatch:
        weights, experts = self.route()
        dispatcher = LocalDispatcher(EXPERTS)
        return dispatcher.finish_dispatch(*dispatcher.prepare(self.x, experts, weights))


def layer_of(
    dim: int = DIM, hidden: int = HIDDEN, tokens: int = TOKENS, dtype: torch.dtype = torch.bfloat16
) -> Layer:
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, dim), (EXPERTS, dim), (EXPERTS, 2 * hidden, dim), (EXPERTS, dim, hidden)
    return Layer(
        *(
            (0.1 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_()
            for shape in shapes
        )
    )


def hugging_face(layer: Layer) -> Tensor:
    """Do what `grouped_mm_experts_forward` of transformers 5.23.0 does, as far as autograd sees.

    `test_expert_transformers_saved.py` measures the block itself, where transformers is installed.
    """
    weights, experts = layer.route()
    expert_S, order = torch.sort(experts.reshape(-1))
    rows = layer.x[order // TOP_K]
    ends = torch.bincount(expert_S, minlength=EXPERTS).cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(rows, layer.gate_up.mT, offs=ends).chunk(2, dim=-1)
    out = F.grouped_mm(F.silu(gate) * up, layer.down.mT, offs=ends)
    out = out * weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    return out[inverse].view(*experts.shape, -1).sum(dim=1)


def ours(layer: Layer) -> Tensor:
    return routed_swiglu_fused(layer.batch(), layer.gate_up, layer.down)


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


# The proportions of OLMoE, which has these experts; and the widest ones in use.
@pytest.mark.parametrize(
    ("dim", "hidden", "tokens"), [(128, 64, 256), (512, 1024, 32)], ids=["OLMoE", "wide"]
)
def test_a_block_keeps_at_most_two_fifths_of_hugging_faces(
    dim: int, hidden: int, tokens: int
) -> None:
    layer = layer_of(dim, hidden, tokens)
    parameters = list(layer[1:])
    theirs = saved(lambda: hugging_face(layer), parameters)
    assert theirs >= 2 * tokens * TOP_K * (2 * dim + 4 * hidden)  # the tensors of all slots
    assert saved(lambda: ours(layer), parameters) / theirs <= 0.41


def test_a_block_that_routes_in_fp32_keeps_as_little() -> None:
    layer = layer_of(512, 1024, 32)
    kind: dict[str, Any] = {"dtype": torch.bfloat16}
    block = MoE(TopKRouter(512, EXPERTS, TOP_K, **kind), GroupedExperts(EXPERTS, 512, 1024, **kind))
    theirs = saved(lambda: hugging_face(layer), list(layer[1:]))
    x = layer.x.detach().requires_grad_()
    assert saved(lambda: block(x)[0], list(block.parameters())) / theirs <= 0.41


def test_both_blocks_compute_the_same() -> None:
    layer = layer_of()
    theirs = hugging_face(layer).detach()
    assert (ours(layer).detach() - theirs).abs().max() <= 2e-2 * theirs.abs().max()


def test_separate_weights_keep_as_little_as_fused_ones() -> None:
    layer = layer_of()
    gate, up = (half.detach().clone().requires_grad_() for half in layer.gate_up.chunk(2, 1))
    parameters = [*layer[1:], gate, up]
    separate = saved(lambda: routed_swiglu(layer.batch(), gate, up, layer.down), parameters)
    assert separate == saved(lambda: ours(layer), parameters)


@pytest.mark.parametrize("backend", [loop, Grouped()], ids=["loop", "grouped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_routing_and_preactivations_are_all_that_is_kept(
    backend: Backend, dtype: torch.dtype
) -> None:
    layer = layer_of(dtype=dtype)
    none: Projections[Tensor | None] = Projections((None,), None)
    weights: Projections[Tensor] = Projections((layer.gate_up,), layer.down)
    batch = layer.batch()
    assert batch.weights is not None
    batch = batch._replace(weights=batch.weights.detach().requires_grad_())
    kept = saved(
        lambda: routed_swiglu_by(backend, batch, ExpertWeights(weights, none)), list(layer[1:])
    )
    slots, size = TOKENS * TOP_K, dtype.itemsize
    order = 8 if backend is loop else 4  # bytes for a slot: both ways, or one
    assert kept == size * (TOKENS * DIM + slots + slots * 2 * HIDDEN) + order * slots


def test_copies_of_wide_weights_do_not_stay() -> None:
    layer = layer_of()
    wide = [layer.gate_up.detach().float(), layer.down.detach().float()]
    wide = [w.requires_grad_() for w in wide]
    parameters = [*layer[1:], *wide]
    kept = saved(lambda: routed_swiglu_fused(layer.batch(), wide[0], wide[1]), parameters)
    assert kept == saved(lambda: ours(layer), parameters)


def test_under_autocast_rows_are_kept_narrow() -> None:
    torch.manual_seed(0)
    module = GroupedExperts(4, 16, 32)
    x = torch.randn(40, 16, requires_grad=True)
    counts = torch.tensor([10, 10, 10, 10])

    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.as_tensor(module(x, counts))

    kept = saved(run, list(module.parameters()))
    # Rows and two pre-activations in bf16, and what tells their order.
    assert kept <= 2 * 40 * (16 + 64) + 8 * 3 * 40
