"""Forward and backward of attention over a split sequence, by mode, beside what others have.

    python benchmarks/bench_context_modes.py                                   # 4 Gloo ranks
    python benchmarks/bench_context_modes.py --seq 1024 4096 --mask causal full documents
    torchrun --nproc-per-node 4 benchmarks/bench_context_modes.py --dtype bfloat16 --heads 32 8

The second form runs on GPUs, one for each rank or one for all of them.

Contenders, compared with one process before they are timed:

    single         torch's scaled_dot_product_attention of the whole sequence on one rank, while the
                   others wait
    ulysses, all-gather, ring, hybrid     modes of ContextParallel, all but the first with head-tail
                   parts where the mask is causal; a hybrid of d shares heads over d ranks
    torch ring     the template of torch's experimental `context_parallel` (which has no path for
                   the CPU), over the same kernels, with its load balance where the mask is causal,
                   which is the only mask it knows. `permute` and `gather` are its rotate methods

`ms` is the time until the slowest rank is done, the median of the rounds, in which the contenders
take turns; `/ single` its ratio to one process. On a machine with fewer cores than ranks, ranks
wait for each other's turn: `cpu / single` is the ratio of the CPU seconds of the busiest rank, 1 /
ranks at best. `sent` is what the busiest rank sends to others in forward and backward, counted as
it leaves; `formula` is `hp_context.exchanged_bytes`. `error` is the largest of the output and of
the three gradients, each relative to the largest value that one process has.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_ring

from hp_context import (
    Attention,
    Causal,
    ContextParallel,
    Contiguous,
    Documents,
    Full,
    HeadTail,
    Mask,
    SequenceLayout,
    exchanged_bytes,
    mask_tensor,
    shard_sequence,
    unshard_sequence,
)
from hp_context.kernels import block_backward, block_forward
from hp_context.masks import BlockKind
from hp_platform import initialize, shutdown
from hp_platform.testing import record_exchanges, run_distributed

Tuple = tuple[Tensor, ...]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
BOUND = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Settings:
    """What to measure."""

    seqs: tuple[int, ...]
    masks: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]
    head_size: int
    dtype: torch.dtype
    rounds: int


@dataclass(frozen=True)
class Problem:
    """One line of contenders."""

    seq: int
    mask_name: str
    heads: tuple[int, int]

    @property
    def mask(self) -> Mask:
        """Documents are causal as well, six of uneven lengths."""
        if self.mask_name == "documents":
            shares = (5, 1, 3, 2, 4, 1)
            lengths = [self.seq * share // sum(shares) + 1 for share in shares[1:]]
            return Causal() & Documents((self.seq - sum(lengths), *lengths))
        return Causal() if self.mask_name == "causal" else Full()

    @property
    def balanced(self) -> SequenceLayout:
        """Parts of equal work where keys are gathered."""
        return Contiguous() if self.mask_name == "full" else HeadTail()


@dataclass(frozen=True)
class Contender:
    """One way to compute attention of this rank's part, [B, s, H, D]."""

    attend: Attend
    layout: SequenceLayout
    formula: int | None


@dataclass
class Measured:
    """What one rank saw of a contender: seconds of each round, CPU seconds, bytes, error."""

    seconds: list[float]
    cpu: list[float]
    sent: int
    formula: int | None
    error: float


class Whole:
    """q, k, v and the gradient of the output, whole on every rank, and what one process makes."""

    def __init__(self, problem: Problem, settings: Settings, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        heads, kv_heads = problem.heads
        self.q, self.k, self.v, self.grad = (
            torch.randn(1, problem.seq, count, settings.head_size, generator=generator)
            .to(settings.dtype)
            .to(device)
            for count in (heads, kv_heads, kv_heads, heads)
        )
        self.problem = problem
        plain = isinstance(problem.mask, (Full, Causal))
        self.mask = None if plain else mask_tensor(problem.mask, problem.seq, device=device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One process: no part, no exchange."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        causal = isinstance(self.problem.mask, Causal)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, is_causal=causal, enable_gqa=q.size(1) != k.size(1)
        )
        return out.transpose(1, 2)

    def parts(self, group: ProcessGroup, layout: SequenceLayout) -> list[Tensor]:
        """Return what this rank holds."""
        whole = (self.q, self.k, self.v, self.grad)
        return [shard_sequence(x, group, layout=layout) for x in whole]


@dataclass(frozen=True)
class Ring:
    """A call of torch's template, over the kernels of `hp_context`."""

    group: ProcessGroup
    causal: bool
    scale: float

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tuple:
        """Attend over one block: output and log-sum-exp."""
        kind = BlockKind.CAUSAL if kwargs["is_causal"] else BlockKind.FULL
        return block_forward(query, key, value, kind=kind, mask=None, scale=self.scale)

    def backward(self, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tuple:
        """Return dq, dk, dv of one block."""
        return block_backward(
            query,
            key,
            value,
            grad_out=kwargs["grad_out"],
            out=kwargs["out"],
            lse=kwargs["logsumexp"],
            kind=BlockKind.CAUSAL if kwargs["is_causal"] else BlockKind.FULL,
            mask=None,
            scale=self.scale,
        )


class _TorchRing(torch.autograd.Function):
    """The template forward and backward, on [B, H, s, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        out, lse = torch_ring._templated_ring_attention(  # noqa: SLF001
            ring.group, 2, ring.forward, q, k, v, is_causal=ring.causal
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        ring = ctx.ring
        q, k, v, out, lse = ctx.saved_tensors
        template = torch_ring._templated_ring_attention_backward  # noqa: SLF001
        call = (ring.group, 2, ring.backward, grad_out, "grad_out")
        dq, dk, dv, *_ = template(*call, q, k, v, out, lse, ring.causal)
        return dq, dk, dv, None


def like_torch(group: ProcessGroup, *, causal: bool, method: str) -> Attend:
    """Torch's ring with one of its rotate methods."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Globals of that module; backward reads them as well, and it runs before the next forward.
        torch_ring._cp_options.enable_load_balance = causal  # noqa: SLF001
        torch_ring.set_rotate_method(method)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        ring: Any = _TorchRing
        out: Tensor = ring.apply(q, k, v, Ring(group, causal, q.size(-1) ** -0.5))
        return out.transpose(1, 2)

    return attend


def contenders(problem: Problem, settings: Settings, group: ProcessGroup) -> dict[str, Contender]:
    """Return those that this number of ranks allows."""
    heads, kv_heads = problem.heads
    ranks = group.size()
    modes = [("ulysses", ranks, False), ("all-gather", 1, False), ("ring", 1, True)]
    if ranks >= 4 and ranks % 2 == 0:
        modes += [("hybrid 2", 2, False), ("hybrid 2, ring", 2, True)]
    found = {}
    for name, degree, ring in modes:
        if heads < degree:
            continue
        layout = Contiguous() if degree == ranks else problem.balanced
        formula = exchanged_bytes(
            seq_len=problem.seq,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=settings.head_size,
            num_ranks=ranks,
            ulysses_degree=degree,
            ring=ring,
            mask=problem.mask,
            layout=layout,
            dtype=settings.dtype,
            rank=group.rank(),
        )
        parallel = ContextParallel(degree, ring=ring, layout=layout)
        core = parallel.apply(Attention(problem.mask), group)
        found[name] = Contender(core, layout, sum(formula))
    if problem.mask_name != "documents":
        causal = problem.mask_name == "causal"
        for name, method in (("permute", "alltoall"), ("gather", "allgather")):
            attend = like_torch(group, causal=causal, method=method)
            found[f"torch ring, {name}"] = Contender(attend, problem.balanced, None)
    return found


def step(attend: Attend, parts: list[Tensor]) -> list[Tensor]:
    """Forward and backward: the output and the three gradients."""
    *qkv, grad = parts
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def timed(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Return seconds and CPU seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start, start_cpu = time.perf_counter(), time.process_time()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - start_cpu


def error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error of output and gradients."""
    pairs = zip(actual, expected, strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def measure_one(
    problem: Problem, settings: Settings, group: ProcessGroup, device: torch.device
) -> dict[str, Measured]:
    """Check, count, and let the contenders take turns."""
    whole = Whole(problem, settings, device)
    single = [whole.q, whole.k, whole.v, whole.grad]
    expected = step(whole.attend, single)
    found = contenders(problem, settings, group)
    parts = {name: whole.parts(group, c.layout) for name, c in found.items()}
    measured = {"single": Measured([], [], 0, None, 0.0)}
    for name, contender in found.items():
        mine = step(contender.attend, parts[name])  # in their first call ranks compare notes
        with record_exchanges() as exchanges:
            step(contender.attend, parts[name])
        actual = [unshard_sequence(x, group, layout=contender.layout) for x in mine]
        sent = sum(e.num_bytes for e in exchanges)
        off = error(actual, expected)
        if not off <= BOUND[settings.dtype]:
            raise ValueError(f"error of {name} ({off:.1e}) must be <= {BOUND[settings.dtype]}")
        measured[name] = Measured([], [], sent, contender.formula, off)
    del expected, actual, mine
    for _ in range(settings.rounds):
        dist.barrier(group)
        if group.rank() == 0:
            note(measured["single"], partial(step, whole.attend, single), device)
        for name, contender in found.items():
            dist.barrier(group)
            note(measured[name], partial(step, contender.attend, parts[name]), device)
    return measured


def note(measured: Measured, run: Callable[[], object], device: torch.device) -> None:
    """Time one step."""
    seconds, cpu = timed(run, device)
    measured.seconds.append(seconds)
    measured.cpu.append(cpu)


def measure(
    settings: Settings, device: torch.device | None = None
) -> list[tuple[Problem, dict[str, Measured]]]:
    """Measure all problems on this rank."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("the default process group must be initialised")
    torch.set_num_threads(1)
    device = device or torch.device("cpu")
    problems = [
        Problem(seq, mask, heads)
        for seq in settings.seqs
        for mask in settings.masks
        for heads in settings.heads
    ]
    return [(problem, measure_one(problem, settings, group, device)) for problem in problems]


def report(by_rank: list[list[tuple[Problem, dict[str, Measured]]]], settings: Settings) -> None:
    """Print one Markdown table."""
    print(
        f"{len(by_rank)} ranks, head size {settings.head_size}, {settings.dtype}, median of "
        f"{settings.rounds} rounds\n"
    )
    print("| S | mask | heads | | ms | / single | cpu / single | sent MiB | formula | error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for of_ranks in zip(*by_rank, strict=True):
        problem = of_ranks[0][0]
        rows = [measured for _, measured in of_ranks]
        base = statistics.median(rows[0]["single"].seconds)
        base_cpu = min(rows[0]["single"].cpu)
        for name in rows[0]:
            of_name = [row[name] for row in rows if row[name].seconds]
            slowest = statistics.median(map(max, zip(*(m.seconds for m in of_name), strict=True)))
            busiest = max(min(m.cpu) for m in of_name)
            formula = max((m.formula for m in of_name if m.formula is not None), default=None)
            cells = [
                str(problem.seq),
                problem.mask_name,
                f"{problem.heads[0]}/{problem.heads[1]}",
                name,
                f"{1e3 * slowest:.1f}",
                f"{slowest / base:.2f}",
                f"{busiest / base_cpu:.2f}",
                f"{max(m.sent for m in of_name) / 2**20:.2f}",
                "" if formula is None else f"{formula / 2**20:.2f}",
                f"{max(m.error for m in of_name):.0e}",
            ]
            print(f"| {' | '.join(cells)} |")


def arguments() -> tuple[Settings, int]:
    """Read the command line: settings and ranks."""
    parser = argparse.ArgumentParser(description="modes of attention over a split sequence")
    parser.add_argument("--ranks", type=int, default=4, help="without torchrun")
    parser.add_argument("--seq", type=int, nargs="+", default=[1024, 4096])
    names = ["causal", "full", "documents"]
    parser.add_argument("--mask", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--heads", type=int, nargs=2, action="append", metavar=("Q", "KV"), help="may be repeated"
    )
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    settings = Settings(
        tuple(given.seq),
        tuple(given.mask),
        tuple(map(tuple, given.heads or [(8, 8), (8, 2)])),
        given.head_size,
        getattr(torch, given.dtype),
        given.rounds,
    )
    return settings, given.ranks


def main() -> None:
    """Start ranks, or be one of those that torchrun started."""
    settings, ranks = arguments()
    if "RANK" not in os.environ:
        report(run_distributed(measure, settings, world_size=ranks, timeout=3600), settings)
        return
    runtime = initialize()
    gathered: list[Any] = [None] * runtime.info.world_size
    dist.all_gather_object(gathered, measure(settings, runtime.device), group=runtime.control)
    if runtime.info.rank == 0:
        report(gathered, settings)
    shutdown()


if __name__ == "__main__":
    main()
