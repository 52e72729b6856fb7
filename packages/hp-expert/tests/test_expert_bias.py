"""Experts with biases, their projections stored separately or fused, against the plain formula."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hp_expert import (
    ExpertBatch,
    GroupedExperts,
    LocalDispatcher,
    routed_swiglu,
    routed_swiglu_fused,
)
from hp_expert.experts import loop
from hp_expert.experts.grouped import Grouped
from hp_expert.experts.swiglu import routed_swiglu_by
from hp_expert.experts.types import Backend, ExpertWeights, Projections
from hp_platform import WeightGradQueue

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 13, 8, 16, 6, 2
BACKENDS = pytest.mark.parametrize("backend", [loop, Grouped()], ids=["loop", "grouped"])
STORED = pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])


class Leaves(NamedTuple):
    """The tensors that require gradients; gate and up projections in one tensor or in two."""

    x: Tensor
    weights: Tensor
    gate_up: list[Tensor]
    down: Tensor
    gate_up_bias: list[Tensor]
    down_bias: Tensor

    def flat(self) -> list[Tensor]:
        x, weights, gate_up, down, gate_up_bias, down_bias = self
        return [x, weights, *gate_up, down, *gate_up_bias, down_bias]

    def to(self, dtype: torch.dtype) -> "Leaves":
        def leaf(x: Tensor) -> Tensor:
            return x.detach().to(dtype).requires_grad_()

        x, weights, gate_up, down, gate_up_bias, down_bias = self
        return Leaves(
            leaf(x),
            leaf(weights),
            [leaf(w) for w in gate_up],
            leaf(down),
            [leaf(b) for b in gate_up_bias],
            leaf(down_bias),
        )


def leaves(*, fused: bool, tokens: int = TOKENS) -> Leaves:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    rows, parts = (2 * HIDDEN, 1) if fused else (HIDDEN, 2)
    return Leaves(
        drawn(tokens, DIM),
        drawn(tokens, TOP_K),
        [drawn(EXPERTS, rows, DIM) for _ in range(parts)],
        drawn(EXPERTS, DIM, HIDDEN),
        [drawn(EXPERTS, rows) for _ in range(parts)],
        drawn(EXPERTS, DIM),
    )


def choices(*, tokens: int = TOKENS) -> Tensor:
    """Expert 0 gets no token."""
    generator = torch.Generator().manual_seed(1)
    drawn = [1 + torch.randperm(EXPERTS - 1, generator=generator)[:TOP_K] for _ in range(tokens)]
    return torch.stack(drawn)


def batch_of(x: Tensor, weights: Tensor | None, experts: Tensor) -> ExpertBatch:
    dispatcher = LocalDispatcher(EXPERTS)
    return dispatcher.finish_dispatch(*dispatcher.prepare(x, experts, weights))


def applied(
    inputs: Leaves,
    experts: Tensor,
    backend: Backend | None = None,
    *,
    adds_output_bias: bool = True,
) -> Tensor:
    weights: Projections[Tensor] = Projections(tuple(inputs.gate_up), inputs.down)
    biases: Projections[Tensor | None] = Projections(tuple(inputs.gate_up_bias), inputs.down_bias)
    batch = batch_of(inputs.x, inputs.weights, experts)
    return routed_swiglu_by(backend, batch, ExpertWeights(weights, biases, adds_output_bias))


def plain(inputs: Leaves, experts: Tensor) -> Tensor:
    gate_up, bias = torch.cat(inputs.gate_up, 1), torch.cat(inputs.gate_up_bias, 1)
    y = torch.zeros_like(inputs.x)
    for e in range(EXPERTS):
        token, choice = torch.where(experts == e)
        gate, up = F.linear(inputs.x[token], gate_up[e], bias[e]).chunk(2, 1)
        out = F.linear(F.silu(gate) * up, inputs.down[e], inputs.down_bias[e])
        y = y.index_add(0, token, out * inputs.weights[token, choice, None])
    return y


def results(run: Callable[[], Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    y = run()
    upstream = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, list(inputs), upstream)]


def worst(actual: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(
        float((a.double() - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs
    )


@STORED
@pytest.mark.parametrize(
    ("backend", "dtype", "bound"),
    [
        (loop, torch.float64, 1e-12),
        (loop, torch.float32, 1e-6),
        (loop, torch.bfloat16, 2e-2),
        (Grouped(), torch.float32, 1e-6),
        (Grouped(), torch.bfloat16, 2e-2),
    ],
    ids=["loop-fp64", "loop-fp32", "loop-bf16", "grouped-fp32", "grouped-bf16"],
)
def test_values_and_gradients_are_right(
    backend: Backend, dtype: torch.dtype, bound: float, *, fused: bool
) -> None:
    inputs, experts = leaves(fused=fused).to(dtype), choices()
    exact = inputs.to(torch.float64)
    actual = results(lambda: applied(inputs, experts, backend), inputs.flat())
    assert {t.dtype for t in actual} == {dtype}
    assert worst(actual, results(lambda: plain(exact, experts), exact.flat())) <= bound


@STORED
def test_gradients_pass_a_numerical_check(*, fused: bool) -> None:
    inputs, experts = leaves(fused=fused, tokens=2), choices(tokens=2)
    parts = len(inputs.gate_up)

    def run(*flat: Tensor) -> Tensor:
        x, weights, *rest = flat
        gate_up, down, bias = rest[:parts], rest[parts], rest[parts + 1 : -1]
        return applied(Leaves(x, weights, gate_up, down, bias, rest[-1]), experts)

    assert torch.autograd.gradcheck(run, inputs.flat(), fast_mode=True)


@BACKENDS
@STORED
def test_a_bias_that_is_not_added_still_has_its_gradient(backend: Backend, *, fused: bool) -> None:
    inputs, experts = leaves(fused=fused).to(torch.float32), choices()
    exact = inputs.to(torch.float64)
    y, *grads = results(
        lambda: applied(inputs, experts, backend, adds_output_bias=False), inputs.flat()
    )
    without = exact._replace(down_bias=torch.zeros_like(exact.down_bias).requires_grad_())
    expected = results(lambda: plain(without, experts), without.flat())
    assert worst([y, *grads], expected) <= 1e-6
    added = results(lambda: applied(inputs, experts, backend), inputs.flat())
    assert not torch.allclose(added[0], y)  # the bias matters
    assert not torch.allclose(added[2], grads[1])  # also to the gradient of routing weights
    assert torch.equal(added[-1], grads[-1])


@BACKENDS
def test_parts_of_the_hidden_dim_add_up(backend: Backend) -> None:
    # What tensor parallelism does: each half of H gives a part of the output, one adds the bias.
    inputs, experts = leaves(fused=False).to(torch.float32), choices()
    whole = results(lambda: applied(inputs, experts, backend), [inputs.x, inputs.weights])

    def half(index: int) -> list[Tensor]:
        part = slice(index * HIDDEN // 2, (index + 1) * HIDDEN // 2)
        cut = inputs._replace(
            gate_up=[w[:, part] for w in inputs.gate_up],
            down=inputs.down[:, :, part],
            gate_up_bias=[b[:, part] for b in inputs.gate_up_bias],
        )
        return results(
            lambda: applied(cut, experts, backend, adds_output_bias=index == 0),
            [inputs.x, inputs.weights],
        )

    total = [a + b for a, b in zip(half(0), half(1), strict=True)]
    assert worst(total, [t.double() for t in whole]) <= 1e-6


@BACKENDS
def test_experts_without_tokens_get_bias_gradients_of_exactly_zero(backend: Backend) -> None:
    inputs = leaves(fused=False).to(torch.float32)
    grads = results(lambda: applied(inputs, choices(), backend), inputs.flat())
    for gradient in grads[-3:]:
        assert not gradient[0].any()
        assert gradient[1:].any(1).all()


def test_each_bias_may_be_left_out() -> None:
    inputs, experts = leaves(fused=False), choices()
    (w1, w3), (b1, b3) = inputs.gate_up, inputs.gate_up_bias
    batch = batch_of(inputs.x, inputs.weights, experts)
    none = [torch.zeros_like(b) for b in (b1, b3)]
    y = routed_swiglu(batch, w1, w3, inputs.down, b3=b3)
    without = inputs._replace(
        gate_up_bias=[none[0], b3], down_bias=torch.zeros_like(inputs.down_bias)
    )
    assert worst([y], [plain(without, experts)]) <= 1e-12
    y = routed_swiglu(batch, w1, w3, inputs.down, b2=inputs.down_bias)
    assert worst([y], [plain(inputs._replace(gate_up_bias=none), experts)]) <= 1e-12


def test_fused_projections_equal_separate_ones() -> None:
    inputs, experts = leaves(fused=False), choices()
    (w1, w3), (b1, b3) = inputs.gate_up, inputs.gate_up_bias
    fused = Leaves(
        inputs.x,
        inputs.weights,
        [torch.cat([w1, w3], 1).detach().requires_grad_()],
        inputs.down,
        [torch.cat([b1, b3], 1).detach().requires_grad_()],
        inputs.down_bias,
    )
    batch = batch_of(inputs.x, inputs.weights, experts)
    y = routed_swiglu(batch, w1, w3, inputs.down, b1=b1, b3=b3, b2=inputs.down_bias)
    one = results(lambda: y, inputs.flat())
    bias = fused.gate_up_bias[0]
    y = routed_swiglu_fused(
        batch, fused.gate_up[0], inputs.down, gate_up_bias=bias, down_bias=inputs.down_bias
    )
    other = results(lambda: y, fused.flat())
    expected = [*one[:3], torch.cat(one[3:5], 1), one[5], torch.cat(one[6:8], 1), one[8]]
    assert all(torch.equal(a, b) for a, b in zip(other, expected, strict=True))


@BACKENDS
@STORED
def test_all_gradients_can_be_put_off(backend: Backend, *, fused: bool) -> None:
    experts, queue = choices(), WeightGradQueue()

    def gradients(*, defer: bool) -> list[Tensor | None]:
        inputs = leaves(fused=fused).to(torch.bfloat16)
        loss = applied(inputs, experts, backend).square().sum()
        if not defer:
            loss.backward()
            return [leaf.grad for leaf in inputs.flat()]
        with queue.defer(0):
            loss.backward()
        parameters = inputs.flat()[2:]
        assert [p.grad for p in parameters] == [None] * len(parameters)
        assert queue.flush(0) == len(parameters)
        return [leaf.grad for leaf in inputs.flat()]

    for later, at_once in zip(gradients(defer=True), gradients(defer=False), strict=True):
        assert later is not None
        assert at_once is not None
        assert torch.equal(later, at_once)


def test_the_module_has_biases_on_request() -> None:
    torch.manual_seed(0)
    module = GroupedExperts(4, DIM, HIDDEN, bias=True, dtype=torch.float64)
    names = ["w1", "w2", "w3", "b1", "b2", "b3"]
    assert [name for name, _ in module.named_parameters()] == names
    assert module.b1 is not None
    assert module.b2 is not None
    assert module.b3 is not None
    assert module.b1.abs().max() <= DIM**-0.5
    assert module.b2.abs().max() <= HIDDEN**-0.5
    rows = torch.randn(6, DIM, dtype=torch.float64)
    out = module(rows, torch.tensor([3, 0, 2, 1]))
    for row, e, y in zip(rows, [0, 0, 0, 2, 2, 3], out, strict=True):
        gate, up = module.w1[e] @ row + module.b1[e], module.w3[e] @ row + module.b3[e]
        assert torch.allclose(y, module.w2[e] @ (F.silu(gate) * up) + module.b2[e], rtol=1e-12)
    assert GroupedExperts(4, DIM, HIDDEN).b1 is None


def test_biases_must_fit_the_weights() -> None:
    inputs = leaves(fused=True)
    batch = batch_of(inputs.x, inputs.weights, choices())
    with pytest.raises(ValueError, match=r"\(\(6, 16\)\) must be \(6, 32\) beside .* \(6, 8, 16\)"):
        routed_swiglu_fused(
            batch, inputs.gate_up[0], inputs.down, gate_up_bias=inputs.gate_up_bias[0][:, :HIDDEN]
        )
    with pytest.raises(ValueError, match=r"\(\(6, 16, 8\)\) must be \(6, 32, 8\)"):
        routed_swiglu_fused(batch, inputs.gate_up[0][:, :HIDDEN], inputs.down)
