"""The arithmetic of experts against the same written down plainly."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_expert import ExpertBatch, GroupedExperts, LocalDispatcher, routed_swiglu
from hp_expert.experts import loop
from hp_expert.experts.grouped import Grouped
from hp_expert.experts.swiglu import routed_swiglu_by
from hp_expert.experts.types import Backend, ExpertWeights, Projections
from hp_platform import WeightGradQueue

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, DIM, HIDDEN = 13, 8, 16
NAMES = ("rows", "routing weights", "w1", "w3", "w2")


def leaves(
    num_experts: int, top_k: int, dtype: torch.dtype, *, tokens: int = TOKENS
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [
        (tokens, DIM),
        (tokens, top_k),
        (num_experts, HIDDEN, DIM),
        (num_experts, HIDDEN, DIM),
        (num_experts, DIM, HIDDEN),
    ]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def choices(num_experts: int, top_k: int, *, tokens: int = TOKENS) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(tokens)]
    return torch.stack(drawn) if drawn else torch.empty(0, top_k, dtype=torch.int64)


def batch_of(x: Tensor, weights: Tensor | None, experts: Tensor, num_experts: int) -> ExpertBatch:
    dispatcher = LocalDispatcher(num_experts)
    return dispatcher.finish_dispatch(*dispatcher.prepare(x, experts, weights))


def plain(inputs: list[Tensor], experts: Tensor) -> Tensor:
    x, weights, w1, w3, w2 = inputs
    y = torch.zeros_like(x)
    for e in range(w1.shape[0]):
        token, choice = torch.where(experts == e)
        hidden = F.silu(x[token] @ w1[e].T) * (x[token] @ w3[e].T)
        y = y.index_add(0, token, (hidden @ w2[e].T) * weights[token, choice, None])
    return y


def applied(inputs: list[Tensor], experts: Tensor, backend: Backend | None = None) -> Tensor:
    x, weights, w1, w3, w2 = inputs
    batch = batch_of(x, weights, experts, w1.shape[0])
    if backend is None:
        return routed_swiglu(batch, w1, w3, w2)
    return routed_swiglu_by(backend, batch, plain_weights(w1, w3, w2))


def plain_weights(w1: Tensor, w3: Tensor, w2: Tensor) -> ExpertWeights:
    return ExpertWeights(Projections((w1, w3), w2), Projections((None, None), None))


def results(run: Callable[[], Tensor], inputs: list[Tensor]) -> list[Tensor]:
    y = run()
    upstream = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, upstream)]


def worst(actual: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(actual, expected, strict=True)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in pairs)


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 1), (8, 2), (8, 8), (16, 3)])
def test_values_and_gradients_are_right(num_experts: int, top_k: int) -> None:
    inputs, experts = leaves(num_experts, top_k, torch.float64), choices(num_experts, top_k)
    actual = results(lambda: applied(inputs, experts), inputs)
    assert worst(actual, results(lambda: plain(inputs, experts), inputs)) <= 1e-12


@pytest.mark.parametrize("backend", [loop, Grouped()], ids=["loop", "grouped"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)], ids=["fp32", "bf16"]
)
def test_both_ways_to_compute_agree(dtype: torch.dtype, bound: float, backend: Backend) -> None:
    inputs, experts = leaves(8, 2, dtype), choices(8, 2)
    exact = [leaf.detach().double().requires_grad_() for leaf in inputs]
    actual = results(lambda: applied(inputs, experts, backend), inputs)
    assert [t.dtype for t in actual] == [dtype] * 6
    assert worst(actual, results(lambda: plain(exact, experts), exact)) <= bound


def test_gradients_pass_a_numerical_check() -> None:
    inputs, experts = leaves(3, 2, torch.float64, tokens=4), choices(3, 2, tokens=4)
    assert torch.autograd.gradcheck(lambda *args: applied(list(args), experts), inputs)


@pytest.mark.parametrize("backend", [loop, Grouped()], ids=["loop", "grouped"])
def test_experts_without_tokens_get_gradients_of_exactly_zero(backend: Backend) -> None:
    inputs = leaves(8, 2, torch.float32)
    experts = torch.tensor([[2, 5]]).expand(TOKENS, 2)
    _, _, _, *weight_grads = results(lambda: applied(inputs, experts, backend), inputs)
    idle = [0, 1, 3, 4, 6, 7]
    for gradient in weight_grads:
        assert not gradient[idle].any()
        assert gradient[[2, 5]].any()


def test_a_batch_without_rows_gives_zeros() -> None:
    inputs, experts = leaves(4, 2, torch.float32, tokens=0), choices(4, 2, tokens=0)
    y, *grads = results(lambda: applied(inputs, experts), inputs)
    assert y.shape == (0, DIM)
    assert [g.shape for g in grads] == [leaf.shape for leaf in inputs]
    assert not any(g.any() for g in grads)


@pytest.mark.parametrize("backend", [loop, Grouped()], ids=["loop", "grouped"])
def test_slots_that_are_not_listed_count_nothing(backend: Backend) -> None:
    inputs, experts = leaves(8, 3, torch.float32), choices(8, 3)
    # Experts 2..5 are here; tokens may have three slots here or none.
    here = [*inputs[:2], *(w[2:6].detach().requires_grad_() for w in inputs[2:])]

    def partial() -> Tensor:
        x, weights, w1, w3, w2 = here
        whole = batch_of(x, weights, experts, 8)
        assert whole.counts is not None
        start, stop = sum(whole.counts[:2]), sum(whole.counts[:6])
        batch = whole._replace(
            order=whole.order[start:stop],
            counts=whole.counts[2:6],
            num_tokens_per_expert=whole.num_tokens_per_expert[2:6],
        )
        return routed_swiglu_by(backend, batch, plain_weights(w1, w3, w2))

    exact = [leaf.detach().double().requires_grad_() for leaf in here]
    actual = results(partial, here)
    assert worst(actual, results(lambda: plain(exact, experts - 2), exact)) <= 1e-6
    away = (experts < 2) | (experts > 5)
    assert away.any()
    assert not actual[2][away].any()


def test_outputs_may_be_changed_in_place() -> None:
    inputs, experts = leaves(8, 2, torch.float64), choices(8, 2)
    experts[::3, 0] = -1
    expected = results(lambda: 2 * plain(inputs, experts), inputs)
    assert worst(results(lambda: applied(inputs, experts).mul_(2), inputs), expected) <= 1e-12


def test_without_routing_weights_all_count_one() -> None:
    inputs, experts = leaves(8, 2, torch.float64), choices(8, 2)
    x, _, w1, w3, w2 = inputs
    ones = [x, torch.ones(TOKENS, 2, dtype=torch.float64), w1, w3, w2]
    unweighted = routed_swiglu(batch_of(x, None, experts, 8), w1, w3, w2)
    assert torch.equal(unweighted, applied(ones, experts))


def test_reruns_have_the_same_bits() -> None:
    inputs, experts = leaves(8, 3, torch.float32), choices(8, 3)
    first = results(lambda: applied(inputs, experts), inputs)
    second = results(lambda: applied(inputs, experts), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("backend", [loop, Grouped()], ids=["loop", "grouped"])
def test_backward_keeps_rows_routing_and_two_preactivations(backend: Backend) -> None:
    inputs, experts = leaves(8, 2, torch.float32), choices(8, 2)
    weights = {leaf.data_ptr() for leaf in inputs[2:]}
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        applied(inputs, experts, backend)
    kept = sum(t.numel() * t.element_size() for t in saved if t.data_ptr() not in weights)
    slots = TOKENS * 2
    order = 8 if backend is loop else 4  # bytes for a slot: both ways, or one
    assert kept == 4 * (TOKENS * DIM + slots + 2 * slots * HIDDEN) + order * slots


@pytest.mark.parametrize("backend", [loop, Grouped()], ids=["loop", "grouped"])
def test_weight_gradients_can_be_put_off(backend: Backend) -> None:
    experts, queue = choices(8, 2), WeightGradQueue()

    def gradients(*, defer: bool) -> list[Tensor]:
        inputs = leaves(8, 2, torch.float32)
        for key in range(2):
            y = applied(inputs, experts, backend).square().sum()
            if not defer:
                y.backward()
                continue
            with queue.defer(key):
                y.backward()
        if defer:
            assert [leaf.grad is None for leaf in inputs] == [False, False, True, True, True]
            assert queue.flush(0) == queue.flush(1) == 3
        return [leaf.grad for leaf in inputs if leaf.grad is not None]

    later, at_once = gradients(defer=True), gradients(defer=False)
    assert len(later) == len(at_once) == 5
    assert all(torch.equal(a, b) for a, b in zip(later, at_once, strict=True))


def test_weights_that_are_no_leaves_get_gradients_at_once() -> None:
    experts = choices(8, 2)
    inputs, queue = leaves(8, 2, torch.float64), WeightGradQueue()
    x, weights, *params = inputs

    def halved() -> Tensor:
        return applied([x, weights, *(p * 0.5 for p in params)], experts)

    expected = results(lambda: plain([x, weights, *(p * 0.5 for p in params)], experts), inputs)
    with queue.defer(0):
        actual = results(halved, inputs)
    assert queue.pending() == 0
    assert worst(actual, expected) <= 1e-12


def test_frozen_weights_get_no_gradient() -> None:
    inputs, experts = leaves(8, 2, torch.float64), choices(8, 2)
    expected = results(lambda: plain(inputs, experts), inputs)
    inputs[2].requires_grad_(False)
    inputs[4].requires_grad_(False)
    wanted = [inputs[0], inputs[1], inputs[3]]
    y, *grads = results(lambda: applied(inputs, experts), wanted)
    assert worst([y, *grads], [expected[0], expected[1], expected[2], expected[4]]) <= 1e-12


def test_wide_master_weights_serve_narrow_rows() -> None:
    inputs, experts = leaves(8, 2, torch.float32), choices(8, 2)
    narrow = [inputs[0].detach().bfloat16().requires_grad_(), *inputs[1:]]
    actual = results(lambda: applied(narrow, experts), narrow)
    assert [t.dtype for t in actual] == [torch.bfloat16] * 2 + [torch.float32] * 4
    exact = [leaf.detach().double().requires_grad_() for leaf in narrow]
    assert worst(actual, results(lambda: plain(exact, experts), exact)) <= 2e-2


@pytest.mark.parametrize("backend", [loop, Grouped()], ids=["loop", "grouped"])
def test_weights_that_fp16_does_not_hold_count_in_all_gradients(backend: Backend) -> None:
    inputs, experts = leaves(8, 2, torch.float32), choices(8, 2)
    small = [leaf.detach().half().requires_grad_() for leaf in inputs]
    small[1] = (1e-7 * inputs[1].detach()).requires_grad_()
    exact = [leaf.detach().double().requires_grad_() for leaf in small]
    # As large as a loss that is scaled makes them.
    upstream = torch.linspace(-1e3, 1e3, TOKENS * DIM).view(TOKENS, DIM)
    actual = torch.autograd.grad(applied(small, experts, backend), small, upstream.half())
    expected = torch.autograd.grad(plain(exact, experts), exact, upstream.double())
    assert worst(list(actual), list(expected)) <= 2e-2


def test_autocast_computes_in_its_dtype_and_leaves_fp64_alone() -> None:
    experts = choices(8, 2)
    for dtype in (torch.float32, torch.float64):
        inputs = leaves(8, 2, dtype)
        with torch.autocast("cpu", torch.bfloat16):
            y = applied(inputs, experts)
        assert y.dtype == dtype  # sums are not rounded to that of the products
        assert torch.equal(y, applied(inputs, experts)) == (dtype == torch.float64)
        grads = torch.autograd.grad(y.sum(), inputs)
        assert [g.dtype for g in grads] == [dtype] * 5


def test_an_expanded_gradient_is_taken() -> None:
    inputs, experts = leaves(8, 2, torch.float32), choices(8, 2)
    actual = torch.autograd.grad(applied(inputs, experts, Grouped()).sum(), inputs)
    expected = torch.autograd.grad(plain(inputs, experts).sum(), inputs)
    assert worst(list(actual), list(expected)) <= 1e-5


def test_a_second_derivative_is_refused() -> None:
    inputs, experts = leaves(4, 1, torch.float64), choices(4, 1)
    y = applied(inputs, experts)
    for loss in (y.square().sum(), y.sum()):
        for leaf in inputs:
            (gradient,) = torch.autograd.grad(loss, leaf, create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                (gradient.sum() + loss).backward()


def test_rows_must_fit_the_weights() -> None:
    inputs, experts = leaves(4, 1, torch.float32), choices(4, 1)
    x, weights, w1, w3, w2 = inputs
    with pytest.raises(ValueError, match=r"rows \(\(13, 4\)\) must be \[N, dim \(8\)\]"):
        applied([x[:, :4], weights, w1, w3, w2], experts)
    with pytest.raises(ValueError, match=r"dtype of rows \(torch.float64\) must equal"):
        applied([x.double(), weights, w1, w3, w2], experts)
    batch = batch_of(x, weights, experts, 4)
    with pytest.raises(ValueError, match=r"len\(counts\) \(4\) must equal .* \(3\)"):
        routed_swiglu(batch, w1[:3], w3[:3], w2[:3])
    assert batch.counts is not None
    for counts in (batch.counts[:3], (*batch.counts[:3], 0)):
        with pytest.raises(ValueError, match=r"must be one for each of 4 local experts, 13 in all"):
            routed_swiglu(batch._replace(counts=counts), w1, w3, w2)


def test_the_module_takes_sorted_rows_with_their_counts() -> None:
    torch.manual_seed(0)
    module = GroupedExperts(4, DIM, HIDDEN, dtype=torch.float64)
    counts = torch.tensor([3, 0, 2, 1])
    rows = torch.randn(6, DIM, dtype=torch.float64)
    out = module(rows, counts)
    for row, e, y in zip(rows, [0, 0, 0, 2, 2, 3], out, strict=True):
        hidden = F.silu(module.w1[e] @ row) * (module.w3[e] @ row)
        assert torch.allclose(y, module.w2[e] @ hidden, rtol=1e-12)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (torch.tensor([3, 0, 2, 2]), r"sum of num_tokens_per_expert \(7\) must equal .* \(6\)"),
        (torch.tensor([3, 0, 2, 0]), r"sum of num_tokens_per_expert \(5\) must equal .* \(6\)"),
        (torch.tensor([7, -1, 0, 0]), "none may be negative"),
        (torch.tensor([3, 3]), r"must be integer and \[num_experts \(4\)\]"),
        (torch.tensor([3.0, 0, 2, 1]), r"must be integer and \[num_experts \(4\)\]"),
    ],
)
def test_counts_must_fit_the_rows(counts: Tensor, message: str) -> None:
    module = GroupedExperts(4, DIM, HIDDEN)
    with pytest.raises(ValueError, match=message):
        module(torch.randn(6, DIM), counts)


def test_counts_must_be_given_with_rows() -> None:
    with pytest.raises(TypeError, match="num_tokens_per_expert must be given"):
        GroupedExperts(4, DIM, HIDDEN)(torch.randn(6, DIM))


def test_parameters_start_like_those_of_linear_layers() -> None:
    module = GroupedExperts(4, DIM, HIDDEN)
    for weight, fan_in in ((module.w1, DIM), (module.w3, DIM), (module.w2, HIDDEN)):
        assert isinstance(weight, nn.Parameter)
        assert weight.abs().max() <= fan_in**-0.5
        assert weight.std() > 0.4 * fan_in**-0.5
