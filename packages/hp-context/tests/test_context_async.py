"""Overlapped exchanges give the bits of synchronous ones, whatever happens in between."""

import copy
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils.checkpoint import checkpoint

from hp_context import (
    AsyncContextParallel,
    Attention,
    Causal,
    ContextParallel,
    Fallback,
    OverlapCounts,
    OverlapRates,
    head_to_seq,
    in_flight,
)
from hp_context.checks import Dims
from hp_platform import Pending, WeightGradQueue, _internals, linear
from hp_platform.pending import release_completed
from hp_platform.testing import run_distributed, run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, LOCAL, HEADS, SIZE = 2, 6, 4, 8
WIDTH = HEADS * SIZE
BSHD, BNSD = (1, 2), (2, 1)


class Projection(nn.Linear):
    """Returns heads, in the layout of attention."""

    def __init__(self, heads: int, dims: tuple[int, int] = BSHD) -> None:
        super().__init__(WIDTH, heads * SIZE, bias=False)
        self.heads, self.dims = heads, dims

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.multiply(x).unflatten(-1, (self.heads, SIZE))
        return y if self.dims == BSHD else y.transpose(1, 2)

    def multiply(self, x: Tensor) -> Tensor:
        return super().forward(x)


@dataclass(frozen=True)
class Case:
    """What lies between the projections and the end of a block."""

    name: str = "plain"
    kv_heads: int = HEADS
    dims: tuple[int, int] = BSHD
    recompute: str = ""


class Block(nn.Module):
    def __init__(self, case: Case, projection: type[Projection] = Projection) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.case = case
        self.leaf: Tensor | None = None
        self.q = projection(HEADS, case.dims)
        self.k = projection(case.kv_heads, case.dims)
        self.v = projection(case.kv_heads, case.dims)
        seq_dim, head_dim = case.dims
        self.core = Attention(Causal(), seq_dim=seq_dim, head_dim=head_dim)
        with torch.no_grad():
            for weight in self.parameters():
                weight.copy_(torch.randn(weight.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        if self.case.recompute.startswith("block"):
            reentrant = "non" not in self.case.recompute
            out: Tensor = checkpoint(self.attend, x, use_reentrant=reentrant)
            return out
        return self.attend(x)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.finish(x, q, k, v)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.case.name == "rope":
            angle = torch.linspace(0, 3, LOCAL).view(LOCAL, *[1] * (3 - self.case.dims[0]))
            q, k = q * angle.cos(), k * angle.cos()
        elif self.case.name == "written":
            q.mul_(0.5)
        elif self.case.name == "begun":
            with torch.no_grad():
                k = self.k(x)
            self.leaf = k.requires_grad_()
        return q, k, v

    def finish(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        core: Callable[..., Tensor] = self.core
        if self.case.recompute.startswith("core"):
            core = partial(checkpoint, core, use_reentrant="non" not in self.case.recompute)
        out = core(q, k, v)
        if self.case.name == "second consumer":
            out = out + q.sigmoid()
        return x + (out if self.case.dims == BSHD else out.transpose(1, 2)).flatten(2)


Step = Callable[[Block, Tensor], Tensor]


def once(block: Block, x: Tensor) -> Tensor:
    out: Tensor = block(x)
    return out


def twice(block: Block, x: Tensor) -> Tensor:
    return once(block, x) + once(block, x * 2)


def interleaved(block: Block, x: Tensor) -> Tensor:
    """The projections of two microbatches come before either attention."""
    y = x * 2
    first, second = block.project(x), block.project(y)
    return block.finish(x, *first) + block.finish(y, *second)


def crosswise(block: Block, x: Tensor) -> Tensor:
    """The second microbatch overtakes the first."""
    y = x * 2
    first, second = block.project(x), block.project(y)
    late = block.finish(y, *second)
    return block.finish(x, *first) + late


def hidden(group: ProcessGroup) -> Tensor:
    generator = torch.Generator().manual_seed(11 + group.rank())
    return torch.randn(BATCH, LOCAL, WIDTH, generator=generator).requires_grad_()


def gradients(block: Block, group: ProcessGroup, step: Step = once) -> list[Tensor]:
    """Output, and gradients of the input and of the weights."""
    x = hidden(group)
    out = step(block, x)
    block.zero_grad()
    out.square().sum().backward()
    assert x.grad is not None
    weights = [p.grad.clone() for p in block.parameters() if p.grad is not None]
    leaves = [] if block.leaf is None or block.leaf.grad is None else [block.leaf.grad]
    return [out.detach(), x.grad, *weights, *leaves]


def synchronous(original: Block, group: ProcessGroup) -> Block:
    block = copy.deepcopy(original)
    seq_dim, head_dim = block.case.dims
    ContextParallel(seq_dim=seq_dim, head_dim=head_dim).apply(block.core, group)
    return block


def overlapped(
    original: Block, group: ProcessGroup, **options: Any
) -> tuple[Block, AsyncContextParallel]:
    block = copy.deepcopy(original)
    seq_dim, head_dim = block.case.dims
    options = {"overlap": True} | options
    parallel = AsyncContextParallel(seq_dim=seq_dim, head_dim=head_dim, **options)
    parallel.apply(block.core, group, block.q, block.k, block.v)
    return block, parallel


def same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def since(before: OverlapCounts, now: OverlapCounts) -> tuple[int, int, dict[Fallback, int]]:
    """Launched, overlapped and fallbacks between two moments."""
    reasons = {r: n - before.fallbacks.get(r, 0) for r, n in now.fallbacks.items()}
    return (
        now.launched - before.launched,
        now.overlapped - before.overlapped,
        {reason: number for reason, number in reasons.items() if number},
    )


CASES: dict[str, tuple[Case, Step, tuple[int, int, dict[Fallback, int]]]] = {
    "plain": (Case(), once, (3, 3, {})),
    "rope": (Case("rope"), once, (3, 1, {Fallback.REPLACED: 2})),
    "second consumer": (Case("second consumer"), once, (3, 3, {})),
    "core non-reentrant": (
        Case(recompute="core non-reentrant"),
        once,
        (3, 3, {Fallback.TAKEN: 3}),
    ),
    "core reentrant": (Case(recompute="core reentrant"), once, (3, 3, {Fallback.REPLACED: 3})),
    "block non-reentrant": (Case(recompute="block non-reentrant"), once, (6, 6, {})),
    "block reentrant": (Case(recompute="block reentrant"), once, (6, 6, {})),
    "two forwards": (Case(), twice, (6, 6, {})),
    "interleaved": (Case(), interleaved, (6, 6, {})),
    "crosswise": (Case(), crosswise, (6, 6, {})),
    "written in place": (Case("written"), once, (3, 2, {Fallback.WRITTEN: 1})),
    "gradient begun": (Case("begun"), once, (4, 2, {Fallback.REDIRECTED: 1})),
}


@pytest.mark.parametrize("kv_heads", [HEADS, 1], ids=["", "shared heads"])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_are_those_of_the_synchronous_exchange(name: str, kv_heads: int) -> None:
    case, step, expected = CASES[name]
    original = Block(Case(case.name, kv_heads, BSHD, case.recompute))

    def rank(group: ProcessGroup) -> tuple[bool, bool, Any]:
        reference = gradients(synchronous(original, group), group, step)
        block, parallel = overlapped(original, group)
        first = gradients(block, group, step)
        before = parallel.counts
        second = gradients(block, group, step)
        return same(first, reference), same(second, reference), since(before, parallel.counts)

    for result in run_in_threads(rank, world_size=2):
        assert result == (True, True, expected)


@pytest.mark.parametrize(("ranks", "kv_heads"), [(2, 2), (4, 4), (4, 2)])
def test_heads_first_and_more_ranks_change_nothing(ranks: int, kv_heads: int) -> None:
    original = Block(Case("second consumer", kv_heads, BNSD))

    def rank(group: ProcessGroup) -> tuple[bool, int]:
        reference = gradients(synchronous(original, group), group)
        block, parallel = overlapped(original, group)
        gradients(block, group)
        return same(gradients(block, group), reference), parallel.counts.overlapped

    assert run_in_threads(rank, world_size=ranks) == [(True, 3)] * ranks


MODES: list[tuple[dict[str, Any], int]] = [
    ({"load_balance": True}, 3),
    ({"ulysses_degree": 2}, 3),
    ({"ulysses_degree": 2, "load_balance": True}, 3),
    ({"ulysses_degree": 1}, 0),  # there are no heads to exchange
]


def overlapped_in_other_modes() -> list[tuple[bool, int]]:
    group, results = dist.group.WORLD, []
    assert group is not None
    original = Block(Case(kv_heads=2))
    for options, _ in MODES:
        reference = copy.deepcopy(original)
        ContextParallel(**options).apply(reference.core, group)
        expected = gradients(reference, group)
        block, parallel = overlapped(original, group, **options)
        gradients(block, group)
        results.append((same(gradients(block, group), expected), parallel.counts.overlapped))
    return results


@pytest.mark.usefixtures("one_thread")
def test_other_modes_overlap_what_they_exchange_of_heads() -> None:
    expected = [(True, overlaps) for _, overlaps in MODES]
    assert run_distributed(overlapped_in_other_modes, world_size=4) == [expected] * 4


class Slots:
    """The naive design: what is in flight waits in a slot for each projection.

    Attention takes whatever lies in the slots; backward puts the exchanged gradient in place of
    the one that the projection gets.
    """

    def __init__(self, block: Block, group: ProcessGroup) -> None:
        self.forward: dict[str, Pending[Tensor] | None] = {}
        self.back: dict[str, list[Pending[Tensor]]] = {letter: [] for letter in "qkv"}
        self.exchange = in_flight.Exchange(group, Dims(1, 2), None)
        for letter in "qkv":
            projection: nn.Module = getattr(block, letter)
            projection.register_forward_hook(partial(self.launch, letter))
            projection.register_full_backward_pre_hook(partial(self.replace, letter))
        block.core.register_forward_pre_hook(self.take)
        block.core.register_forward_hook(lambda _, __, out: head_to_seq(out, group=group))

    def launch(self, letter: str, _: nn.Module, __: object, x: Tensor) -> None:
        self.forward[letter] = self.exchange.launch(x.detach())

    def take(self, _: nn.Module, qkv: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        pairs = zip("qkv", qkv, strict=True)
        substitute: Any = _Substitute
        return tuple(substitute.apply(x, letter, self) for letter, x in pairs)

    def replace(self, letter: str, _: nn.Module, grads: tuple[Tensor]) -> tuple[Tensor]:
        received = self.back[letter].pop().wait()
        return (self.exchange.arrived_back(received, grads[0].shape),)


class _Substitute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, letter: str, slots: Slots) -> Tensor:
        ctx.call, ctx.shape = (letter, slots), x.shape
        pending, slots.forward[letter] = slots.forward[letter], None
        if pending is None:
            raise TypeError("the slot is empty")
        return slots.exchange.arrived(pending.wait(), x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        letter, slots = ctx.call
        slots.back[letter].append(slots.exchange.launch_back(grad, ctx.shape))
        return grad.new_zeros(ctx.shape), None, None


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("plain", "right"),
        ("rope", "wrong"),
        ("second consumer", "wrong"),
        ("core non-reentrant", "raises"),
        ("core reentrant", "raises"),
        ("block non-reentrant", "right"),
        ("block reentrant", "right"),
        ("two forwards", "right"),
        ("interleaved", "raises"),
    ],
)
def test_a_slot_for_each_projection_would_fail(name: str, outcome: str) -> None:
    case, step, _ = CASES[name]
    original = Block(case)

    def rank(group: ProcessGroup) -> str:
        reference = gradients(synchronous(original, group), group, step)
        naive = copy.deepcopy(original)
        Slots(naive, group)
        try:
            return "right" if same(gradients(naive, group, step), reference) else "wrong"
        except TypeError:
            return "raises"

    assert run_in_threads(rank, world_size=2) == [outcome] * 2


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
    deadline = time.monotonic() + 5
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
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
            threads = (one, other)
            pairs = list(zip(threads, batches, strict=True))
            made = [thread.submit(block.project, x).result() for thread, x in pairs]
            outs = [
                thread.submit(block.finish, x, *qkv).result()
                for (thread, x), qkv in zip(pairs, made, strict=True)
            ]
            results: list[Tensor] = []
            for thread, out, x in zip(reversed(threads), outs, batches, strict=True):
                leaves = [x, *block.parameters()]
                loss = out.square().sum()
                results += thread.submit(torch.autograd.grad, loss, leaves).result()
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


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        (OverlapRates(link=1e9, compute=1e9, overhead=1e-9), (3, 3, {})),
        (OverlapRates(link=1e15, compute=1e9, overhead=1e-9), (0, 0, {Fallback.COST: 3})),
        (OverlapRates(link=1e9, compute=1e18, overhead=1e-9), (0, 0, {Fallback.COST: 3})),
        (None, (0, 0, {Fallback.COST: 3})),
    ],
)
def test_the_cost_decides_by_bytes_and_operations(
    rates: OverlapRates | None, expected: Any
) -> None:
    original = Block(Case())

    def rank(group: ProcessGroup) -> tuple[bool, Any]:
        reference = gradients(synchronous(original, group), group)
        block, parallel = overlapped(original, group, overlap="auto", rates=rates)
        gradients(block, group)
        before = parallel.counts
        return same(gradients(block, group), reference), since(before, parallel.counts)

    assert run_in_threads(rank, world_size=2) == [(True, expected)] * 2


def test_an_exchange_pays_if_the_shorter_of_the_two_exceeds_the_overhead() -> None:
    rates = OverlapRates(link=100.0, compute=1000.0, overhead=1.0)
    assert rates.pays(101, 1001)
    assert not rates.pays(100, 1001)
    assert not rates.pays(101, 1000)


@pytest.mark.parametrize(
    ("heads", "index", "sent"),
    [(4, None, 2), (2, (0, 0, 1, 1), 2), (1, (0, 0), 1)],
    ids=["divided", "some shared", "one shared"],
)
def test_bytes_are_those_that_leave_the_rank(
    heads: int, index: tuple[int, ...] | None, sent: int
) -> None:
    """Of two ranks, each sends `sent` heads of its positions to the other."""

    def rank(group: ProcessGroup) -> float:
        exchange = in_flight.Exchange(group, Dims(1, 2), index)
        return exchange.num_bytes(torch.zeros(BATCH, LOCAL, heads, SIZE))

    assert run_in_threads(rank, world_size=2) == [4.0 * BATCH * LOCAL * sent * SIZE] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: AsyncContextParallel(overlap=cast("bool", "yes")),
            r"overlap \('yes'\) must be True, False or",
        ),
        (lambda: OverlapRates(0, 1, 1), r"link \(0\) must be > 0"),
        (lambda: OverlapRates(1, -1, 1), r"compute \(-1\) must be > 0"),
        (lambda: OverlapRates(1, 1, -1), r"overhead \(-1\) must be >= 0"),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_overlap_switched_off_and_a_group_of_one_launch_nothing() -> None:
    original = Block(Case())

    def rank(group: ProcessGroup, overlap: bool) -> tuple[bool, OverlapCounts]:
        reference = gradients(synchronous(original, group), group)
        block, parallel = overlapped(original, group, overlap=overlap)
        gradients(block, group)
        return same(gradients(block, group), reference), parallel.counts

    nothing = (True, OverlapCounts())
    assert run_in_threads(partial(rank, overlap=False), world_size=2) == [nothing] * 2
    assert run_in_threads(partial(rank, overlap=True), world_size=1) == [nothing]


def test_a_forward_without_gradients_overlaps_but_not_in_inference_mode() -> None:
    original = Block(Case())

    def rank(group: ProcessGroup) -> list[Any]:
        block, parallel = overlapped(original, group)
        x = hidden(group).detach()
        expected, results = once(synchronous(original, group), x), []
        for mode in (torch.no_grad, torch.no_grad, torch.inference_mode):
            before = parallel.counts
            with mode():
                out = once(block, x)
            results.append((torch.equal(out, expected), since(before, parallel.counts)))
        return results

    for result in run_in_threads(rank, world_size=2):
        assert result == [
            (True, (0, 0, {Fallback.FIRST_CALL: 3})),
            (True, (3, 3, {})),
            (True, (0, 0, {Fallback.INFERENCE: 3})),
        ]


def test_a_tensor_launched_for_another_attention_is_exchanged_for_this_one() -> None:
    """One core has the sequence second, the other third; four positions, four heads."""

    def rank(group: ProcessGroup) -> tuple[bool, Any]:
        parallel = AsyncContextParallel(overlap=True)
        turned = AsyncContextParallel(seq_dim=2, head_dim=1, overlap=True)
        core = parallel.apply(Attention(), group)
        turned.apply(Attention(seq_dim=2, head_dim=1), group)
        generator = torch.Generator().manual_seed(group.rank())
        qkv = [torch.randn(1, 4, 4, SIZE, generator=generator) for _ in "qkv"]
        expected = core(*qkv)
        for key, exchange in parallel._known.items():
            turned._known[key] = replace(exchange, dims=turned.dims)
        for x in qkv:
            turned.launch(x, group)
        before = parallel.counts
        return torch.equal(core(*qkv), expected), since(before, parallel.counts)

    assert run_in_threads(rank, world_size=2) == [(True, (0, 0, {Fallback.OTHER: 3}))] * 2


class WithBias(Projection):
    """Returns its bias apart, as Megatron's linear layers do."""

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def test_the_first_of_a_tuple_is_launched() -> None:
    def rank(group: ProcessGroup) -> int:
        projection = WithBias(HEADS)
        parallel = AsyncContextParallel(overlap=True)
        core = parallel.apply(Attention(), group, projection, projection, projection)
        for _ in range(2):
            core(*(projection(hidden(group))[0] for _ in "qkv"))
        return parallel.counts.overlapped

    assert run_in_threads(rank, world_size=2) == [3, 3]
