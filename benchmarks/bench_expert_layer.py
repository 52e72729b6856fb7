"""Forward and backward of one mixture-of-experts layer, against the ways others compute it.

    python benchmarks/bench_expert_layer.py                     # all shapes, one thread and two
    python benchmarks/bench_expert_layer.py --threads 1 --shapes 0 1 --rounds 9

Contenders, all with the same weights and the same routing, given:

    hp            hp_expert: dispatcher and experts
    hf *          the experts of `transformers` (Qwen3-MoE), in each of its ways, if it is installed
    grouped_mm    rows sorted by expert and `torch.nn.functional.grouped_mm`, the rest by indexing
    loop, unbind  expert after expert, weights taken apart by one `unbind`
    loop, w[e]    the same as tutorials write it: the backward of each `w[e]` is as large as w
    hp block      with its router: `hp_expert.MoE`, which also counts loads
    hf block      with its router: `Qwen3MoeSparseMoeBlock`, in the way that is its default

Before anything is timed, outputs and gradients are compared, those of blocks in fp32 only: in bf16
`transformers` rounds logits and chooses other experts for some tokens. Then contenders alternate,
round by round, and the best round of each counts. On CPU that is the CPU time of the process, which
other processes on the machine disturb least; with several threads, where they would wait in it, the
wall time. On CUDA it is the time between two events. `saved` is what autograd keeps for backward,
each storage once, without parameters; `peak` (CUDA) what forward and backward allocate on top.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_expert import GroupedExperts, MoE, TopKRouter

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SECONDS_PER_CONTENDER = 20.0  # a slow one has fewer rounds
LARGEST_COPY = 8 * 2**30  # bytes; batched_mm copies a whole expert for every slot
BOUNDS = {torch.bfloat16: 3e-2, torch.float32: 1e-5}

Layer = Callable[[GroupedExperts, Tensor, Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    """Sizes of a layer."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"E={self.experts} k={self.top_k} T={self.tokens} D={self.dim} H={self.hidden} {name}"
        )

    @property
    def flops(self) -> int:
        """Of the products of forward and backward: three matrices, each used three times."""
        return 18 * self.tokens * self.top_k * self.dim * self.hidden


SHAPES = (
    Shape(4096, 512, 1024, 64, 8, torch.bfloat16),
    Shape(4096, 512, 1024, 8, 2, torch.bfloat16),
    Shape(1024, 512, 1024, 64, 8, torch.float32),
    Shape(4096, 512, 1024, 8, 2, torch.float32),
    Shape(256, 64, 128, 8, 2, torch.float32),
)


def hp(experts: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Run the layer as `hp_expert.MoE` does after its router."""
    dispatcher = experts.dispatcher
    rows, state = dispatcher.launch_dispatch(*dispatcher.prepare(x, chosen, weights))
    out = experts(dispatcher.finish_dispatch(rows, state))
    return dispatcher.finish_combine(dispatcher.launch_combine(out, state), state)


def grouped_mm(experts: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """All experts in one product, everything else by indexing."""
    order = chosen.flatten().argsort(stable=True)
    token = order // chosen.shape[1]
    counts = torch.bincount(chosen.flatten(), minlength=experts.num_experts)
    offsets = counts.cumsum(0, dtype=torch.int32)
    rows = x[token]
    gate = F.grouped_mm(rows, experts.w1.mT, offs=offsets)
    up = F.grouped_mm(rows, experts.w3.mT, offs=offsets)
    out = F.grouped_mm(F.silu(gate) * up, experts.w2.mT, offs=offsets)
    out = out * weights.flatten()[order, None].to(out.dtype)
    return torch.zeros_like(x).index_add(0, token, out)


def loop_unbind(experts: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """One expert after the other."""
    stacked = (experts.w1.unbind(), experts.w3.unbind(), experts.w2.unbind())
    return _loop(list(zip(*stacked, strict=True)), x, weights, chosen)


def loop_select(experts: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """One expert after the other; each `w[e]` has a backward as large as all experts."""
    each = [(experts.w1[e], experts.w3[e], experts.w2[e]) for e in range(experts.num_experts)]
    return _loop(each, x, weights, chosen)


def _loop(
    each: list[tuple[Tensor, Tensor, Tensor]], x: Tensor, weights: Tensor, chosen: Tensor
) -> Tensor:
    y = torch.zeros_like(x)
    for e, (w1, w3, w2) in enumerate(each):
        token, choice = torch.where(chosen == e)
        rows = x[token]
        hidden = F.silu(rows @ w1.T) * (rows @ w3.T)
        out = (hidden @ w2.T) * weights[token, choice, None].to(x.dtype)
        y = y.index_add(0, token, out)
    return y


class Contender(NamedTuple):
    """A way to compute the layer.

    Attributes:
        run: Does it.
        experts: The weights of its experts, those of the down projections last.
        router: The weight of its router, if it routes itself.
    """

    run: Layer
    experts: Sequence[Tensor]
    router: Tensor | None = None

    @property
    def parameters(self) -> Sequence[Tensor]:
        """All of them."""
        return self.experts if self.router is None else [*self.experts, self.router]


def own(experts: GroupedExperts, router: TopKRouter) -> dict[str, Contender]:
    """All but those of `transformers`."""
    block, weights = MoE(router, experts), [experts.w1, experts.w3, experts.w2]
    layers = {"hp": hp, "grouped_mm": grouped_mm, "loop, unbind": loop_unbind}
    layers["loop, w[e]"] = loop_select
    contenders = {name: Contender(layer, weights) for name, layer in layers.items()}

    def run(_: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        del weights, chosen
        y: Tensor = block(x)[0]
        return y

    return contenders | {"hp block": Contender(run, weights, router.weight)}


def hugging_face(shape: Shape, experts: GroupedExperts, router: TopKRouter) -> dict[str, Contender]:
    """The implementations of `transformers`, on a stacked copy of the same weights."""
    if importlib.util.find_spec("transformers") is None:
        return {}
    qwen3_moe: Any = importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
    config_of: Any = importlib.import_module("transformers").Qwen3MoeConfig
    names = ["eager", "grouped_mm"]
    copied = shape.tokens * shape.top_k * 3 * shape.dim * shape.hidden * shape.dtype.itemsize
    if copied <= LARGEST_COPY:
        names.append("batched_mm")
    config = config_of(
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        hidden_size=shape.dim,
        moe_intermediate_size=shape.hidden,
        hidden_act="silu",
        norm_topk_prob=True,
    )
    block = qwen3_moe.Qwen3MoeSparseMoeBlock(config).to(DEVICE, shape.dtype)
    theirs = block.experts
    with torch.no_grad():
        theirs.gate_up_proj.copy_(torch.cat([experts.w1, experts.w3], dim=1))
        theirs.down_proj.copy_(experts.w2)
        block.gate.weight.copy_(router.weight)

    def layer(name: str) -> Layer:
        def run(_: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
            config._experts_implementation = name  # noqa: SLF001  # no public way for one module
            # Its router hands on weights in the dtype of the tokens.
            y: Tensor = theirs(x, chosen, weights.to(x.dtype))
            return y

        return run

    def run_block(_: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        del weights, chosen
        config._experts_implementation = "grouped_mm"  # noqa: SLF001
        y: Tensor = block(x.unsqueeze(0)).squeeze(0)
        return y

    weights = list(theirs.parameters())
    contenders = {f"hf {name}": Contender(layer(name), weights) for name in names}
    return contenders | {"hf block": Contender(run_block, weights, block.gate.weight)}


@dataclass
class Result:
    """What one contender costs.

    Attributes:
        milliseconds: Of each round.
        saved_mib: What autograd keeps.
        peak_mib: What forward and backward allocate at most; 0 on CPU.
    """

    milliseconds: list[float] = field(default_factory=list)
    saved_mib: float = 0.0
    peak_mib: float = 0.0

    @property
    def best(self) -> float:
        """Milliseconds of the best round."""
        return min(self.milliseconds)


class Problem:
    """One layer's weights, tokens and routing."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(0)
        self.shape = shape
        kind: dict[str, Any] = {"dtype": shape.dtype, "device": DEVICE}
        self.experts = GroupedExperts(shape.experts, shape.dim, shape.hidden, **kind)
        self.x = torch.randn(shape.tokens, shape.dim, **kind).requires_grad_()
        scores = torch.randn(shape.tokens, shape.experts, device=DEVICE).softmax(-1)
        weights, self.chosen = scores.topk(shape.top_k)
        self.weights = (weights / weights.sum(-1, keepdim=True)).requires_grad_()
        self.upstream = torch.randn_like(self.x)
        router = TopKRouter(shape.dim, shape.experts, shape.top_k, **kind)
        self.contenders = own(self.experts, router) | hugging_face(shape, self.experts, router)

    def forward(self, contender: Contender) -> Tensor:
        """The output, without gradients of an earlier round."""
        for leaf in (self.x, self.weights, *contender.parameters):
            leaf.grad = None
        return contender.run(self.experts, self.x, self.weights, self.chosen)

    def check(self) -> None:
        """Raise if outputs or gradients of two contenders differ."""
        for routes in (False, True):
            names = [n for n, c in self.contenders.items() if (c.router is not None) == routes]
            if routes and self.shape.dtype != torch.float32:
                continue
            expected = self._tensors(self.contenders[names[0]])
            for name in names[1:]:
                for what, actual in self._tensors(self.contenders[name]).items():
                    error = (actual - expected[what]).abs().max() / expected[what].abs().max()
                    if not error <= BOUNDS[self.shape.dtype]:
                        raise ValueError(f"{self.shape}: error of {what} ({error:.1e}) of {name}")

    def _tensors(self, contender: Contender) -> dict[str, Tensor]:
        y = self.forward(contender)
        y.backward(self.upstream)
        first = [w.grad for w in contender.experts[:-1] if w.grad is not None]
        named = {
            "y": y.detach(),
            "dx": self.x.grad,
            "d weights": self.weights.grad,
            "d gate, up": torch.cat(first, dim=1) if len(first) > 1 else first[0],
            "d down": contender.experts[-1].grad,
            "d router": None if contender.router is None else contender.router.grad,
        }
        wide = torch.float32
        return {name: t.to(wide).clone() for name, t in named.items() if t is not None}

    def saved(self, contender: Contender) -> float:
        """MiB that autograd keeps, each storage once, without the parameters."""
        known = {p.untyped_storage().data_ptr() for p in contender.parameters}
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = self.forward(contender)  # alive, so that no address is used twice
        del y
        return sum(storages.values()) / 2**20

    def time(self, contender: Contender) -> float:
        """Milliseconds of one forward and backward."""
        if DEVICE.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.forward(contender).backward(self.upstream)
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end))
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        begin = clock()
        self.forward(contender).backward(self.upstream)
        return 1e3 * (clock() - begin)

    def peak(self, contender: Contender) -> float:
        """MiB that forward and backward allocate at most, gradients included."""
        if DEVICE.type != "cuda":
            return 0.0
        for leaf in (self.x, self.weights, *contender.parameters):
            leaf.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.time(contender)
        return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(shape: Shape, rounds: int) -> dict[str, Result]:
    """Let the contenders of one shape alternate."""
    problem = Problem(shape)
    problem.check()  # and the first call, which fills caches and chooses kernels
    results = {
        name: Result(saved_mib=problem.saved(contender), peak_mib=problem.peak(contender))
        for name, contender in problem.contenders.items()
    }
    spent = dict.fromkeys(results, 0.0)
    for _ in range(rounds):
        for name, contender in problem.contenders.items():
            if spent[name] < SECONDS_PER_CONTENDER:
                begin = time.perf_counter()
                results[name].milliseconds.append(problem.time(contender))
                spent[name] += time.perf_counter() - begin
    return results


def report(shape: Shape, results: dict[str, Result]) -> None:
    """Print one Markdown table."""
    ours = results["hp"]
    threads = torch.get_num_threads()
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{threads} CPU thread(s)"
    print(f"\n{shape}, {where}, best of up to {len(ours.milliseconds)} rounds\n")
    peak = DEVICE.type == "cuda"
    print("| | ms | time / hp | tokens/s | GFLOP/s | saved MiB |" + " peak MiB |" * peak)
    print("|---|---|---|---|---|---|" + "---|" * peak)
    for name, result in results.items():
        seconds = result.best / 1e3
        cells = [
            name,
            f"{result.best:.1f}",
            f"{result.best / ours.best:.2f}",
            f"{shape.tokens / seconds:.0f}",
            f"{shape.flops / seconds / 1e9:.0f}",
            f"{result.saved_mib:.1f}",
        ]
        print(f"| {' | '.join(cells)} |" + f" {result.peak_mib:.1f} |" * peak, flush=True)


def main() -> None:
    """Print one table for each number of threads and each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", type=int, nargs="+", default=range(len(SHAPES)))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        print("transformers is not installed: its rows are missing")
    threads: list[int] = arguments.threads if DEVICE.type == "cpu" else [1]
    for number in threads:
        torch.set_num_threads(number)
        for index in arguments.shapes:
            report(SHAPES[index], measure(SHAPES[index], arguments.rounds))


if __name__ == "__main__":
    main()
