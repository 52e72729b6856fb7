"""A recompute routes as its forward did, whatever has changed in between."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointError,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hp_expert import GroupedExperts, MoE, Routing, TopKRouter, save_routing
from hp_expert.routing.recompute import decide

pytestmark = pytest.mark.usefixtures("one_thread")

DIM, HIDDEN, EXPERTS, CHOICES = 6, 8, 8, 2
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class NoisyRouter(TopKRouter):
    """Its logits differ in the last bits from call to call, and so do ties between experts.

    Attributes:
        calls: How often logits were computed.
        noise: How large the difference is.
    """

    calls = 0
    noise = 1e-12

    def route(  # type: ignore[override] # as it was before there was padding
        self, logits: Tensor, *, replay: Tensor | None = None
    ) -> Routing:
        self.calls += 1
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(self.calls))
        return super().route(logits + self.noise * noise.double(), replay=replay)


def layer(*, seed: int = 0) -> MoE:
    torch.manual_seed(seed)
    router = NoisyRouter(DIM, EXPERTS, CHOICES, correction_bias=True)
    moe = MoE(router, GroupedExperts(EXPERTS, DIM, HIDDEN)).double()
    with torch.no_grad():
        moe.router.weight[1:] = moe.router.weight[0]  # all experts tie: noise alone decides
    return moe


def apply(moe: MoE, x: Tensor) -> Tensor:
    result: tuple[Tensor, Routing] = moe(x)
    return result[0]


def tokens(seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 6, DIM, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def gradients(modules: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    (y * torch.cos(3 * x.detach())).sum().backward()
    found = [t.grad for t in (x, *modules.parameters())]
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(
        torch.allclose(a, e, rtol=1e-9, atol=1e-10) for a, e in zip(actual, expected, strict=True)
    )


def in_one_go(*, seed: int = 1) -> list[Tensor]:
    moe, x = layer(), tokens(seed)
    return gradients(moe, x, apply(moe, x))


def test_without_it_a_recompute_goes_elsewhere() -> None:
    moe, x = layer(), tokens()
    y = checkpoint(partial(apply, moe), x, use_reentrant=False)
    try:
        actual = gradients(moe, x, y)
    except CheckpointError:
        return  # the experts had other numbers of rows
    assert not same(actual, in_one_go())


def test_with_it_a_recompute_goes_where_the_forward_went() -> None:
    moe, x = layer(), tokens()
    y = checkpoint(partial(apply, moe), x, use_reentrant=False, context_fn=save_routing)
    assert same(gradients(moe, x, y), in_one_go())
    assert isinstance(moe.router, NoisyRouter)
    assert moe.router.calls == 2


def test_a_bias_that_was_updated_in_between_does_not_matter() -> None:
    moe, x = layer(), tokens()
    y = checkpoint(partial(apply, moe), x, use_reentrant=False, context_fn=save_routing)
    assert moe.router.correction_bias is not None
    moe.router.correction_bias[3] = 100.0
    assert same(gradients(moe, x, y), in_one_go())


def test_what_was_dropped_is_dropped_again() -> None:
    def run(**options: Any) -> list[Tensor]:
        moe, x = layer(), tokens()
        moe.router.capacity_factor = 0.7
        weights: Callable[[Tensor], Tensor] = lambda x: moe.router(x).weights  # noqa: E731
        w = checkpoint(weights, x, **options) if options else weights(x)
        (w * torch.arange(1.0, 3.0)).sum().backward()
        assert x.grad is not None
        return [w.detach(), x.grad]

    assert same(run(use_reentrant=False, context_fn=save_routing), run())


def test_any_number_of_checkpoints_is_open_at_once() -> None:
    moe, expected = layer(), layer()
    xs = [tokens(seed) for seed in range(4)]
    ys = [
        checkpoint(partial(apply, moe), x, use_reentrant=False, context_fn=save_routing) for x in xs
    ]
    for x, y in list(zip(xs, ys, strict=True))[::-1]:
        gradients(moe, x, y)
    others = [tokens(seed) for seed in range(4)]
    outs = [apply(expected, x) for x in others]
    for x, y in list(zip(others, outs, strict=True))[::-1]:
        gradients(expected, x, y)
    assert same(
        [x.grad for x in xs if x.grad is not None], [x.grad for x in others if x.grad is not None]
    )
    assert torch.equal(moe.router.load, expected.router.load)


class Layers(nn.Module):
    """Three layers; a router sees the noise of the ones before."""

    def __init__(self, context_fn: ContextFn | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(seed=seed) for seed in range(3))
        self.context_fn = context_fn

    def some(self, x: Tensor, first: int, last: int) -> Tensor:
        for moe in self.layers[first:last]:
            x = x + moe(x)[0]
        return x

    def inner(self, x: Tensor) -> Tensor:
        x = self.some(x, 0, 1)
        if self.context_fn is None:
            return self.some(x, 1, 3)
        x = checkpoint(self.some, x, 1, 2, use_reentrant=False, context_fn=self.context_fn)
        return self.some(x, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.context_fn is None:
            return self.inner(x)
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False, context_fn=self.context_fn)
        return y


def test_checkpoints_may_be_nested() -> None:
    (model, expected), (x, other) = (Layers(save_routing), Layers(None)), (tokens(), tokens())
    assert same(gradients(model, x, model(x)), gradients(expected, other, expected(other)))
    loads = [part.load.sum() for part in model.modules() if isinstance(part, TopKRouter)]
    assert loads == [12 * CHOICES] * 3


def test_the_graph_may_be_kept_for_a_second_backward() -> None:
    moe, x = layer(), tokens()
    y = checkpoint(partial(apply, moe), x, use_reentrant=False, context_fn=save_routing)
    first, second = (
        torch.autograd.grad(y.square().sum(), (x, moe.experts.w1), retain_graph=True)
        for _ in range(2)
    )
    assert same(list(first), list(second))


def test_threads_do_not_see_each_others_records() -> None:
    moe, barrier = layer(), threading.Barrier(2, timeout=20)
    seen: dict[int, list[Tensor]] = {1: [], 2: []}

    def run(seed: int) -> None:
        def route(x: Tensor) -> Tensor:
            barrier.wait()
            routing: Routing = moe.router(x)
            seen[seed].append(routing.experts)
            barrier.wait()
            return routing.weights.sin()

        for _ in range(5):
            x = tokens(seed)
            w = checkpoint(route, x, use_reentrant=False, context_fn=save_routing)
            w.square().sum().backward()

    threads = [threading.Thread(target=run, args=(seed,)) for seed in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for experts in seen.values():
        assert len(experts) == 10
        assert all(map(torch.equal, experts[::2], experts[1::2]))
    assert moe.router.load.sum() == 2 * 5 * 12 * CHOICES


def save_routing_operators(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    """A policy that also saves what routing is made of."""
    aten = torch.ops.aten
    saved = {aten.max.dim, aten.cat.default, aten.gather.default}
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


def test_selective_checkpointing_goes_around_it() -> None:
    moe, x = layer(), tokens()
    selective = partial(create_selective_checkpoint_contexts, save_routing_operators)
    context_fn = partial(save_routing, selective)

    def twice(x: Tensor) -> Tensor:
        # Another `max` after the router's: saved results are handed out in order.
        return apply(moe, x) * x.max(dim=-1, keepdim=True).values

    y = checkpoint(twice, x, use_reentrant=False, context_fn=context_fn)
    actual = gradients(moe, x, y)
    moe, x = layer(), tokens()
    assert same(actual, gradients(moe, x, twice(x)))


def test_a_recompute_that_decides_more_often_is_an_error() -> None:
    _, recompute = forward_of(["a"])
    with recompute:
        decide("a", lambda: 0)
        with pytest.raises(RuntimeError, match=r"recompute \(2\) must not be more .* \(1\)"):
            decide("a", lambda: 0)


def test_a_recompute_in_another_order_is_an_error() -> None:
    _, recompute = forward_of(["a", "b"])
    with recompute, pytest.raises(RuntimeError, match=r"decision 0 of a recompute \(b\) must"):
        decide("b", lambda: 0)


def forward_of(owners: list[str]) -> Any:
    contexts = save_routing()
    with contexts[0]:
        for index, owner in enumerate(owners):
            assert decide(owner, partial(int, index)) == index
    return contexts


def test_an_error_in_a_checkpoint_leaves_no_context_open() -> None:
    def fails(x: Tensor) -> Tensor:
        raise ValueError(f"no {x.ndim}")

    with pytest.raises(ValueError, match="no 3"):
        checkpoint(fails, tokens(), use_reentrant=False, context_fn=save_routing)
    moe, x = layer(), tokens()
    assert same(gradients(moe, x, apply(moe, x)), in_one_go())
    counted = decide("outside", lambda: 5)
    assert counted == 5


# Of torch itself, where it cuts a graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("ran_before", [False, True])
def test_a_compiled_router_goes_where_it_went_as_well(*, ran_before: bool) -> None:
    torch.compiler.reset()
    router = TopKRouter(DIM, EXPERTS, CHOICES, correction_bias=True)
    compiled = torch.compile(router, backend="aot_eager")
    x = tokens().detach().float().requires_grad_()
    if ran_before:  # where nothing is kept
        compiled(x)
        router.load.zero_()
    bias, experts = router.correction_bias, list[Tensor]()
    assert bias is not None

    def route(x: Tensor) -> Tensor:
        routing: Routing = compiled(x)
        experts.append(routing.experts.clone())
        return routing.weights.sin()

    w = checkpoint(route, x, use_reentrant=False, context_fn=save_routing)
    bias[int(experts[0][0, 1])] = -100.0
    w.sum().backward()
    assert torch.equal(*experts)
    assert router.load.sum() == 12 * CHOICES
