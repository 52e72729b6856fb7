"""Every mode under every mask, with grouped heads, both layouts and recomputation, on 2 to 8 ranks.

A block of projections and attention in float64, its weight gradients included, equals one process.
"""

from dataclasses import dataclass
from functools import cache
from itertools import cycle, product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hp_context import (
    AsyncContextParallel,
    Attention,
    Causal,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Mask,
    PositionMask,
    SequenceLayout,
    SlidingWindow,
    shard_sequence,
    unshard_sequence,
)
from hp_platform.testing import run_distributed

SEQ, WIDTH, SIZE, BATCH = 48, 12, 4, 2


def strided(query: Tensor, key: Tensor) -> Tensor:
    return (query - key) % 3 == 0


MASKS = (
    Full(),
    Causal(),
    SlidingWindow(7),
    Causal() & Documents((1, 15, 7, 25)),
    Causal() & PositionMask(strided),
)
LAYOUTS = (Contiguous(), HeadTail())
RATIOS = ((24, 24), (24, 6), (24, 1))
RECOMPUTE = ("", "core", "core reentrant", "block", "block reentrant")


@dataclass(frozen=True)
class Mode:
    """With two layouts each: what ranks have agreed on once, they do not compare again."""

    degree: int
    ring: bool = False
    overlap: bool = False

    @cache  # noqa: B019  # few, and the ranks end with the test
    def parallel(self, layout: SequenceLayout) -> AsyncContextParallel:
        return AsyncContextParallel(
            self.degree, ring=self.ring, layout=layout, overlap=self.overlap
        )


@dataclass(frozen=True)
class Case:
    mode: Mode
    mask: Mask
    heads: tuple[int, int]
    layout: SequenceLayout
    recompute: str


def cases(num_ranks: int) -> list[Case]:
    """Each mode, mask and ratio of heads; layouts and kinds of recomputation take turns."""
    degrees = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    modes = [
        *(Mode(d) for d in degrees),
        *(Mode(d, ring=True) for d in degrees if d < num_ranks),
        *(Mode(d, overlap=True) for d in degrees),
    ]
    # Their numbers have no common divisor: each kind meets each layout.
    turns = zip(cycle(LAYOUTS), cycle(RECOMPUTE), strict=False)
    grid = product(modes, MASKS, RATIOS)
    return [Case(*case, *turn) for case, turn in zip(grid, turns, strict=False)]


class Block(nn.Module):
    """Projections and attention; the same weights each time."""

    def __init__(self, mask: Mask, heads: tuple[int, int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (
            nn.Sequential(
                nn.Linear(WIDTH, count * SIZE, bias=False, dtype=torch.float64),
                nn.Unflatten(-1, (count, SIZE)),
            )
            for count in (heads[0], heads[1], heads[1])
        )
        self.core = Attention(mask)

    def forward(self, x: Tensor, recompute: str = "") -> Tensor:
        kind, _, reentrant = recompute.partition(" ")
        if kind == "block":
            out: Tensor = checkpoint(self._attend, x, use_reentrant=bool(reentrant))
            return out
        q, k, v = self.q(x), self.k(x), self.v(x)
        if kind == "core":
            out = checkpoint(self.core, q, k, v, use_reentrant=bool(reentrant))
        else:
            out = self.core(q, k, v)
        return out

    def _attend(self, x: Tensor) -> Tensor:
        out: Tensor = self.core(self.q(x), self.k(x), self.v(x))
        return out


def tensors(heads: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, grad = (
        torch.randn(BATCH, SEQ, *shape, dtype=torch.float64, generator=generator)
        for shape in ((WIDTH,), (heads, SIZE))
    )
    return x, grad


@cache
def alone(mask: Mask, heads: tuple[int, int]) -> list[Tensor]:
    """Output, gradient of the input, gradients of the weights."""
    block = Block(mask, heads)
    x, grad = tensors(heads[0])
    x.requires_grad_()
    out = block(x)
    parameters = list(block.parameters())
    return [out.detach(), *torch.autograd.grad(out, [x, *parameters], grad)]


def split(case: Case, group: dist.ProcessGroup) -> list[Tensor]:
    block = Block(case.mask, case.heads)
    parallel = case.mode.parallel(case.layout)
    parallel.apply(block.core, group, block.q, block.k, block.v)
    x, grad = (shard_sequence(t, group, layout=case.layout) for t in tensors(case.heads[0]))
    x.requires_grad_()
    out = block(x, case.recompute)
    out.backward(grad)
    weights = [p.grad for p in block.parameters() if p.grad is not None]
    for weight in weights:
        dist.all_reduce(weight, group=group)
    assert x.grad is not None
    parts = (out.detach(), x.grad)
    return [*(unshard_sequence(t, group, layout=case.layout) for t in parts), *weights]


def errors(num_ranks: int) -> list[float]:
    group = dist.group.WORLD
    assert group is not None
    torch.set_num_threads(1)
    found = []
    for case in cases(num_ranks):
        pairs = zip(split(case, group), alone(case.mask, case.heads), strict=True)
        found.append(max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs))
    return found


@pytest.mark.sample("3")
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_the_grid_equals_one_process(num_ranks: int) -> None:
    for found in run_distributed(errors, num_ranks, world_size=num_ranks, timeout=300):
        wrong = [
            (case, error)
            for case, error in zip(cases(num_ranks), found, strict=True)
            if not error <= 1e-12
        ]
        assert not wrong
