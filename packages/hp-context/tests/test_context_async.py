"""Overlapped exchanges give the bits of synchronous ones, whatever happens in between."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
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
)
from hp_platform.testing import run_in_threads

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, LOCAL, HEADS, SIZE = 2, 6, 4, 8
WIDTH = HEADS * SIZE
BSHD, BNSD = (1, 2), (2, 1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums have one order on both sides."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
