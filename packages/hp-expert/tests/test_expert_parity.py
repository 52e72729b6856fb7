"""Experts over every grid of ranks give what one process gives, whatever the routing.

All cases of a grid run in one set of ranks: E x k x routing x dtype, each checked on every rank
against the layer written down plainly, over the tokens of all ranks.

Shape symbols: T tokens, E experts, K experts per token, D width, H hidden width.
"""

import os
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert import (
    BaseExpertParallel,
    ExpertParallel,
    ExpertTensorParallel,
    GroupedExperts,
    MoE,
    TensorParallel,
    TopKRouter,
)
from hp_platform import new_group
from hp_platform.testing import compare, run_distributed

DIM, HIDDEN, TOKENS = 4, 4, 5
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5}
CUT = {"w1": 1, "w3": 1, "w2": 2, "b1": 1, "b3": 1, "b2": None}

Tensors = dict[str, Tensor]


class Case(NamedTuple):
    """One configuration of the layer and its input."""

    num_experts: int
    top_k: int
    routing: str
    dtype: torch.dtype
    deduplicate: bool = False
    bias: bool = False


class Grid(NamedTuple):
    """The ranks, expert-parallel ones outside."""

    ep: ProcessGroup
    tp: ProcessGroup

    @classmethod
    def of(cls, ep: int, tp: int) -> "Grid":
        """Make the groups of this rank."""
        columns = [[e * tp + t for e in range(ep)] for t in range(tp)]
        rows = [[e * tp + t for t in range(tp)] for e in range(ep)]
        ep_group, tp_group = new_group(columns, name="ep"), new_group(rows, name="tp")
        assert ep_group is not None
        assert tp_group is not None
        return cls(ep_group, tp_group)

    def spread(self, moe: MoE, *, deduplicate: bool) -> MoE:
        """Apply the style that fits."""
        style: BaseExpertParallel
        if self.tp.size() == 1:
            style = ExpertParallel(deduplicate=deduplicate)
            style.apply(moe, self.ep)
        elif self.ep.size() == 1:
            TensorParallel().apply(moe, self.tp)
        else:
            style = ExpertTensorParallel(deduplicate=deduplicate)
            style.apply(moe, (self.ep, self.tp))
        return moe


def cases(ep: int, sizes: tuple[int, ...]) -> Iterator[Case]:
    """All that a grid has to pass with these numbers of experts."""
    for num_experts, top_k in product(sizes, (1, 2, 8)):
        if num_experts % ep or top_k > num_experts:
            continue
        bias = top_k == 2
        for routing in ("random", "one", "idle", "empty"):
            yield Case(num_experts, top_k, routing, torch.float64, bias=bias)
        if top_k > 1:
            yield Case(num_experts, top_k, "random", torch.float64, True, bias)
        yield Case(num_experts, top_k, "random", torch.float32, top_k == 8, bias)


def build(case: Case, *, num_ranks: int) -> MoE:
    """The same layer on every rank."""
    router = TopKRouter(DIM, case.num_experts, case.top_k, normalize=False)
    moe = MoE(router, GroupedExperts(case.num_experts, DIM, HIDDEN, bias=case.bias))
    generator = torch.Generator().manual_seed(case.num_experts + case.top_k)
    with torch.no_grad():
        for parameter in moe.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(drawn / 2)
        # What `tokens` have in their first column attracts to the first experts, or repels from
        # those of the last rank.
        if case.routing == "one":
            router.weight[: case.top_k, 0] += 8
        if case.routing == "idle":
            router.weight[-(case.num_experts // num_ranks) :, 0] -= 8
    return moe.to(case.dtype)


def tokens(case: Case, rank: int) -> Tensor:
    """Every ep rank has other tokens, and another number of them: [T, D]."""
    generator = torch.Generator().manual_seed(rank)
    count = 0 if case.routing == "empty" and rank == 0 else TOKENS + rank
    x = torch.randn(count, DIM, generator=generator, dtype=torch.float64)
    x[:, 0] = 1 + x[:, 0] / 10
    return x.to(case.dtype)


def oracle(moe: MoE, x: Tensor) -> Tensor:
    """Every expert on every token, times the routing weight, which is mostly zero."""
    scores = (x @ moe.router.weight.T).softmax(-1)
    kept = scores.topk(moe.router.top_k)
    weights = torch.zeros_like(scores).scatter(1, kept.indices, kept.values)
    e = moe.experts
    gate = torch.einsum("td,ehd->teh", x, e.w1)
    up = torch.einsum("td,ehd->teh", x, e.w3)
    if e.b1 is not None and e.b3 is not None:
        gate, up = gate + e.b1, up + e.b3
    out = torch.einsum("teh,edh->ted", F.silu(gate) * up, e.w2)
    if e.b2 is not None:
        out = out + e.b2
    return torch.einsum("te,ted->td", weights, out)


def loss_of(y: Tensor, x: Tensor) -> Tensor:
    return (y * torch.cos(3 * x.detach())).sum()


def expected(case: Case, grid: Grid) -> Tensors:
    """Return one process's results for the tokens of all ranks, cut to this rank's part."""
    moe, ep, tp = build(case, num_ranks=grid.ep.size()), grid.ep, grid.tp
    everyone = [tokens(case, rank) for rank in range(ep.size())]
    x = torch.cat(everyone).requires_grad_()
    y = oracle(moe, x)
    loss_of(y, x).backward()
    assert x.grad is not None
    sizes = [len(part) for part in everyone]
    found = {"y": y.detach().split(sizes)[ep.rank()], "dx": x.grad.split(sizes)[ep.rank()]}
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None
        found[name], (owner, _, leaf) = parameter.grad, name.rpartition(".")
        if owner == "experts":
            mine = parameter.grad.chunk(ep.size())[ep.rank()]
            dim = CUT[leaf]
            found[name] = mine if dim is None else mine.chunk(tp.size(), dim)[tp.rank()]
    return found


def actual(case: Case, grid: Grid) -> Tensors:
    moe = grid.spread(build(case, num_ranks=grid.ep.size()), deduplicate=case.deduplicate)
    x = tokens(case, grid.ep.rank()).requires_grad_()
    y, _ = moe(x)
    loss_of(y, x).backward()
    assert x.grad is not None
    found = {"y": y.detach(), "dx": x.grad}
    found |= {n: p.grad for n, p in moe.named_parameters() if p.grad is not None}
    # Every tp rank has the whole of its tokens' gradient: it is not summed over them.
    dist.all_reduce(found["router.weight"], group=grid.ep)
    return found


def all_cases(ep: int, tp: int, sizes: tuple[int, ...]) -> list[str]:
    grid, wrong = Grid.of(ep, tp), []
    for case in cases(ep, sizes):
        found = actual(case, grid)
        comparison = compare(found, expected(case, grid), bound=BOUNDS[case.dtype])
        if not comparison.ok:
            wrong.append(f"{case}\n{comparison}")
        if case.dtype == torch.float32:
            again = actual(case, grid)
            wrong += [f"{case}: rerun" for n in found if not torch.equal(found[n], again[n])]
    return wrong


Sizes = tuple[int, ...]
GRIDS: list[tuple[int, int, Sizes]] = [
    (ep, tp, (4, 16, 64)) for ep, tp in product((1, 2, 4, 8), (1, 2)) if ep * tp < 16
]
GRIDS += [(8, 2, (16,)), (8, 2, (64,))]


@pytest.mark.sample("1-2-sizes1", "2-1-sizes2", "2-2-sizes3")
@pytest.mark.parametrize(("ep", "tp", "sizes"), GRIDS)
def test_every_layout_gives_what_one_process_gives(ep: int, tp: int, sizes: Sizes) -> None:
    """The largest number of experts, which takes as long as the others, with HP_WHOLE alone."""
    sizes = sizes if os.environ.get("HP_WHOLE") else sizes[:2]
    for rank, wrong in enumerate(run_distributed(all_cases, ep, tp, sizes, world_size=ep * tp)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)
