"""Forward and backward of one layer whose experts are on several ranks, against other exchanges.

    python benchmarks/bench_expert_parallel.py                         # 2 and 4 Gloo ranks
    torchrun --nproc-per-node 4 benchmarks/bench_expert_parallel.py    # on GPUs, one for each rank

Contenders, with the same weights and routing, compared before they are timed:

    hp, plain      AllToAllDispatcher(deduplicate=False): a row for each slot
    hp, dedup      AllToAllDispatcher(deduplicate=True): a row for each token and rank
    hf             the exchange of `transformers` (AllToAllEP), restated: one host read, weights
                   applied after the way back, `reshape` and `sum`
    torchtitan     its AllToAllTokenDispatcher, restated: two host reads, `x[index]`, `scatter_add`
    hp, ep x tp    ExpertTensorParallel over 2 x 2 ranks, the tp ranks with the same tokens
    whole per tp   plain expert parallelism over the same ep groups: each tp rank sends all tokens

`reads` are waits of the host for the device, in forward and backward. `wire` is what a rank sends
to others over ep in both, `/ all` its ratio to what the rows of all slots, or of all tokens, take;
`tp` is what it sends to its tp group. `ms` is the CPU time of the slowest rank in its best round;
on CUDA the time between two events.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd, wait_tensor
from torch.distributed.device_mesh import init_device_mesh

from hp_expert import AllToAllDispatcher, ExpertParallel, ExpertTensorParallel, GroupedExperts
from hp_expert.testing import host_reads
from hp_platform import initialize, shutdown
from hp_platform.testing import run_distributed, watch_operators

ROUNDS = 15
BOUND = 1e-4


class Shape(NamedTuple):
    """Sizes of a layer; tokens are those of one rank."""

    experts: int
    top_k: int
    tokens: int = 512
    dim: int = 256
    hidden: int = 256


SHAPES = {2: Shape(16, 4), 4: Shape(64, 8)}
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


class Row(NamedTuple):
    """What one contender costs a rank: reads, MiB over ep and to the tp group, milliseconds."""

    reads: int
    wire: float
    inside_tp: float
    milliseconds: float


class Sent:
    """Bytes that exchanges of this rank send to others, by the name of the group."""

    def __init__(self, groups: list[ProcessGroup]) -> None:
        self.groups = {group.group_name: group for group in groups}
        self.bytes_of: dict[str, int] = {str(name): 0 for name in self.groups}

    def see(self, name: str, args: Any, kwargs: Any) -> None:
        """Look at one operator."""
        del kwargs
        if name == "_c10d_functional::all_to_all_single":
            self._add(args[0], args[2], args[3])
        elif name == "c10d::alltoall_base_":
            self._add(args[1], args[4], ProcessGroup.unbox(args[2]).group_name)

    def _add(self, x: Tensor, splits: list[int], name: Any) -> None:
        group = self.groups[name]
        staying = splits[group.rank()] if splits else x.shape[0] // group.size()
        self.bytes_of[name] += (x.shape[0] - staying) * x[:1].nbytes


def dispatched(experts: GroupedExperts) -> Layer:
    """The layer as `hp_expert.MoE` runs it after its router."""

    def run(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        dispatcher = experts.dispatcher
        rows, state = dispatcher.launch_dispatch(*dispatcher.prepare(x, chosen, weights))
        out = experts(dispatcher.finish_dispatch(rows, state))
        y: Tensor = dispatcher.finish_combine(dispatcher.launch_combine(out, state), state)
        return y

    return run


def exchange(x: Tensor, outputs: list[int], inputs: list[int], group: ProcessGroup) -> Tensor:
    """What the others use: differentiable, and waited for at once."""
    y: Tensor = wait_tensor(all_to_all_single_autograd(x, outputs, inputs, group))
    return y


def compute(experts: GroupedExperts, rows: Tensor, counts: Tensor) -> Tensor:
    """All local experts by grouped products; rows are in their order."""
    ends = counts.cumsum(0, dtype=torch.int32)
    gate = F.grouped_mm(rows, experts.w1.mT, offs=ends)
    up = F.grouped_mm(rows, experts.w3.mT, offs=ends)
    return F.grouped_mm(F.silu(gate) * up, experts.w2.mT, offs=ends)


def counted(chosen: Tensor, num_experts: int, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """Slots of each expert, and those that come from each rank: [E] and [W, L]."""
    flat = chosen.flatten()
    bins = flat.float() if flat.device.type == "cpu" else flat.int()
    told = torch.histc(bins, bins=num_experts, min=0, max=num_experts - 1).long()
    heard = torch.empty_like(told)
    dist.all_to_all_single(heard, told, group=group)
    return told, heard.view(group.size(), -1)


def like_transformers(experts: GroupedExperts, group: ProcessGroup) -> Layer:
    """AllToAllEP of transformers 5.23 (`distributed/expert_parallel.py`)."""

    def run(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        told, heard = counted(chosen, experts.num_experts, group)
        sizes = torch.stack([told.view_as(heard).sum(1), heard.sum(1)]).tolist()
        order = chosen.flatten().argsort()
        arrived = exchange(x[order // chosen.shape[1]], sizes[1], sizes[0], group)
        local = torch.arange(heard.shape[1], device=x.device).repeat(group.size())
        of_row = local.repeat_interleave(heard.flatten(), output_size=len(arrived))
        by_expert = of_row.argsort()
        out = compute(experts, arrived[by_expert], heard.sum(0))[by_expert.argsort()]
        back = exchange(out, sizes[0], sizes[1], group)[order.argsort()]
        return (back * weights.flatten()[:, None]).view(*chosen.shape, -1).sum(1)

    return run


def like_torchtitan(experts: GroupedExperts, group: ProcessGroup) -> Layer:
    """AllToAllTokenDispatcher of torchtitan (`models/common/token_dispatcher.py`)."""

    def run(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        told, heard = counted(chosen, experts.num_experts, group)
        inputs, outputs = told.view_as(heard).sum(1).tolist(), heard.sum(1).tolist()
        order = chosen.flatten().argsort(stable=True)
        token = order // chosen.shape[1]
        arrived = exchange(x[token], outputs, inputs, group)
        local = torch.arange(heard.shape[1], device=x.device).repeat(group.size())
        of_row = local.repeat_interleave(heard.flatten(), output_size=len(arrived))
        by_expert = of_row.argsort(stable=True)
        out = compute(experts, arrived[by_expert], heard.sum(0))
        unsorted = torch.empty_like(out)
        unsorted[by_expert] = out
        back = exchange(unsorted, inputs, outputs, group) * weights.flatten()[order, None]
        return torch.zeros_like(x).scatter_add(0, token[:, None].expand_as(back), back)

    return run


class Problem:
    """Tokens and routing of one rank, and contenders that must agree on them."""

    def __init__(self, shape: Shape, device: torch.device, *, seed: int) -> None:
        self.shape, self.device = shape, device
        torch.manual_seed(1 + seed)
        x, scores = torch.randn(shape.tokens, shape.dim), torch.randn(shape.tokens, shape.experts)
        weights, self.chosen = scores.softmax(-1).topk(shape.top_k)
        self.x, self.weights = (t.to(device).requires_grad_() for t in (x, weights))
        self.upstream = torch.randn_like(x).to(device)
        self.chosen = self.chosen.to(device)
        self.layers: dict[str, tuple[Layer, GroupedExperts]] = {}

    def experts(self) -> GroupedExperts:
        """All experts, the same each time and on each rank."""
        torch.manual_seed(0)
        shape = self.shape
        return GroupedExperts(shape.experts, shape.dim, shape.hidden).to(self.device)

    def step(self, name: str) -> dict[str, Tensor]:
        """Forward and backward: the output and the gradients of tokens and weights."""
        layer, experts = self.layers[name]
        experts.zero_grad()
        self.x.grad = self.weights.grad = None
        y = layer(self.x, self.weights, self.chosen)
        y.backward(self.upstream)
        named = {"y": y.detach(), "dx": self.x.grad, "d weights": self.weights.grad}
        return {key: tensor for key, tensor in named.items() if tensor is not None}

    def check(self) -> None:
        """Raise if two contenders differ."""
        names = list(self.layers)
        expected = self.step(names[0])
        for name in names[1:]:
            for key, actual in self.step(name).items():
                error = (actual - expected[key]).abs().max() / expected[key].abs().max()
                if not error <= BOUND:
                    raise ValueError(f"error of {key} ({error:.1e}) of {name} must be <= {BOUND}")

    def time(self, name: str) -> float:
        """Milliseconds of one step."""
        if self.device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self.step(name)
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end))
        begin = time.process_time()
        self.step(name)
        return 1e3 * (time.process_time() - begin)

    def measure(
        self, groups: list[ProcessGroup], *, tp: ProcessGroup | None = None
    ) -> dict[str, Row]:
        """Check, count, and let the contenders alternate."""
        self.check()
        counted_of = {name: self._count(name, groups) for name in self.layers}
        best = dict.fromkeys(self.layers, float("inf"))
        for _ in range(ROUNDS):
            for name in self.layers:
                dist.barrier()
                best[name] = min(best[name], self.time(name))
        rows = {}
        for name, (reads, sent) in counted_of.items():
            inside = 0 if tp is None else sent.pop(tp.group_name, 0)
            rows[name] = Row(reads, sum(sent.values()) / 2**20, inside / 2**20, best[name])
        return rows

    def _count(self, name: str, groups: list[ProcessGroup]) -> tuple[int, dict[str, int]]:
        sent = Sent(groups)
        with host_reads(self.device) as reads, watch_operators(sent.see):
            self.step(name)
        return len(reads), sent.bytes_of


def over_ep(device: torch.device, shape: Shape) -> dict[str, Row]:
    """Measure the exchanges over all ranks."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError("the default process group must be initialised")
    problem = Problem(shape, device, seed=group.rank())
    for name, deduplicate in (("hp, plain", False), ("hp, dedup", True)):
        experts = problem.experts()
        ExpertParallel().apply(experts, group)
        experts.dispatcher = AllToAllDispatcher(group, shape.experts, deduplicate)
        problem.layers[name] = dispatched(experts), experts
    for name, restated in (("hf", like_transformers), ("torchtitan", like_torchtitan)):
        experts = problem.experts()
        ExpertParallel().apply(experts, group)
        problem.layers[name] = restated(experts, group), experts
    return problem.measure([group])


def over_ep_and_tp(device: torch.device, shape: Shape) -> dict[str, Row]:
    """Measure two axes of ranks; those of a tp group have the same tokens."""
    mesh = init_device_mesh(
        device.type, (2, dist.get_world_size() // 2), mesh_dim_names=("ep", "tp")
    )
    problem = Problem(shape, device, seed=mesh.get_local_rank("ep"))
    both, whole = problem.experts(), problem.experts()
    ExpertTensorParallel(deduplicate=False).apply(
        both, (mesh.get_group("ep"), mesh.get_group("tp"))
    )
    ExpertParallel().apply(whole, mesh.get_group("ep"))
    whole.dispatcher = AllToAllDispatcher(mesh.get_group("ep"), shape.experts, deduplicate=False)
    problem.layers = {
        "hp, ep x tp": (dispatched(both), both),
        "whole per tp": (dispatched(whole), whole),
    }
    groups = [mesh.get_group("ep"), mesh.get_group("tp")]
    return problem.measure(groups, tp=groups[1])


def measure(device: torch.device | None = None) -> dict[str, Row]:
    """Measure everything that this number of ranks allows."""
    device = device or torch.device("cpu")
    shape = SHAPES.get(dist.get_world_size(), Shape(8 * dist.get_world_size(), 8))
    rows = over_ep(device, shape)
    if dist.get_world_size() >= 4:
        rows |= over_ep_and_tp(device, shape)
    return rows


def report(ranks: list[dict[str, Row]]) -> None:
    """Print one Markdown table: means over ranks, and the slowest."""
    print(f"\n{len(ranks)} ranks, {SHAPES.get(len(ranks), 'default shape')}\n")
    print("| | reads | wire MiB | / all | tp MiB | ms |\n|---|---|---|---|---|---|")
    wire = {name: sum(rows[name].wire for rows in ranks) for name in ranks[0]}
    for name in ranks[0]:
        reads = max(rows[name].reads for rows in ranks)
        reference = "whole per tp" if name in ("hp, ep x tp", "whole per tp") else "hp, plain"
        inside = sum(rows[name].inside_tp for rows in ranks) / len(ranks)
        slowest = max(rows[name].milliseconds for rows in ranks)
        cells = [
            f"{wire[name] / len(ranks):.2f}",
            f"{wire[name] / wire[reference]:.2f}",
            f"{inside:.2f}",
            f"{slowest:.1f}",
        ]
        print(f"| {name} | {reads} | {' | '.join(cells)} |")


def main() -> None:
    """Start ranks, or be one of those that torchrun started."""
    if "RANK" not in os.environ:
        for world_size in SHAPES:
            report(run_distributed(measure, world_size=world_size, timeout=600))
        return
    runtime = initialize()
    rows: list[Any] = [None] * runtime.info.world_size
    dist.all_gather_object(rows, measure(runtime.device), group=runtime.control)
    if runtime.info.rank == 0:
        report(rows)
    shutdown()


if __name__ == "__main__":
    main()
