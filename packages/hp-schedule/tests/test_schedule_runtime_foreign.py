"""Backwards split by cutting the graph of modules that know nothing of it."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from hp_schedule.runtime import (
    DeferringSplitter,
    GraphCuttingSplitter,
    defer_weight_gradients,
)
from hp_schedule.runtime.stage import BackwardSplitter, Grads, full_backward

WIDTH = 4


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + y


class Tied(nn.Module):
    """One weight three times, once through a product of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.weight)
        x = torch.tanh(x @ (self.weight * self.scale))
        return x @ self.weight.t() * self.scale


class SeveralOutputs(nn.Module):
    """Outputs: of both inputs, of a parameter alone, an input itself, of one input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.offset = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        z = self.linear(x)
        return z * y, self.offset * 2, y, z, x.exp()


class Ignoring(nn.Module):
    """Does not use its second input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        del y
        z: Tensor = self.linear(x)
        return z


class Hooked(nn.Module):
    """Hooks that change gradients, of an activation and of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight.register_hook(lambda grad: grad * 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.register_hook(lambda grad: grad * 3)
        y: Tensor = self.second(x)
        return y


class TiedAndHooked(Hooked):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight = self.second.weight


class Swish(torch.autograd.Function):
    """Fused: a product with a parameter and an activation in one operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.sigmoid(x) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        gate = torch.sigmoid(x)
        for_x = grad * weight * gate * (1 - gate) if ctx.needs_input_grad[0] else None
        return for_x, (grad * gate).sum(0) if ctx.needs_input_grad[1] else None


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Swish.apply
        y: Tensor = apply(x, self.weight)
        return y


class Recomputed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class RecomputedFunction(nn.Module):
    """Recompute that calls no submodule, so that it cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.compute, x, use_reentrant=False)
        return y

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x @ self.weight) + self.bias) @ self.weight


MODULES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "linear": (lambda: nn.Linear(WIDTH, WIDTH), 1),
    "residual": (lambda: nn.Sequential(Residual(), Residual()), 1),
    "attention": (lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True), 1),
    "tied": (Tied, 1),
    "tied layers": (lambda: nn.Sequential(Tied(), *[nn.Linear(WIDTH, WIDTH)] * 3, Tied()), 1),
    "several outputs": (SeveralOutputs, 2),
    "unused input": (Ignoring, 2),
    "identity": (nn.Identity, 1),
    "hooked": (Hooked, 1),
    "tied and hooked": (TiedAndHooked, 1),
    "fused function": (Fused, 1),
    "recomputed": (lambda: Recomputed(use_reentrant=False), 1),
    "recomputed, reentrant": (lambda: Recomputed(use_reentrant=True), 1),
    "recomputed function": (RecomputedFunction, 1),
    "no inputs": (Residual, 0),
}


def run(
    make: Callable[[], nn.Module],
    num_inputs: int,
    splitter: BackwardSplitter | None,
    microbatches: int = 2,
) -> tuple[list[Grads], dict[str, Tensor | None]]:
    """Return the gradients of the inputs, and those of the parameters after all microbatches."""
    torch.manual_seed(0)
    module = make().double()
    found, later = [], []
    for _ in range(microbatches):
        inputs = [torch.randn(2, 3, WIDTH, dtype=torch.float64) for _ in range(max(1, num_inputs))]
        leaves = [x.requires_grad_() for x in inputs[:num_inputs]]
        output = module(*inputs)
        outputs = list(output) if isinstance(output, tuple) else [output]
        grads = [torch.randn_like(x) for x in outputs]
        if splitter is None:
            found.append(full_backward(outputs, grads, inputs=leaves))
        else:
            first, second = splitter.split_backward(module, outputs, grads, inputs=leaves)
            found.append(first)
            later.append(second)
    for second in later:
        second()
    return found, {name: parameter.grad for name, parameter in module.named_parameters()}


@pytest.mark.parametrize("name", MODULES)
def test_halves_of_a_backward_make_the_whole(name: str) -> None:
    make, num_inputs = MODULES[name]
    got, wanted = run(make, num_inputs, GraphCuttingSplitter()), run(make, num_inputs, None)
    # To the bit, save where a parameter is used three times: the order of that sum is autograd's.
    tolerance = 1e-12 if name in {"tied", "tied layers"} else 0.0
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def forward(module: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(3, WIDTH, requires_grad=True)
    output = module(x)
    return x, output, torch.ones_like(output)


def test_first_half_leaves_the_weights_alone_and_nothing_is_computed_twice() -> None:
    module = nn.Sequential(Residual(), Residual())
    x, output, grad = forward(module)
    with Counting() as whole:
        full_backward([output], [grad], inputs=[x])
    module.zero_grad()
    x, output, grad = forward(module)
    with Counting() as first:
        _, finish = GraphCuttingSplitter().split_backward(module, [output], [grad], inputs=[x])
    assert all(parameter.grad is None for parameter in module.parameters())
    with Counting() as second:
        finish()
    assert all(parameter.grad is not None for parameter in module.parameters())
    assert first.counts["mm"] == second.counts["mm"] == 4
    assert first.counts["mm"] + second.counts["mm"] == whole.counts["mm"]
    assert second.counts["gelu_backward"] == 0


def test_start_of_a_pipeline_does_everything_in_the_second_half() -> None:
    module = Residual()
    output = module(torch.randn(3, WIDTH))
    grad = torch.ones_like(output)
    with Counting() as first:
        found, finish = GraphCuttingSplitter().split_backward(module, [output], [grad], inputs=[])
    assert found == ()
    assert not first.counts
    finish()
    assert module.up.weight.grad is not None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputing_modules_do_everything_in_the_first_half(use_reentrant: bool) -> None:
    module = Recomputed(use_reentrant=use_reentrant)
    splitter = GraphCuttingSplitter()
    for _ in range(2):
        x, output, grad = forward(module)
        with Counting() as first:
            _, finish = splitter.split_backward(module, [output], [grad], inputs=[x])
        with Counting() as second:
            finish()
    assert not second.counts
    assert first.counts["gelu"] == 2, "each block is recomputed once"


def test_compiled_modules_do_everything_in_the_first_half() -> None:
    plain, splitter = Residual(), GraphCuttingSplitter()
    compiled: Any = torch.compile(plain, backend="aot_eager")
    x, output, grad = forward(compiled)
    with Counting():
        found, finish = splitter.split_backward(compiled, [output], [grad], inputs=[x])
    with Counting() as second:
        finish()
    assert not second.counts
    grads = [parameter.grad for parameter in plain.parameters()]
    plain.zero_grad()
    y = x.detach().requires_grad_()
    wanted = full_backward([plain(y)], [grad], inputs=[y])
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(grads, [parameter.grad for parameter in plain.parameters()])


def test_parameters_hooks_see_one_gradient_per_backward() -> None:
    calls: list[str] = []
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    module[1].weight = module[0].weight
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    x, output, grad = forward(module)
    _, finish = GraphCuttingSplitter().split_backward(module, [output], [grad], inputs=[x])
    assert not calls
    finish()
    assert sorted(calls) == ["0.bias", "0.weight", "1.bias"]


class Random(nn.Module):
    """A graph of random operations over inputs and parameters."""

    def __init__(self, plan: Sequence[tuple[int, int, int]]) -> None:
        super().__init__()
        self.plan = plan
        self.parameters_ = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        values = [x, y, *self.parameters_]
        for op, a, b in self.plan:
            first, second = values[a % len(values)], values[b % len(values)]
            made = (
                first @ second,
                first + second,
                torch.tanh(first) * second,
                first.t().contiguous(),
            )
            values.append(made[op])
        return tuple(values[-3:])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 20)),
        min_size=1,
        max_size=12,
    )
)
def test_any_graph_may_be_cut(plan: list[tuple[int, int, int]]) -> None:
    results = []
    for splitter in (None, GraphCuttingSplitter()):
        torch.manual_seed(1)
        module = Random(plan).double()
        leaves = [torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)]
        for leaf in leaves:
            leaf.requires_grad_()
        outputs = [x for x in module(*leaves) if x.requires_grad]
        grads = [torch.randn_like(x) for x in outputs]
        if splitter is None:
            found = full_backward(outputs, grads, inputs=leaves)
        else:
            found, finish = splitter.split_backward(module, outputs, grads, inputs=leaves)
            finish()
        results.append((found, [parameter.grad for parameter in module.parameters()]))
    # A parameter that meets itself many times is summed up in another order.
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_linears_of_a_foreign_model_put_their_weight_gradients_off(
    use_reentrant: bool | None,
) -> None:
    def make() -> nn.Module:
        if use_reentrant is None:
            return nn.Sequential(Residual(), Residual())
        return Recomputed(use_reentrant=use_reentrant)

    def deferring() -> nn.Module:
        return defer_weight_gradients(make())

    got, wanted = run(deferring, 1, DeferringSplitter()), run(make, 1, None)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    module = deferring()
    x, output, grad = forward(module)
    with Counting() as first:
        _, finish = DeferringSplitter().split_backward(module, [output], [grad], inputs=[x])
    with Counting() as second:
        finish()
    assert second.counts["mm"] == 4
    assert first.counts["mm"] == 4
