"""Overlapped chunks of a mixture of experts on two ranks: the same bits as one after the other."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from hp_overlap import CommComputeOverlap, HookCoordinator, TraceEntry
from hp_overlap.coordinator import Side
from hp_platform import all_to_all, all_to_all_lazy, set_fsdp_frees_parameters
from hp_platform.testing import (
    CountedClock,
    RankError,
    run_distributed,
    slow_group,
    watch_operators,
)

DIM, HIDDEN, TOKENS = 16, 24, 20


@dataclass(frozen=True)
class Case:
    forward: int = 3
    backward: int = 3
    dense_forward: tuple[int, ...] = ()
    dense_backward: tuple[int, ...] = ()
    same_module: bool = False
    recompute: str = ""
    dropout: float = 0.0
    sharded: str = ""
    autocast: bool = False
    compiled: str = ""


class Exchange:
    """Dispatch and combine of one expert per rank; all state is in arguments and results."""

    def __init__(self, overlap: CommComputeOverlap, group: dist.ProcessGroup) -> None:
        self.group = group
        self.dispatch = overlap.wrap_dispatch(self._dispatch)
        self.combine = overlap.wrap_combine(self._combine)

    def _dispatch(self, x: Tensor, counts: Tensor) -> tuple[Tensor, list[int], list[int]]:
        sent = counts.tolist()
        received = all_to_all(counts, group=self.group).tolist()
        rows = all_to_all_lazy(x, output_splits=received, input_splits=sent, group=self.group)
        return rows, sent, received

    def _combine(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        rows: Tensor = all_to_all_lazy(
            x, output_splits=sent, input_splits=received, group=self.group
        )
        return rows


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, hidden), nn.Linear(hidden, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Layer(nn.Module):
    """An attention-like residual with dropout, then top-1 experts unless dense."""

    def __init__(self, exchange: Exchange, *, dense: bool, dropout: float) -> None:
        super().__init__()
        self.exchange, self.dense, self.dropout = exchange, dense, dropout
        num_ranks = exchange.group.size()
        self.attention = Block(HIDDEN)
        self.router = nn.Linear(DIM, num_ranks, bias=False)
        self.experts = nn.ModuleList(Block(DIM) for _ in range(num_ranks))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(x), self.dropout)
        if self.dense:
            return x
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = torch.argsort(expert, stable=True)
        counts = torch.bincount(expert, minlength=len(self.experts))
        rows, sent, received = self.exchange.dispatch(x[order], counts)
        out = self.experts[self.exchange.group.rank()](rows)
        back = self.exchange.combine(out, sent, received)
        y: Tensor = x + torch.empty_like(back).index_copy(0, order, back) * weight[:, None]
        return y


def save_exchanges(_: object, operator: object, *args: object, **kwargs: object) -> Any:
    del args, kwargs
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    return CheckpointPolicy.MUST_SAVE if operator == exchange else CheckpointPolicy.MUST_RECOMPUTE


CHECKPOINT: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, save_exchanges),
    },
}


class Chunk(nn.Module):
    def __init__(
        self, exchange: Exchange, num_layers: int, dense: tuple[int, ...], case: Case, seed: int
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.recompute = case.recompute
        self.layers = nn.ModuleList(
            Layer(exchange, dense=i in dense, dropout=case.dropout) for i in range(num_layers)
        )
        for layer in self.layers if case.compiled else ():
            assert isinstance(layer, Layer)
            inner: list[nn.Module] = [layer.attention, *layer.experts]
            regions = [layer] if case.compiled == "layers" else inner
            for region in regions:
                region.compile(backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            again = CHECKPOINT.get(self.recompute)
            x = layer(x) if again is None else checkpoint(layer, x, **again)
        return x


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def shard(chunk: Chunk, units: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*chunk.layers, chunk) if units == "layers" else (chunk,):
        fully_shard(module, mesh=mesh)


@contextmanager
def parameters_stay(chunk: Chunk) -> Iterator[None]:
    """What the documentation says to do where a forward and a backward share FSDP's modules."""
    sharded = [module for module in chunk.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.unshard()
        module.set_reshard_after_forward(False, recurse=False)
        module.set_reshard_after_backward(False, recurse=False)
        set_fsdp_frees_parameters(module, False)
    yield
    for module in sharded:
        set_fsdp_frees_parameters(module, True)
        module.reshard()


def step(case: Case, *, overlapped: bool) -> tuple[list[Tensor], list[TraceEntry], int]:
    """Forward of one microbatch and backward of another.

    Returns:
        The output and all gradients, the trace, and the exchanges of tokens, launched by both.
    """
    overlap = CommComputeOverlap(HookCoordinator(timeout=30), strict=True)
    exchange = Exchange(overlap, world())
    backward = Chunk(exchange, case.backward, case.dense_backward, case, seed=1)
    forward = backward
    if not case.same_module:
        forward = Chunk(exchange, case.forward, case.dense_forward, case, seed=2)
    for chunk in {forward, backward} if case.sharded else ():
        shard(chunk, case.sharded)
    torch.manual_seed(10 + dist.get_rank())
    x0, x1 = (torch.randn(TOKENS, DIM, requires_grad=True) for _ in range(2))
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast)
    with autocast:
        loss = backward(x0).float().square().sum()
    torch.manual_seed(20 + dist.get_rank())
    outs: list[Tensor] = []
    launched: list[str] = []

    def watched() -> AbstractContextManager[object]:
        # A watch switches the compiler off.
        if case.compiled:
            return nullcontext()
        return watch_operators(lambda name, args, kwargs: launched.append(name))  # noqa: ARG005

    def fwd_fn() -> None:
        with autocast, watched():
            outs.append(forward(x1))

    def bwd_fn() -> None:
        with watched():
            loss.backward()

    keep = parameters_stay(forward) if case.sharded and case.same_module else nullcontext()
    with keep:
        if overlapped:
            overlap.run(fwd_fn, bwd_fn)
        else:
            bwd_fn()
            fwd_fn()
    grads = [p.grad for p in (x0, *backward.parameters()) if p.grad is not None]
    grads = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    exchanges = sum("all_to_all" in name for name in launched)
    return [outs[0].detach(), *grads], overlap.trace, exchanges


@dataclass(frozen=True)
class Compared:
    same: bool
    num_tensors: int
    trace: list[TraceEntry]
    exchanges: tuple[int, int]


def both_ways(cases: dict[str, Case]) -> dict[str, Compared]:
    found = {}
    for name, case in cases.items():
        expected, _, before = step(case, overlapped=False)
        actual, trace, after = step(case, overlapped=True)
        same = len(actual) == len(expected) and all(map(torch.equal, actual, expected))
        found[name] = Compared(same, len(actual), trace, (before, after))
    return found


CASES = {
    "equal": Case(),
    "short forward": Case(forward=1, backward=4),
    "short backward": Case(forward=4, backward=1),
    "dense layers": Case(dense_forward=(0,), dense_backward=(1, 2)),
    "all dense": Case(dense_forward=(0, 1, 2), dense_backward=(0, 1, 2)),
    "same module": Case(same_module=True),
    "dropout": Case(dropout=0.3),
    "recompute": Case(recompute="non-reentrant"),
    "recompute, dropout": Case(recompute="non-reentrant", dropout=0.3),
    "recompute, dropout, same module": Case(
        recompute="non-reentrant", dropout=0.3, same_module=True
    ),
    "reentrant, dropout": Case(recompute="reentrant", dropout=0.3, forward=2),
    "selective": Case(recompute="selective"),
    "selective, dropout, dense": Case(recompute="selective", dropout=0.3, dense_forward=(1,)),
    "autocast, recompute": Case(autocast=True, recompute="non-reentrant"),
    "sharded": Case(sharded="layers"),
    "sharded, same module": Case(sharded="layers", same_module=True),
    # Backward ends, and FSDP would free the parameters, while forward has a layer to go.
    "sharded as one, same module": Case(sharded="one", same_module=True, dense_backward=(2,)),
    "sharded, recompute, dropout": Case(sharded="layers", recompute="non-reentrant", dropout=0.3),
    "compiled regions": Case(compiled="regions", dropout=0.3),
    "compiled layers": Case(compiled="layers"),
}
Found = list[dict[str, Compared]]


@pytest.fixture(scope="module")
def found() -> Found:
    """All cases by rank, in one start of the ranks."""
    return run_distributed(both_ways, CASES, world_size=2, timeout=240)


@pytest.mark.parametrize("name", CASES)
def test_bits_and_order_are_those_of_one_after_the_other(name: str, found: Found) -> None:
    first, second = (rank[name] for rank in found)
    assert (first.same, second.same) == (True, True)
    assert first.trace == second.trace
    assert first.num_tensors > 4
    assert first.exchanges[0] == first.exchanges[1]


def documented(forward: int, backward: int) -> list[tuple[Side, str]]:
    """The table of the documentation: who launches what, for layers with experts alone."""
    fwd = ["attention", "dispatch", "experts", "combine"] * forward + ["attention"]
    bwd = ["combine", "experts", "dispatch", "attention"] * backward
    table: list[tuple[Side, str]] = [("backward", section) for section in bwd[:1]]
    del bwd[:1]
    while fwd or bwd:
        table += [("forward", section) for section in fwd[:2]]
        table += [("backward", section) for section in bwd[:2]]
        del fwd[:2], bwd[:2]
    return table[:1] + table[2:]  # no hook announces the first attention


@pytest.mark.parametrize("name", ["equal", "short forward", "short backward", "sharded"])
def test_traces_are_the_documented_table(name: str, found: Found) -> None:
    trace = [(entry.side, entry.section) for entry in found[0][name].trace]
    assert trace == documented(CASES[name].forward, CASES[name].backward)


def test_recomputed_hooks_are_seen_and_keep_the_turn(found: Found) -> None:
    trace = found[0]["recompute"].trace
    recomputed = [i for i, entry in enumerate(trace) if entry.section == "recompute"]
    assert len(recomputed) == 4 * 3
    for i in range(0, len(recomputed), 4):
        run = recomputed[i : i + 4]
        assert run == list(range(run[0], run[0] + 4))
        assert [trace[j].hook for j in run] == ["A", "B", "C", "D"]


def test_selective_checkpointing_recomputes_no_exchange(found: Found) -> None:
    exchanges = {name: found[0][name].exchanges[1] for name in ("equal", "recompute", "selective")}
    # Counts, dispatch and combine of 3 layers; backward has two of them, recomputation all three.
    assert exchanges == {"equal": 9 + 6, "recompute": 9 + 6 + 9, "selective": 9 + 6}


class Busy(torch.autograd.Function):
    """Takes time that is counted, as compute on a device does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, clock: CountedClock) -> Tensor:
        ctx.spend = clock.spend
        ctx.seconds = seconds
        clock.spend(seconds)
        return x * 1.01

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.spend(ctx.seconds)
        return grad * 1.01, None, None


def busy(x: Tensor, seconds: float, clock: CountedClock) -> Tensor:
    y: Tensor = Busy.apply(x, seconds, clock)  # type: ignore[no-untyped-call]
    return y


def timed(seconds: float, num_layers: int) -> tuple[float, float]:
    """Seconds of the sequential and of the overlapped pair on a slow link."""
    clock = CountedClock()
    link = slow_group(world(), latency=seconds, clock=clock)

    def pair(*, overlapped: bool) -> float:
        overlap = CommComputeOverlap(strict=True)
        transfer: Callable[[Tensor], Tensor] = lambda x: all_to_all_lazy(x, group=link)  # noqa: E731
        dispatch, combine = overlap.wrap_dispatch(transfer), overlap.wrap_combine(transfer)

        def chunk(x: Tensor) -> Tensor:
            for _ in range(num_layers):
                rows = dispatch(busy(x, seconds, clock))
                x = x + combine(busy(rows, seconds, clock))
            return x

        x0, x1 = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        loss = chunk(x0).sum()
        dist.barrier()
        start = clock.now
        if overlapped:
            overlap.run(lambda: chunk(x1) * 1.0, loss.backward)
        else:
            loss.backward()
            assert chunk(x1).isfinite().all()
        return clock.now - start

    return pair(overlapped=False), pair(overlapped=True)


def test_transfers_hide_behind_the_other_side_s_compute() -> None:
    for sequential, overlapped in run_distributed(timed, 0.02, 3, world_size=2):
        assert overlapped < 0.85 * sequential


def waits_in_backward() -> None:
    """torch's way: lazy in forward, but the gradient is waited for at once."""
    overlap = CommComputeOverlap(HookCoordinator(timeout=30), strict=True)
    group = world()
    eager = overlap.wrap_dispatch(lambda x: all_to_all(x, group=group))
    loss = eager(torch.randn(4, 4, requires_grad=True)).sum()
    with pytest.raises(ValueError, match=r"gradient of .* must be unwaited"):
        overlap.run(lambda: None, loss.backward)


def test_strict_notices_a_gradient_that_was_waited_for() -> None:
    run_distributed(waits_in_backward, world_size=2)


def one_rank_fails() -> None:
    overlap = CommComputeOverlap(HookCoordinator(timeout=5))
    exchange = Exchange(overlap, world())
    case = Case()
    backward, forward = (Chunk(exchange, 3, (), case, seed=seed) for seed in (1, 2))
    torch.manual_seed(10 + dist.get_rank())
    loss = backward(torch.randn(TOKENS, DIM)).sum()
    x1 = torch.randn(TOKENS, DIM)

    def fwd_fn() -> None:
        y = forward.layers[0](x1)
        if dist.get_rank() == 1:
            raise ValueError("bad expert on rank 1")
        forward.layers[2](forward.layers[1](y))

    overlap.run(fwd_fn, loss.backward)


def test_a_rank_that_fails_in_a_pair_ends_the_run_naming_it() -> None:
    with pytest.raises(RankError, match="bad expert on rank 1") as caught:
        run_distributed(one_rank_fails, world_size=2, timeout=120)
    assert caught.value.rank == 1
    assert "backward side of the overlapped pair ended with" in str(caught.value)
