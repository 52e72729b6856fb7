"""Overlapped chunks of a mixture of experts on two ranks: the same bits as one after the other."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_overlap import CommComputeOverlap, HookCoordinator, TraceEntry
from hp_platform import all_to_all, all_to_all_lazy
from hp_platform.testing import RankError, run_distributed, slow_group

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


class Layer(nn.Module):
    """An attention-like residual with dropout, then top-1 experts unless dense."""

    def __init__(self, exchange: Exchange, *, dense: bool, dropout: float) -> None:
        super().__init__()
        self.exchange, self.dense, self.dropout = exchange, dense, dropout
        num_ranks = exchange.group.size()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.router = nn.Linear(DIM, num_ranks, bias=False)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num_ranks))

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout)
        if self.dense:
            return x
        weight, expert = self.router(x).softmax(-1).max(-1)
        order = torch.argsort(expert, stable=True)
        counts = torch.bincount(expert, minlength=len(self.experts))
        rows, sent, received = self.exchange.dispatch(x[order], counts)
        out = F.gelu(self.experts[self.exchange.group.rank()](rows))
        back: Tensor = self.exchange.combine(out, sent, received)
        y: Tensor = x + torch.empty_like(x).index_copy(0, order, back) * weight[:, None]
        return y


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

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.recompute:
                x = checkpoint(layer, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = layer(x)
        return x


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def step(case: Case, *, overlapped: bool) -> tuple[list[Tensor], list[TraceEntry]]:
    """Forward of one microbatch and backward of another; the output and all gradients."""
    overlap = CommComputeOverlap(HookCoordinator(timeout=30), strict=True)
    exchange = Exchange(overlap, world())
    backward = Chunk(exchange, case.backward, case.dense_backward, case, seed=1)
    forward = backward
    if not case.same_module:
        forward = Chunk(exchange, case.forward, case.dense_forward, case, seed=2)
    torch.manual_seed(10 + dist.get_rank())
    x0, x1 = (torch.randn(TOKENS, DIM, requires_grad=True) for _ in range(2))
    loss = backward(x0).square().sum()
    torch.manual_seed(20 + dist.get_rank())
    outs: list[Tensor] = []

    def fwd_fn() -> None:
        outs.append(forward(x1))

    if overlapped:
        overlap.run(fwd_fn, loss.backward)
    else:
        loss.backward()
        fwd_fn()
    grads = [p.grad for p in (x0, *backward.parameters()) if p.grad is not None]
    return [outs[0].detach(), *grads], overlap.trace


def both_ways(case: Case) -> tuple[bool, int, list[TraceEntry]]:
    expected, _ = step(case, overlapped=False)
    actual, trace = step(case, overlapped=True)
    same = len(actual) == len(expected) and all(map(torch.equal, actual, expected))
    return same, len(actual), trace


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
    "reentrant, dropout": Case(recompute="reentrant", dropout=0.3, forward=2),
}


@pytest.mark.parametrize("name", list(CASES))
def test_bits_and_order_are_those_of_one_after_the_other(name: str) -> None:
    results = run_distributed(both_ways, CASES[name], world_size=2)
    traces = [trace for _, _, trace in results]
    assert [same for same, _, _ in results] == [True, True]
    assert traces[0] == traces[1]
    assert all(count > 4 for _, count, _ in results)


def test_recomputed_hooks_are_seen_and_keep_the_turn() -> None:
    (_, _, trace), _ = run_distributed(both_ways, CASES["recompute"], world_size=2)
    recomputed = [i for i, entry in enumerate(trace) if entry.section == "recompute"]
    assert len(recomputed) == 4 * 3
    for i in range(0, len(recomputed), 4):
        run = recomputed[i : i + 4]
        assert run == list(range(run[0], run[0] + 4))
        assert [trace[j].hook for j in run] == ["A", "B", "C", "D"]


def test_trace_alternates_as_documented() -> None:
    (_, _, trace), _ = run_distributed(both_ways, CASES["equal"], world_size=2)
    launched = [
        f"{e.party[0].upper()}.{e.section}" for e in trace if e.section in ("dispatch", "combine")
    ]
    # The last layer's combine is launched by the hook D of backward, before any forward section.
    assert launched == ["B.combine", "F.dispatch", "B.dispatch", "F.combine"] * 3


class Busy(torch.autograd.Function):
    """Takes time as compute on a device does: the host's other threads go on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        y = x * 1.01
        time.sleep(seconds)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        result = grad * 1.01
        time.sleep(ctx.seconds)
        return result, None


def busy(x: Tensor, seconds: float) -> Tensor:
    y: Tensor = Busy.apply(x, seconds)  # type: ignore[no-untyped-call]
    return y


def timed(seconds: float, num_layers: int) -> tuple[float, float]:
    """Seconds of the sequential and of the overlapped pair on a slow link."""
    link = slow_group(world(), latency=seconds)

    def pair(*, overlapped: bool) -> float:
        overlap = CommComputeOverlap(strict=True)
        transfer: Callable[[Tensor], Tensor] = lambda x: all_to_all_lazy(x, group=link)  # noqa: E731
        dispatch, combine = overlap.wrap_dispatch(transfer), overlap.wrap_combine(transfer)

        def chunk(x: Tensor) -> Tensor:
            for _ in range(num_layers):
                rows = dispatch(busy(x, seconds))
                x = x + combine(busy(rows, seconds))
            return x

        x0, x1 = (torch.randn(4, 4, requires_grad=True) for _ in range(2))
        loss = chunk(x0).sum()
        dist.barrier()
        start = time.perf_counter()
        if overlapped:
            overlap.run(lambda: chunk(x1) * 1.0, loss.backward)
        else:
            loss.backward()
            assert chunk(x1).isfinite().all()
        return time.perf_counter() - start

    return pair(overlapped=False), min(pair(overlapped=True) for _ in range(2))


def test_transfers_hide_behind_the_other_party_s_compute() -> None:
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
    start = time.monotonic()
    with pytest.raises(RankError, match="bad expert on rank 1") as caught:
        run_distributed(one_rank_fails, world_size=2, timeout=20)
    assert caught.value.rank == 1
    assert "backward party of the overlapped pair ended with" in str(caught.value)
    assert time.monotonic() - start < 20
