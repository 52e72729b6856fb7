"""Compiled parts of blocks: where graphs are cut, recompilations, numbers."""

import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from msgspec.structs import replace
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from hp_context import Documents
from hp_expert import Routing, TopKRouter
from hp_platform.testing import compare
from hp_trainer.config import ModelConfig
from hp_trainer.config.options import resolve
from hp_trainer.model import DropoutKey, Microbatch, TransformerStage, look_ahead
from hp_trainer.model.block import Block
from hp_trainer.model.compiled import compile_blocks
from hp_trainer.model.initialization import initialize_parameters
from hp_trainer.model.parameters import named_parameters
from hp_trainer.model.recompute import Recompute

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Of torch itself, where it cuts a graph and where it imports inductor.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]
VOCABULARY, LENGTH, WARM_UP, STEPS = 32, 24, 2, 6

# Of attention the norm and the projections, with and without documents, and what follows it. Of
# experts the norm, the router, and the shared expert. A dense layer is one graph.
ATTENTION, EXPERTS, SHARED, DENSE = 5, 2, 1, 1


def _model(preset: str) -> ModelConfig:
    model = resolve(preset, env={}).config.model
    return replace(model, num_layers=3, init_std=0.2, dropout=0.1)


def _stage(model: ModelConfig, dtype: torch.dtype, recompute: Recompute) -> TransformerStage:
    stage = TransformerStage(
        model, VOCABULARY, layers=range(3), first=True, last=True, compute_dtype=dtype
    ).to(dtype)
    initialize_parameters(named_parameters(stage), model, seed=0)
    for buffer in stage.buffers():
        buffer.zero_()
    for part in stage.modules():
        if isinstance(part, Block):
            part.recompute = recompute
    return stage


def _step(stage: TransformerStage, number: int) -> dict[str, Tensor]:
    """Other tokens, so other loads of experts, and documents that end elsewhere in every step."""
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
    tokens, targets = ids[:, :-1], ids[:, 1:]
    counts = tuple(2 * (LENGTH - depth) for depth in range(1, len(stage.mtp) + 1))
    apart = (Documents((9 + number, LENGTH - 9 - number)), Documents((LENGTH,)))
    microbatch = Microbatch(
        2,
        DropoutKey(0, number, torch.arange(2), torch.arange(LENGTH)),
        ahead=look_ahead(tokens, targets, counts) if counts else None,
        documents=apart if number % 2 else None,
    )
    stage.zero_grad()
    logits = stage(tokens, microbatch=microbatch)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    grads = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    return {"loss": loss.detach()} | grads


@pytest.mark.sample("experts, all again")
@pytest.mark.parametrize(
    ("preset", "graphs", "dtype", "recompute", "bound"),
    [
        ("debug-llama3", ATTENTION + DENSE, torch.float32, "none", 1e-5),
        ("debug-gpt-oss", ATTENTION + EXPERTS, torch.float64, "attention", 1e-12),
        ("debug-deepseek-v3", ATTENTION + DENSE + EXPERTS + SHARED, torch.float64, "none", 1e-12),
        # The router's decision is a cut where it is kept for another run.
        ("debug-deepseek-v3", ATTENTION + DENSE + 5 + SHARED, torch.float64, "full", 1e-12),
    ],
    ids=["dense", "experts alone", "dense and experts", "experts, all again"],
)
def test_blocks_share_graphs_that_serve_every_step(
    preset: str, graphs: int, dtype: torch.dtype, recompute: Recompute, bound: float
) -> None:
    torch.compiler.reset()
    model = _model(preset)
    plain, compiled = (_stage(model, dtype, recompute) for _ in range(2))
    counting = CompileCounterWithBackend("aot_eager")
    compile_blocks(compiled, counting)
    for number in range(STEPS):
        expected = _step(plain, number)
        # Two steps compile, whatever the number of layers: without and with documents apart.
        is_warm = number >= WARM_UP
        with torch.compiler.set_stance("fail_on_recompile") if is_warm else nullcontext():
            actual = _step(compiled, number)
        comparison = compare(actual, expected, bound=bound)
        assert comparison.ok, comparison
    assert counting.frame_count == graphs


def _route_as(other: nn.Module, one: nn.Module) -> None:
    """Let `other` choose the experts that `one` chose: scores that round apart are no error."""
    chosen: dict[str, Tensor] = {}

    def note(name: str) -> Callable[[nn.Module, Any, Routing], None]:
        return lambda _module, _args, routing: chosen.update({name: routing.chosen})

    def follow(name: str) -> Callable[[nn.Module, Any, Any], Any]:
        return lambda _module, args, kwargs: (args, kwargs | {"replay": chosen[name]})

    for name, router in one.named_modules():
        if isinstance(router, TopKRouter):
            router.register_forward_hook(note(name))
            other.get_submodule(name).register_forward_pre_hook(follow(name), with_kwargs=True)


@pytest.mark.skipif(os.environ.get("HP_INDUCTOR") != "1", reason="minutes: nox -s kernels")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inductor_computes_the_same_to_rounding(dtype: torch.dtype) -> None:
    torch.compiler.reset()
    model = replace(_model("debug-deepseek-v3"), num_layers=3)
    plain, compiled = (_stage(model, dtype, "none") for _ in range(2))
    compile_blocks(compiled, "inductor")
    bound = 1e-5 if dtype == torch.float32 else 5e-2
    _route_as(compiled, plain)
    expected = _step(plain, 0)
    comparison = compare(_step(compiled, 0), expected, bound=bound)
    assert comparison.ok, comparison


def test_none_compiles_nothing() -> None:
    stage = _stage(_model("debug-llama3"), torch.float32, "none")
    before = [(b.attend, b.feed) for b in stage.modules() if isinstance(b, Block)]
    compile_blocks(stage, "none")
    assert before == [(b.attend, b.feed) for b in stage.modules() if isinstance(b, Block)]
