"""`torch.compile` of the block around attention: where graphs are cut, recompilations, numbers."""

import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from hp_context import (
    AsyncContextParallel,
    Attention,
    Causal,
    ContextParallel,
    Documents,
    HeadTail,
    Mask,
    SlidingWindow,
)
from hp_platform.testing import run_distributed

HEADS, KV_HEADS, SIZE = 4, 2, 8
WIDTH = HEADS * SIZE
OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
# Every graph is compiled twice: for the first length, and once the second one shows that it varies.
WARM_UP = (6, 8)
LENGTHS = (10, 14, 30)
Backend = str | Callable[..., Any]

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Of torch itself, where it cuts a graph and where it imports inductor.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
]


class Block(nn.Module):
    """A norm, projections, rotation by position, attention, a residual."""

    def __init__(self, mask: Mask, *, sinks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v, self.out = (
            nn.Linear(WIDTH, heads * SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )
        self.core = Attention(mask, sinks=torch.linspace(-1, 1, HEADS) if sinks else None)
        self.launch: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (p(h).unflatten(-1, (-1, SIZE)) for p in (self.q, self.k, self.v))
        q, k = q * torch.cos(q), k * torch.cos(k)
        if self.launch is not None:
            q, k, v = self.launch(q), self.launch(k), self.launch(v)
        y: Tensor = self.out(self.core(q, k, v).flatten(-2))
        return x + y.tanh()


def step(model: Callable[..., Tensor], block: nn.Module, length: int) -> list[Tensor]:
    """Forward and backward: output and all gradients."""
    block.zero_grad()
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(100 * rank + length)
    x = torch.randn(1, length, WIDTH, generator=generator).requires_grad_()
    out = model(x)
    out.square().sum().backward()
    assert x.grad is not None
    return [out.detach(), x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]


class Outcome(NamedTuple):
    graphs: int
    worst: float


def run_all(block: Block, backend: Backend) -> float:
    """Compile, warm up, and run every length; any recompilation is an error by then.

    Returns the largest error of an output or gradient.
    """
    torch.compiler.reset()
    compiled = torch.compile(block, backend=backend)
    worst = 0.0
    for length in WARM_UP:
        step(block, block, length)  # ranks compare shapes, so that the next one may be launched
        step(compiled, block, length)
    for length in LENGTHS:
        expected = step(block, block, length)
        with torch.compiler.set_stance("fail_on_recompile"):
            actual = step(compiled, block, length)
        for a, b in zip(actual, expected, strict=True):
            worst = max(worst, float((a - b).abs().max() / b.abs().max()))
    return worst


class Way(NamedTuple):
    """A mode, whether exchanges overlap, sinks, and the graphs of a block.

    They are what precedes attention, attention itself where torch computes it, and what follows.
    """

    degree: int | None
    overlap: bool
    sinks: bool
    graphs: int


def compiled_ranks(way: Way) -> tuple[int, float, int]:
    """Graphs, error, overlapped exchanges."""
    group = dist.group.WORLD
    assert group is not None
    block, overlapped = Block(Causal(), sinks=way.sinks), 0
    counting = CompileCounterWithBackend("aot_eager")
    if way.overlap:
        parallel = AsyncContextParallel(way.degree, overlap=True, layout=HeadTail())
        parallel.apply(block.core, group)
        block.launch = partial(parallel.launch, mesh_or_group=group)
        error = run_all(block, counting)
        overlapped = parallel.counts.overlapped
    else:
        ContextParallel(way.degree, layout=HeadTail()).apply(block.core, group)
        error = run_all(block, counting)
    return counting.frame_count, error, overlapped


@pytest.mark.sample("heads, launched")
@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        pytest.param(Way(None, False, False, 3), 2, id="heads"),
        pytest.param(Way(None, True, True, 2), 2, id="heads, launched"),
        pytest.param(Way(1, False, False, 2), 2, id="keys"),
        pytest.param(Way(2, True, False, 2), 4, id="hybrid, launched"),
    ],
)
def test_graphs_are_cut_around_attention_only(way: Way, ranks: int) -> None:
    """Between launches there is nothing to compute, hence no graph."""
    for found in run_distributed(compiled_ranks, way, world_size=ranks, timeout=300):
        graphs, error, overlapped = found
        assert graphs == way.graphs * len(WARM_UP)
        assert error <= 1e-5
        assert (overlapped > 0) is way.overlap


@pytest.mark.parametrize(
    ("mask", "sinks", "graphs"), [(Causal(), False, 1), (SlidingWindow(3), True, 2)], ids=str
)
def test_attention_alone_cuts_a_graph_only_where_torch_s_does_not_do(
    mask: Mask, graphs: int, *, sinks: bool
) -> None:
    counting = CompileCounterWithBackend("aot_eager")
    assert run_all(Block(mask, sinks=sinks), counting) <= 1e-5
    assert counting.frame_count == graphs * len(WARM_UP)


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.11 compiles once per number of documents")
def test_documents_of_each_call_recompile_nothing() -> None:
    torch.compiler.reset()
    block, counting = Block(Causal()), CompileCounterWithBackend("aot_eager")

    def attend(q: Tensor, mask: Mask) -> Tensor:
        out: Tensor = block.core(q.sin(), q, q, mask)
        return out.cos()

    compiled = torch.compile(attend, backend=counting)
    q = torch.randn(1, 12, HEADS, SIZE)
    first: list[tuple[int, ...]] = [(5, 7), (12,)]
    later: list[tuple[int, ...]] = [(4, 4, 4), (1, 11), (2,) * 6]
    for lengths in first:
        compiled(q, Causal() & Documents(lengths))
    with torch.compiler.set_stance("fail_on_recompile"):
        for lengths in later:
            mask = Causal() & Documents(lengths)
            assert torch.equal(compiled(q, mask), attend(q, mask))
    assert counting.frame_count == 2


@pytest.mark.skipif(os.environ.get("HP_INDUCTOR") != "1", reason="half a minute: nox -s kernels")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_computes_the_same_to_rounding() -> None:
    assert run_all(Block(Causal(), sinks=True), "inductor") <= 1e-5
