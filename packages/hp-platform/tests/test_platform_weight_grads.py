"""Deferred weight gradients against an ordinary backward of the same layers."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_platform import WeightGradQueue, linear, submit_weight_grad

MICROBATCHES = 3


class Layer(nn.Module):
    """A linear layer whose operator can be exchanged."""

    def __init__(self, width: int, *, bias: bool, operator: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width)) if bias else None
        self.operator = operator

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.operator(x, self.weight, self.bias)
        return torch.tanh(y)


def _model(operator: Any, *, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [Layer(8, bias=bias, operator=operator) for _ in range(3)]
    # The first and last layer share their weight.
    layers[2].weight = layers[0].weight
    return nn.Sequential(*layers)


def _inputs(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=generator).requires_grad_() for _ in range(MICROBATCHES)]


def _grads(model: nn.Module) -> list[Tensor]:
    assert all(p.grad is not None for p in model.parameters())
    return [p.grad for p in model.parameters() if p.grad is not None]


def _assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 5, 8), (2, 3, 5, 8), (0, 8)])
def test_deferred_gradients_have_the_bits_of_an_ordinary_backward(
    shape: tuple[int, ...], bias: bool
) -> None:
    plain, deferred = _model(F.linear, bias=bias), _model(linear, bias=bias)
    plain_inputs, inputs = _inputs(shape), _inputs(shape)
    for x in plain_inputs:
        plain(x).square().sum().backward()
    queue = WeightGradQueue()
    for m, x in enumerate(inputs):
        y = deferred(x)
        with queue.defer(m):
            y.square().sum().backward()
    assert all(p.grad is None for p in deferred.parameters())
    _assert_same_bits([x.grad for x in inputs], [x.grad for x in plain_inputs])  # type: ignore[misc]
    for m in range(MICROBATCHES):
        assert queue.flush(m) == (6 if bias else 3)
    _assert_same_bits(_grads(deferred), _grads(plain))
    assert queue.pending() == 0


def test_outside_defer_gradients_come_at_once() -> None:
    plain, ours = _model(F.linear), _model(linear)
    for x, y in zip(_inputs((5, 8)), _inputs((5, 8)), strict=True):
        plain(x).sum().backward()
        ours(y).sum().backward()
    _assert_same_bits(_grads(ours), _grads(plain))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_changes_nothing(use_reentrant: bool) -> None:
    plain, ours = _model(F.linear), _model(linear)
    x, y = _inputs((5, 8))[0], _inputs((5, 8))[0]
    plain(x).square().sum().backward()
    queue = WeightGradQueue()
    out = checkpoint(ours, y, use_reentrant=use_reentrant)
    with queue.defer(0):
        out.square().sum().backward()
    assert all(p.grad is None for p in ours.parameters())
    queue.flush(0)
    _assert_same_bits([*_grads(ours), y.grad], [*_grads(plain), x.grad])  # type: ignore[list-item]


@pytest.mark.parametrize("defer", [True, False])
def test_autocast_computes_in_its_dtype_and_accumulates_in_the_parameters(defer: bool) -> None:
    torch.manual_seed(0)
    plain, ours = nn.Linear(8, 4), nn.Linear(8, 4)
    ours.load_state_dict(plain.state_dict())
    x, y = _inputs((5, 8))[0], _inputs((5, 8))[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(x)
        actual = linear(y, ours.weight, ours.bias)
    assert actual.dtype == torch.bfloat16
    assert torch.equal(actual, expected)
    expected.float().square().sum().backward()
    queue = WeightGradQueue()
    context: AbstractContextManager[None] = queue.defer(0) if defer else nullcontext()
    with context:
        actual.float().square().sum().backward()
    queue.flush(0)
    _assert_same_bits([*_grads(ours), y.grad], [*_grads(plain), x.grad])  # type: ignore[list-item]


def test_autocast_leaves_float64_alone() -> None:
    x, weight = torch.randn(3, 4).double(), torch.randn(2, 4).double()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(linear(x, weight), x @ weight.t())


@pytest.mark.parametrize("defer", [False, True])
def test_a_wider_product_has_the_bits_of_casts_and_keeps_the_narrow_input(*, defer: bool) -> None:
    torch.manual_seed(0)
    kept: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.dtype)
        return tensor

    results = []
    queue = WeightGradQueue()
    for casts in (True, False):
        x = torch.linspace(-1, 1, 24).view(6, 4).bfloat16().requires_grad_()
        weight = torch.linspace(-2, 1, 12).view(3, 4).bfloat16().requires_grad_()
        with torch.autocast("cpu"), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            kept.clear()
            if casts:
                with torch.autocast("cpu", enabled=False):
                    y = F.linear(x.float(), weight.float())
            else:
                y = linear(x, weight, dtype=torch.float32)
        assert y.dtype == torch.float32
        with queue.defer(0) if defer else nullcontext():
            (y * y.detach()).sum().backward()
        queue.flush(0)
        results.append((y, x.grad, weight.grad))
    assert kept[0] == torch.bfloat16
    assert torch.float32 not in kept[:2]
    for actual, expected in zip(*results, strict=True):
        assert actual is not None
        assert expected is not None
        assert torch.equal(actual, expected)


def test_a_frozen_weight_and_an_input_without_gradient_are_left_out() -> None:
    x = torch.randn(3, 4)
    weight, bias = (
        nn.Parameter(torch.randn(2, 4), requires_grad=False),
        nn.Parameter(torch.zeros(2)),
    )
    queue = WeightGradQueue()
    with queue.defer(0):
        linear(x, weight, bias).sum().backward()
    assert queue.flush(0) == 1
    assert weight.grad is None
    assert torch.equal(bias.grad, torch.full((2,), 3.0))  # type: ignore[arg-type]
    assert not linear(x, weight).requires_grad


def test_a_weight_that_is_not_a_leaf_gets_its_gradient_at_once() -> None:
    base = nn.Parameter(torch.ones(2, 4))
    queue = WeightGradQueue()
    with queue.defer(0):
        linear(torch.ones(3, 4), base * 2).sum().backward()
    assert queue.pending() == 0
    assert torch.equal(base.grad, torch.full((2, 4), 6.0))  # type: ignore[arg-type]


def test_second_derivatives_work_and_are_not_deferred() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    with WeightGradQueue().defer(0):
        assert torch.autograd.gradgradcheck(linear, (x, weight, bias))


def test_gradcheck() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(linear, (x, weight))


def test_hooks_of_parameters_run_when_their_gradient_arrives() -> None:
    weight = nn.Parameter(torch.ones(2, 4))
    seen: list[float | None] = []
    weight.register_hook(lambda grad: None if grad is None else grad * 10)
    weight.register_post_accumulate_grad_hook(
        lambda p: seen.append(None if p.grad is None else p.grad[0, 0].item())
    )
    queue = WeightGradQueue()
    with queue.defer(0):
        linear(torch.ones(3, 4), weight).sum().backward()
    assert seen == [None]  # torch calls hooks in a backward that leaves the gradient out, too
    queue.flush(0)
    assert seen == [None, 30.0]


def test_an_exception_in_backward_leaves_a_queue_that_can_be_discarded() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    queue = WeightGradQueue()

    def fail(_: Tensor) -> None:
        raise ZeroDivisionError

    x = torch.ones(3, 4, requires_grad=True)
    h = linear(x, weight)
    h.register_hook(fail)
    y = linear(h, weight)
    with pytest.raises(ZeroDivisionError), queue.defer(0):
        y.sum().backward()
    assert queue.pending() == 1
    queue.discard(0)
    queue.discard("never used")
    assert queue.pending() == 0
    # What comes later is computed at once again.
    linear(x, weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((4, 4), 3.0))  # type: ignore[arg-type]


def test_an_input_written_before_the_flush_is_an_error() -> None:
    weight, x = nn.Parameter(torch.ones(2, 4)), torch.ones(3, 4)
    queue = WeightGradQueue()
    with queue.defer(0):
        linear(x, weight).sum().backward()
    x.zero_()
    with pytest.raises(RuntimeError, match="was written before its weight gradient"):
        queue.flush(0)


def test_unknown_keys_flush_nothing_and_keys_are_apart() -> None:
    weight = nn.Parameter(torch.ones(2, 4))
    queue = WeightGradQueue()
    for key in ((0, 1), (1, 0)):
        y = linear(torch.ones(3, 4), weight)
        with queue.defer(key):
            y.sum().backward()
    assert queue.flush("other") == 0
    assert queue.flush((0, 1)) == 1
    assert queue.pending() == 1


def test_the_inner_of_nested_contexts_takes_the_gradients() -> None:
    weight = nn.Parameter(torch.ones(2, 4))
    outer, inner = WeightGradQueue(), WeightGradQueue()
    with outer.defer(0):
        with inner.defer(0):
            linear(torch.ones(3, 4), weight).sum().backward()
        linear(torch.ones(3, 4), weight).sum().backward()
    assert (outer.pending(), inner.pending()) == (1, 1)


def test_other_threads_are_not_deferred() -> None:
    weight = nn.Parameter(torch.ones(2, 4))
    queue = WeightGradQueue()

    def backward() -> None:
        linear(torch.ones(3, 4), weight).sum().backward()

    with queue.defer(0):
        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    assert queue.pending() == 0
    assert weight.grad is not None


def test_a_queued_gradient_does_not_keep_the_graph_alive() -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    x = torch.ones(3, 4, requires_grad=True)
    activation = torch.exp(x)
    y = linear(torch.sin(activation), weight)
    gone = weakref.ref(activation)
    queue = WeightGradQueue()
    with queue.defer(0):
        y.sum().backward()
    del activation, y
    gc.collect()
    assert gone() is None
    assert queue.flush(0) == 1


class _Scale(torch.autograd.Function):
    """`x * scale` of a layer by someone else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, scale = ctx.saved_tensors
        x = x.detach()
        return grad * scale, submit_weight_grad(ctx.scale, lambda: (grad * x).sum(0))


def test_other_functions_can_submit_their_own() -> None:
    scale = nn.Parameter(torch.tensor([2.0, 3.0]))
    x = torch.ones(4, 2)
    queue = WeightGradQueue()
    with queue.defer(0):
        y: Tensor = _Scale.apply(x, scale)  # type: ignore[no-untyped-call]
        y.sum().backward()
    assert scale.grad is None
    assert queue.flush(0) == 1
    assert torch.equal(scale.grad, torch.full((2,), 4.0))  # type: ignore[arg-type]


def test_a_compiled_region_computes_at_once() -> None:
    plain, ours = _model(F.linear), _model(linear)
    compiled = torch.compile(ours, backend="eager", fullgraph=True)
    x, y = _inputs((5, 8))[0], _inputs((5, 8))[0]
    plain(x).sum().backward()
    queue = WeightGradQueue()
    with queue.defer(0):
        compiled(y).sum().backward()
    assert queue.pending() == 0
    _assert_same_bits(_grads(ours), _grads(plain))
