"""What is in flight comes in order, and nothing stays there whatever happens."""

import copy
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from context_block import (
    SIZE,
    WIDTH,
    Block,
    Case,
    Projection,
    gradients,
    hidden,
    once,
    overlapped,
    same,
    since,
    synchronous,
)
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_context import AsyncContextParallel, Attention
from hp_context.methods import in_flight
from hp_platform import Pending, ThreadContext, WeightGradQueue, _internals, linear
from hp_platform.collectives.pending import release_completed
from hp_platform.testing import run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")


Trace = dict[str, list[str]]


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    """What each rank does, in order; exchanges are named by the shape of what they carry."""
    events: Trace = {}
    launch, wait = dist.all_to_all_single, Pending.wait
    exchange = _internals.functional_all_to_all
    names: dict[int, str] = {}

    def traced_launch(y: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        log(events, f"launch {letter(x)}")
        names[y.data_ptr()] = letter(x)
        return launch(y, x, *args, **kwargs)

    def traced_wait(pending: Pending[Tensor]) -> Tensor:
        y = wait(pending)
        log(events, f"wait {names.pop(y.data_ptr())}")
        return y

    def traced_exchange(x: Tensor, *args: Any) -> Tensor:
        log(events, "exchange out" if x.size(-1) == VALUE_SIZE else f"exchange {letter(x)}")
        y: Tensor = exchange(x, *args)
        return y

    monkeypatch.setattr(dist, "all_to_all_single", traced_launch)
    monkeypatch.setattr(Pending, "wait", traced_wait)
    monkeypatch.setattr(_internals, "functional_all_to_all", traced_exchange)
    return events


VALUE_SIZE = 3


def letter(packed: Tensor) -> str:
    """Name [N, B, s, h, D] of 4 query heads, 2 key heads and narrow values on 2 ranks."""
    heads, size = packed.shape[-2:]
    return "v" if size == VALUE_SIZE else "q" if heads == 2 else "k"


def log(events: Trace, event: str) -> None:
    events.setdefault(threading.current_thread().name, []).append(event)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, events: Trace, name: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.call = events, name
        log(events, f"multiply {name}")
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        events, name = ctx.call
        log(events, f"multiply back {name}")
        return grad @ weight.mT, (x.mT @ grad).sum(0), None, None


class Logged(nn.Module):
    """A projection to heads that tells when it computes."""

    def __init__(self, name: str, heads: int, size: int, events: Trace) -> None:
        super().__init__()
        self.call, self.heads = (events, name), heads
        self.weight = nn.Parameter(torch.ones(WIDTH, heads * size))

    def forward(self, x: Tensor) -> Tensor:
        matmul: Any = _Matmul
        y: Tensor = matmul.apply(x, self.weight, *self.call).unflatten(-1, (self.heads, -1))
        return y


def traced_layer(group: ProcessGroup, events: Trace, *, rope: bool) -> None:
    """Attention after projections, the second of two passes in the trace."""
    sizes = {"q": (4, SIZE), "k": (2, SIZE), "v": (2, VALUE_SIZE)}
    q, k, v = (Logged(name, *size, events) for name, size in sizes.items())
    parallel = AsyncContextParallel(overlap=True)
    core = parallel.apply(Attention(), group, *(() if rope else (q, k, v)))
    for _ in range(2):
        events.pop(threading.current_thread().name, None)
        x = hidden(group)
        if rope:
            made = [
                parallel.launch(p(x).sigmoid() if p is not v else p(x), group) for p in (q, k, v)
            ]
        else:
            made = [p(x) for p in (q, k, v)]
        core(*made).sum().backward()


@pytest.mark.parametrize("rope", [False, True], ids=["hooks", "launch"])
def test_the_order_of_launches_and_waits_leaves_room_for_the_products(
    trace: Trace, rope: bool
) -> None:
    run_in_threads(partial(traced_layer, events=trace, rope=rope), world_size=2)
    forward = """
        multiply q, launch q, multiply k, launch k, multiply v, launch v,
        wait q, wait k, wait v, exchange out"""
    backward = """
        exchange out, launch v, launch k, launch q,
        wait v, multiply back v, wait k, multiply back k, wait q, multiply back q"""
    expected = [event.strip() for event in f"{forward}, {backward}".split(",")]
    assert trace["rank0"] == expected
    assert trace["rank1"] == expected


def test_a_launch_after_rotation_overlaps_with_the_same_bits() -> None:
    original = Block(Case("rope", 1))

    def rank(group: ProcessGroup) -> tuple[bool, Any]:
        reference = gradients(synchronous(original, group), group)
        block = copy.deepcopy(original)
        parallel = AsyncContextParallel(overlap=True)
        parallel.apply(block.core, group)

        def launched(x: Tensor) -> tuple[Tensor, ...]:
            return tuple(parallel.launch(made, group) for made in Block.project(block, x))

        block.project = launched  # type: ignore[method-assign,assignment]
        gradients(block, group)
        before = parallel.counts
        return same(gradients(block, group), reference), since(before, parallel.counts)

    assert run_in_threads(rank, world_size=2) == [(True, (3, 3, {}))] * 2


def count_in_flight() -> int:
    """Records that anything still refers to; a collector has not helped."""
    return sum(type(thing) is in_flight.InFlight for thing in gc.get_objects())


def nothing_in_flight() -> bool:
    deadline = time.monotonic() + 60
    while release_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    return release_completed() == 0 and count_in_flight() == 0


class Breaks(Projection):
    """Raises where it is told to."""

    when = ""

    def multiply(self, x: Tensor) -> Tensor:
        if self.when == "forward":
            raise ArithmeticError("broken")
        y = super().multiply(x)
        if self.when == "backward":
            y.register_hook(self.fail)
        return y

    def fail(self, _: Tensor) -> Tensor:
        raise ArithmeticError("broken")


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_exception_leaves_nothing_in_flight(when: str) -> None:
    """In forward q and k are under way when v breaks, in backward dq and dk."""
    original = Block(Case(), Breaks)
    gc.collect()
    gc.disable()

    def rank(group: ProcessGroup) -> tuple[bool, bool]:
        reference = gradients(synchronous(original, group), group)
        block, _ = overlapped(original, group)
        gradients(block, group)
        assert isinstance(block.v, Breaks)
        block.v.when = when
        with suppress(ArithmeticError):
            gradients(block, group)
        block.v.when = ""
        dist.barrier(group)
        empty = nothing_in_flight()
        dist.barrier(group)
        return empty, same(gradients(block, group), reference)

    try:
        assert run_in_threads(rank, world_size=2) == [(True, True)] * 2
    finally:
        gc.enable()


def test_projections_without_attention_leave_nothing_in_flight() -> None:
    original = Block(Case())
    gc.collect()
    gc.disable()

    def rank(group: ProcessGroup) -> tuple[int, bool]:
        block, parallel = overlapped(original, group)
        gradients(block, group)
        made = block.project(hidden(group))
        dist.barrier(group)
        alive = count_in_flight()
        dist.barrier(group)
        sum(x.sum() for x in made).backward()  # type: ignore[union-attr]
        del made
        dist.barrier(group)
        empty = nothing_in_flight()
        assert parallel.counts.launched == parallel.counts.overlapped + 3
        return alive, empty

    try:
        assert run_in_threads(rank, world_size=2) == [(6, True)] * 2
    finally:
        gc.enable()


@pytest.mark.parametrize("recompute", ["core", "block"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
def test_recomputation_leaves_nothing_in_flight(recompute: str, kind: str) -> None:
    original = Block(Case("rope", recompute=f"{recompute} {kind}"))
    gc.collect()
    gc.disable()

    def rank(group: ProcessGroup) -> bool:
        block, _ = overlapped(original, group)
        for _ in range(2):
            gradients(block, group)
        dist.barrier(group)
        return nothing_in_flight()

    try:
        assert run_in_threads(rank, world_size=2) == [True] * 2
    finally:
        gc.enable()


def test_two_threads_share_modules_and_pass_backward_on() -> None:
    original = Block(Case("second consumer"))

    def run(block: Block, group: ProcessGroup) -> list[Tensor]:
        batches = [hidden(group), (hidden(group).detach() * 3).requires_grad_()]
        context = ThreadContext.capture()

        def of_this_one(fn: Callable[..., Any], *args: Any) -> Any:
            with context.apply():
                return fn(*args)

        def in_turn(pool: ThreadPoolExecutor) -> Callable[..., Future[Any]]:
            return lambda fn, *args: pool.submit(of_this_one, fn, *args)

        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            threads = [in_turn(one), in_turn(other)]
            pairs = list(zip(threads, batches, strict=True))
            made = [thread(block.project, x).result() for thread, x in pairs]
            outs = [
                thread(block.finish, x, *qkv).result()
                for (thread, x), qkv in zip(pairs, made, strict=True)
            ]
            results: list[Tensor] = []
            for thread, out, x in zip(reversed(threads), outs, batches, strict=True):
                leaves = [x, *block.parameters()]
                loss = out.square().sum()
                results += thread(torch.autograd.grad, loss, leaves).result()
        return results

    def rank(group: ProcessGroup) -> tuple[bool, Any]:
        reference = run(synchronous(original, group), group)
        block, parallel = overlapped(original, group)
        run(block, group)
        before = parallel.counts
        return same(run(block, group), reference), since(before, parallel.counts)

    assert run_in_threads(rank, world_size=2) == [(True, (6, 6, {}))] * 2


class Split(Projection):
    """Its weight gradients can be put off."""

    def multiply(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


def test_weight_gradients_may_be_put_off() -> None:
    original = Block(Case("second consumer"), Split)

    def run(block: Block, group: ProcessGroup) -> list[Tensor]:
        queue, x = WeightGradQueue(), hidden(group)
        block.zero_grad()
        with queue.defer(0):
            once(block, x).square().sum().backward()
        assert queue.flush(0) == 3
        return [leaf.grad for leaf in (x, *block.parameters()) if leaf.grad is not None]

    def rank(group: ProcessGroup) -> bool:
        reference = run(synchronous(original, group), group)
        block, _ = overlapped(original, group)
        run(block, group)
        return same(run(block, group), reference)

    assert all(run_in_threads(rank, world_size=2))


def test_a_graph_may_go_backward_in_parts_and_again() -> None:
    original = Block(Case("second consumer"))
    gc.collect()

    def run(block: Block, group: ProcessGroup) -> list[Tensor]:
        x = hidden(group)
        loss = once(block, x).square().sum()
        parts = [[x], [block.k.weight], [block.q.weight, block.v.weight], [x]]
        return [g for part in parts for g in torch.autograd.grad(loss, part, retain_graph=True)]

    def rank(group: ProcessGroup) -> tuple[bool, bool]:
        reference = run(synchronous(original, group), group)
        block, _ = overlapped(original, group)
        run(block, group)
        right = same(run(block, group), reference)
        dist.barrier(group)
        return right, nothing_in_flight()

    assert run_in_threads(rank, world_size=2) == [(True, True)] * 2
