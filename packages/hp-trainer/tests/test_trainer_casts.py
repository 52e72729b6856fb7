"""fp32 masters under bf16 compute: cast once for the microbatches of a step, summed in fp32."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hp_platform import WeightGradQueue
from hp_trainer.config import ModelConfig
from hp_trainer.config.options import resolve
from hp_trainer.model import Microbatch, TransformerStage
from hp_trainer.model.initialization import initialize_parameters
from hp_trainer.model.parameters import named_parameters
from hp_trainer.model.stage import forget_casts, share_casts

pytestmark = pytest.mark.usefixtures("one_thread")
VOCABULARY, LENGTH, MICROBATCHES = 32, 16, 3


class Casts(TorchDispatchMode):
    """Shapes of what is cast to bf16 from fp32 tensors of a set of sizes."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights, self.bytes = weights, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        name = str(func)
        if (
            name.startswith("aten._to_copy")
            and args[0].untyped_storage().data_ptr() in self.weights
        ):
            self.bytes += out.numel() * out.element_size()
        return out


def _model(preset: str, **given: int) -> ModelConfig:
    model = resolve(preset, env={}).config.model
    given = {"num_layers": 2, "num_experts": 0, "num_mtp_modules": 0} | given
    return replace(model, tie_embeddings=True, init_std=0.2, **given)


def _stage(model: ModelConfig) -> TransformerStage:
    stage = TransformerStage(
        model, VOCABULARY, layers=range(2), first=True, last=True, compute_dtype=torch.bfloat16
    )
    initialize_parameters(named_parameters(stage), model, seed=0)
    return stage


def _run(
    stage: TransformerStage, *, ndim: int = 2, defer: bool = False
) -> tuple[dict[str, Tensor], int]:
    """Gradients of some microbatches whose forwards come first, and bytes of cast weights.

    Matrices of experts are stacked, and so have three dims.
    """
    stage.zero_grad()
    casts = Casts({p.untyped_storage().data_ptr() for p in stage.parameters() if p.ndim == ndim})
    queue = WeightGradQueue()
    losses = []
    with casts:
        for number in range(MICROBATCHES):
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
            losses.append(stage(tokens, microbatch=Microbatch(2)).float().square().mean())
        for number, loss in enumerate(losses):
            if defer:
                with queue.defer(number):
                    loss.backward()
            else:
                loss.backward()
        num_deferred = sum(queue.flush(number) for number in range(MICROBATCHES))
    grads = {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}
    matrices = sum(grad.ndim == 2 for grad in grads.values())
    assert num_deferred >= defer * MICROBATCHES * matrices
    assert {grad.dtype for grad in grads.values()} == {torch.float32}
    return grads, casts.bytes


@pytest.mark.parametrize("preset", ["debug-llama3", "debug-gpt-oss", "debug-deepseek-v3"])
def test_weights_are_cast_once_and_the_gradients_keep_their_bits(preset: str) -> None:
    model = _model(preset)
    apart, once = _stage(model), _stage(model)
    share_casts(once)
    (expected, each), (actual, shared) = _run(apart), _run(once)
    assert expected.keys() == actual.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert shared == 2 * sum(grad.numel() for grad in actual.values() if grad.ndim == 2)
    assert each == 2 * MICROBATCHES * shared  # in forward, and again in backward
    forget_casts(once)
    for stage in (apart, once):
        later, _ = _run(stage, defer=True)
        assert all(torch.equal(later[name], expected[name]) for name in expected)


@pytest.mark.parametrize("preset", ["debug-mixtral", "debug-gpt-oss"])
def test_experts_share_casts_of_forward_and_backward(preset: str) -> None:
    model = _model(preset, num_experts=4, top_k=2)
    apart, once = _stage(model), _stage(model)
    share_casts(once)
    (expected, each), (actual, shared) = _run(apart, ndim=3), _run(once, ndim=3)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)
    assert shared == 2 * sum(grad.numel() for grad in actual.values() if grad.ndim == 3)
    assert each == 2 * MICROBATCHES * shared
    forget_casts(once)
    later, _ = _run(once, defer=True)
    assert all(torch.equal(later[name], expected[name]) for name in expected)


def test_casts_follow_the_weights_once_they_are_forgotten() -> None:
    model = _model("debug-llama3")
    stage = _stage(model)
    share_casts(stage)
    before, _ = _run(stage)
    before = {name: grad.clone() for name, grad in before.items()}
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.mul_(1.5)
    assert _run(stage)[1] == 0
    forget_casts(stage)
    after, num_bytes = _run(stage)
    assert num_bytes
    assert not any(torch.equal(after[name], before[name]) for name in before)
