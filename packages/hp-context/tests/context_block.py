"""A block with projections and attention, and what runs it with and without overlap."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

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
