"""Forward and backward of projections and attention on a slow link, with and without overlap.

Two Gloo ranks share a sequence. `slow_group` makes each exchange take `latency + bytes / bandwidth`
seconds longer, which costs no computing time, as on a machine with a network of its own. Of the six
exchanges of q, k and v the last in forward and the first in backward have nothing to hide behind:
four can be hidden, if the projections are long enough. `hidden` is the share of their delay that
overlap takes away; it can exceed 100 %, since the exchanges themselves take time as well. The two
ways alternate, and the bits of their gradients must be equal.

    python benchmarks/bench_context_overlap.py --width 768 --latency 0.01
    python benchmarks/bench_context_overlap.py --sleep 0.03

Where other programs use the cores, the projections themselves vary by more than the delay. With
`--sleep` each takes that many seconds longer in both directions without computing, as on a device
that is not the CPU, and the figures are steady.

A second table is of attention alone on 4 ranks, where keys come from all of them: in one gather, in
strides of heads, round a ring. Its blocks take `--attention` seconds in each direction without
computing, all together. `link` is the delay of all operations of a pass one after the other,
`hidden` the share of it by which the pass does not become longer than on a link without delay. Of
four strides a quarter of the bytes has nothing to hide behind, of a ring the last way home.

    python benchmarks/bench_context_overlap.py --latency 0.001 --bandwidth 1e7
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_context import AsyncContextParallel, Attention, Causal, ContextParallel, PositionMask
from hp_context.methods.all_gather import MAX_STRIDES
from hp_platform.testing import run_distributed, slow_group

RANKS, KEY_RANKS = 2, 4
HEAD_SIZE = 64


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    seq: int
    width: int
    repeats: int
    bandwidth: float
    latencies: tuple[float, ...]
    sleep: float
    attention: float


@dataclass(frozen=True)
class Row:
    """Median seconds of rank 0."""

    delay: float
    product: float
    plain: float
    overlapped: float
    equal: bool

    @property
    def hidden(self) -> float:
        """Share of the delay of four exchanges."""
        return (self.plain - self.overlapped) / (4 * self.delay)


@dataclass(frozen=True)
class KeyRow:
    """Median seconds of rank 0, and the delay of all operations of a pass."""

    way: str
    operations: int
    link: float
    fast: float
    slow: float
    equal: bool

    @property
    def hidden(self) -> float:
        """Share of the delay that does not show."""
        return 1 - (self.slow - self.fast) / self.link


@dataclass(frozen=True)
class Blocks:
    """A mask function that lets all attention of a pass take `seconds`; sees everything."""

    seconds: float
    pairs: float

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """Return all true, later."""
        time.sleep(self.seconds * query.numel() * key.numel() / self.pairs)
        return query - key == query - key


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Sleep(nn.Module):
    """Takes time in both directions."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, later."""
        sleep: Any = _Sleep
        y: Tensor = sleep.apply(x, self.seconds)
        return y


class Layer(nn.Module):
    """Projections from [1, s, width] and causal attention."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        torch.manual_seed(0)
        width, heads = settings.width, settings.width // HEAD_SIZE
        self.q, self.k, self.v = (
            nn.Sequential(
                nn.Linear(width, width),
                nn.Unflatten(-1, (heads, HEAD_SIZE)),
                *([Sleep(settings.sleep)] if settings.sleep else []),
            )
            for _ in "qkv"
        )
        self.core = Attention(Causal())

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, s, heads, HEAD_SIZE]."""
        out: Tensor = self.core(self.q(x), self.k(x), self.v(x))
        return out


def seconds(layer: Layer, x: Tensor) -> float:
    """Time one forward and backward."""
    layer.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    layer(x).square().mean().backward()
    return time.perf_counter() - start


def product_seconds(layer: Layer, x: Tensor) -> float:
    """Time the forward of one projection, without what is hooked to it."""
    product = layer.q[0]
    product(x)
    start = time.perf_counter()
    product(x)
    return time.perf_counter() - start


def measure(settings: Settings) -> list[Row]:
    """Return a row for each latency."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the default process group must be initialised")
    generator = torch.Generator().manual_seed(1 + world.rank())
    x = torch.randn(1, settings.seq // RANKS, settings.width, generator=generator)
    return [row(settings, latency, world, x) for latency in settings.latencies]


def row(settings: Settings, latency: float, world: ProcessGroup, x: Tensor) -> Row:
    """Compare the two ways on a link of this latency."""
    group = slow_group(world, latency=latency, bandwidth=settings.bandwidth)
    plain, overlapped = Layer(settings), Layer(settings)
    ContextParallel().apply(plain.core, group)
    parallel = AsyncContextParallel(overlap=True)
    parallel.apply(overlapped.core, group, overlapped.q, overlapped.k, overlapped.v)
    times: dict[Layer, list[float]] = {plain: [], overlapped: []}
    for repeat in range(settings.repeats + 1):
        for layer, taken in times.items():
            spent = seconds(layer, x)
            if repeat:  # in the first pass ranks compare shapes
                taken.append(spent)
    pairs = zip(plain.parameters(), overlapped.parameters(), strict=True)
    equal = all(torch.equal(_grad(a), _grad(b)) for a, b in pairs)
    delay = latency + x.numel() * x.element_size() / settings.bandwidth
    plain_time, overlapped_time = (statistics.median(taken) for taken in times.values())
    return Row(
        delay, product_seconds(plain, x) + settings.sleep, plain_time, overlapped_time, equal
    )


def measure_keys(settings: Settings, latency: float) -> list[KeyRow]:
    """Return a row for each way of keys to the queries."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the default process group must be initialised")
    generator = torch.Generator().manual_seed(1 + world.rank())
    local = settings.seq // world.size()
    shape = (1, local, MAX_STRIDES, HEAD_SIZE)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for _ in "qkv"]
    # Operations of a pass and bytes in units of what a rank passes in to gather keys once.
    others = world.size() - 1
    home = world.size()  # what an all-to-all is given has the rank's own part in it
    ways: dict[str, tuple[ContextParallel, int, int, int]] = {
        "one gather": (ContextParallel(1), 1, 3, 2 + home),
        "strides": (
            AsyncContextParallel(1, overlap=True),
            MAX_STRIDES,
            3 * MAX_STRIDES,
            2 + home,
        ),
        "ring": (ContextParallel(ring=True), 1, 3 * others, 3 * others),
    }
    links = [slow_group(world), slow_group(world, latency=latency, bandwidth=settings.bandwidth)]
    cores: dict[tuple[str, int], Attention] = {}
    for name, (parallel, strides, *_) in ways.items():
        for i, link in enumerate(links):
            pairs = float(local * settings.seq * strides)
            core = Attention(PositionMask(Blocks(settings.attention, pairs)))
            cores[name, i] = parallel.apply(core, link)
    times: dict[tuple[str, int], list[float]] = {key: [] for key in cores}
    results: dict[tuple[str, int], list[Tensor]] = {}
    for repeat in range(settings.repeats + 1):
        for key, core in cores.items():
            dist.barrier()
            start = time.perf_counter()
            out = core(*leaves)
            results[key] = [out, *torch.autograd.grad(out.square().sum(), leaves)]
            if repeat:
                times[key].append(time.perf_counter() - start)
    part = 2 * leaves[0].nbytes
    return [
        KeyRow(
            name,
            operations,
            operations * latency + units * part / settings.bandwidth,
            statistics.median(times[name, 0]),
            statistics.median(times[name, 1]),
            equal=_same(results[name, 1], results["one gather", 0]),
        )
        for name, (_, _, operations, units) in ways.items()
    ]


def _same(actual: list[Tensor], expected: list[Tensor]) -> bool:
    """A ring sums in another order, hence not the same bits."""
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(actual, expected, strict=True))


def _grad(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("backward must have reached every parameter")
    return parameter.grad


def main() -> None:
    """Print one row for each latency, as rank 0 measured it."""
    parser = argparse.ArgumentParser(description="overlap of projections and their exchanges")
    parser.add_argument("--seq", type=int, default=1024, help="whole sequence")
    parser.add_argument(
        "--width", type=int, default=1024, help=f"a multiple of {RANKS * HEAD_SIZE}"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--bandwidth", type=float, default=1e9, help="bytes per second")
    parser.add_argument("--latency", type=float, nargs="+", default=[0.0, 0.005, 0.01, 0.02])
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds added to a projection")
    parser.add_argument("--attention", type=float, default=0.2, help="seconds, in a direction")
    given = parser.parse_args()
    settings = Settings(
        given.seq,
        given.width,
        given.repeats,
        given.bandwidth,
        tuple(given.latency),
        given.sleep,
        given.attention,
    )
    rows = run_distributed(measure, settings, world_size=RANKS, timeout=600)[0]
    print("  delay  projection  synchronous  overlapped  ratio  hidden  bits")
    for r in rows:
        print(
            f"{1e3 * r.delay:4.1f} ms  {1e3 * r.product:7.1f} ms {1e3 * r.plain:9.1f} ms"
            f" {1e3 * r.overlapped:8.1f} ms {r.plain / r.overlapped:6.2f} {r.hidden:7.0%}"
            f"  {'equal' if r.equal else 'DIFFER'}"
        )
    print("\n  delay  way         operations     link  no delay     delay  hidden  results")
    for latency in filter(None, settings.latencies):
        keys = run_distributed(measure_keys, settings, latency, world_size=KEY_RANKS, timeout=600)
        for k in keys[0]:
            print(
                f"{1e3 * latency:4.1f} ms  {k.way:10} {k.operations:10}  {1e3 * k.link:4.0f} ms"
                f"  {1e3 * k.fast:5.0f} ms  {1e3 * k.slow:5.0f} ms {k.hidden:6.0%}"
                f"  {'equal' if k.equal else 'DIFFER'}"
            )


if __name__ == "__main__":
    main()
