"""torch.compile of a block around the layer: where graphs are cut, recompilations, numbers."""

import os
import shutil
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from hp_expert import ExpertParallel, GroupedExperts, MoE, TopKRouter
from hp_platform.testing import compare, run_distributed

pytestmark = [
    # Of torch itself, where it cuts a graph and where it imports inductor.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]
DIM, HEADS, EXPERTS, TOP_K = 16, 2, 8, 2
# Every graph is compiled twice: for the first size, and once the second one shows that it varies.
WARM_UP = (7, 12)
TOKEN_COUNTS = range(13, 63, 5)
Backend = str | Callable[..., Any]


class Block(nn.Module):
    """Attention and a mixture-of-experts layer, each after a norm and beside a residual."""

    def __init__(self, *, shared: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        router, experts = TopKRouter(DIM, EXPERTS, TOP_K), GroupedExperts(EXPERTS, DIM, 32)
        self.moe = MoE(router, experts, nn.Linear(DIM, DIM) if shared else None)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        q, k, v = (t.transpose(-2, -3) for t in heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(-2, -3).flatten(-2))
        y, _ = self.moe(self.norm2(x))
        return x + torch.as_tensor(y)


class Residual(nn.Module):
    """The least there is around a layer: every kernel that inductor has to build takes seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(TopKRouter(DIM, 4, TOP_K), GroupedExperts(4, DIM, 32))

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.moe(x)
        return x + torch.as_tensor(y)


class Tokens(nn.Module):
    """A user's module with rows in expert order: experts without a router, between other work."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.RMSNorm(DIM), GroupedExperts(4, DIM, 32)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        y: Tensor = self.experts(self.norm(x), counts)
        return x + y


def step(model: Callable[..., Tensor], block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Forward and backward: output and all gradients by name."""
    block.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, DIM)).sum().backward()
    grads = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return {"y": y.detach(), "x": x.grad} | grads


def tokens(count: int, *, rank: int = 0) -> Tensor:
    torch.manual_seed(100 * rank + count)
    return torch.randn(1, count, DIM)


class Outcome(NamedTuple):
    """The differences of a compiled model from the eager one, over all token counts."""

    worst: float
    loads_equal: bool


def run_all(block: Block, backend: Backend, *, rank: int = 0) -> Outcome:
    """Compile, warm up, and run every token count; any recompilation is an error by then."""
    torch.compiler.reset()
    compiled = torch.compile(block, backend=backend)
    for count in WARM_UP:
        step(compiled, block, tokens(count, rank=rank))
    worst, loads = 0.0, []
    with torch.compiler.set_stance("fail_on_recompile"):
        for count in TOKEN_COUNTS:
            x = tokens(count, rank=rank)
            block.moe.router.load.zero_()
            actual = step(compiled, block, x)
            loads.append(block.moe.router.load.clone())
            worst = max(
                worst, *(d.error for d in compare(actual, step(block, block, x)).differences)
            )
    total = TOP_K * TOKEN_COUNTS[-1]
    return Outcome(worst, bool(loads[-1].sum() == total))


def make(*, shared: bool = False) -> Block:
    torch.manual_seed(0)
    return Block(shared=shared)


@pytest.mark.sample("False-3")
@pytest.mark.parametrize(("shared", "graphs"), [(False, 3), (True, 4)])
def test_graphs_are_what_precedes_the_layer_its_router_and_what_follows(
    *, shared: bool, graphs: int
) -> None:
    """And the shared expert. The layer ends a graph in the frame of its caller as in its own."""
    counting = CompileCounter()
    outcome = run_all(make(shared=shared), counting)
    assert counting.frame_count == graphs * len(WARM_UP)
    assert outcome == Outcome(0.0, loads_equal=True)


@pytest.mark.sample("True-3")
@pytest.mark.parametrize(("shared", "graphs"), [(False, 2), (True, 3)])
def test_with_nested_graph_breaks_each_region_costs_one_cut(*, shared: bool, graphs: int) -> None:
    counting = CompileCounter()
    with torch._dynamo.config.patch(nested_graph_breaks=True):
        outcome = run_all(make(shared=shared), counting)
    assert counting.frame_count == graphs * len(WARM_UP)
    assert outcome == Outcome(0.0, loads_equal=True)


def test_a_compiled_block_computes_what_it_computes_uncompiled() -> None:
    outcome = run_all(make(), "aot_eager")
    assert outcome.worst <= 1e-6
    assert outcome.loads_equal


@pytest.mark.skipif(os.environ.get("HP_INDUCTOR") != "1", reason="half a minute: nox -s kernels")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_computes_the_same_to_rounding() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    block = Residual()
    compiled = torch.compile(block, backend="inductor", dynamic=True)
    for count in WARM_UP:
        x = tokens(count)
        comparison = compare(step(compiled, block, x), step(block, block, x), bound=1e-5)
        assert comparison.ok, comparison


def test_a_router_compiles_as_one_graph() -> None:
    torch.compiler.reset()
    router = make().moe.router
    compiled = torch.compile(router, backend="aot_eager", fullgraph=True)
    for count in (7, 12, 31):
        actual, expected = compiled(tokens(count)), router(tokens(count))
        assert torch.equal(actual.experts, expected.experts)
        assert torch.equal(actual.weights, expected.weights)


def test_experts_alone_cut_the_graph_once() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, counting = Tokens(), CompileCounter()
    compiled = torch.compile(model, backend=counting)
    for num_rows in (9, 17, 33):
        x = torch.randn(num_rows, DIM)
        counts = torch.tensor([num_rows - 5, 0, 2, 3])
        assert torch.equal(compiled(x, counts), model(x, counts))
    assert counting.frame_count == 2 * len(WARM_UP)


def compiled_rank() -> tuple[int, Outcome]:
    torch.manual_seed(0)
    block = Block()
    group = dist.group.WORLD
    assert group is not None
    ExpertParallel().apply(block, group)
    counting = CompileCounter()
    return_value = run_all(block, counting, rank=dist.get_rank())
    return counting.frame_count, return_value


def test_ranks_cut_the_graph_once_as_well() -> None:
    for graphs, outcome in run_distributed(compiled_rank, world_size=2, timeout=60):
        assert graphs == 3 * len(WARM_UP)
        assert outcome == Outcome(0.0, loads_equal=True)
