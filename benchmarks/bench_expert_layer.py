"""Forward and backward of one mixture-of-experts layer in one process, against two plain ones.

`loop` is what tutorials write: for each expert, `where`, `w[e]`, `index_add`. `grouped_mm` sorts
rows and calls `torch.nn.functional.grouped_mm`. All three get the same routing, alternate in one
run, and are measured in CPU time on one thread. `saved` is what autograd keeps for backward,
without parameters.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hp_expert import GroupedExperts

REPEATS = 15


class Shape(NamedTuple):
    """Sizes of a layer."""

    tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    dtype: torch.dtype


SHAPES = (
    Shape(2048, 128, 256, 8, 2, torch.float32),
    Shape(4096, 256, 512, 8, 2, torch.float32),
    Shape(2048, 256, 128, 64, 8, torch.float32),
    Shape(2048, 256, 128, 64, 8, torch.bfloat16),
)

Layer = Callable[[GroupedExperts, Tensor, Tensor, Tensor], Tensor]


def hp(experts: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Run the layer as `hp_expert.MoE` does after its router."""
    dispatcher = experts.dispatcher
    rows, state = dispatcher.launch_dispatch(*dispatcher.prepare(x, chosen, weights))
    out = experts(dispatcher.finish_dispatch(rows, state))
    return dispatcher.finish_combine(dispatcher.launch_combine(out, state), state)


def loop(experts: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """One expert after the other; each `w[e]` has a backward as large as all experts."""
    y = torch.zeros_like(x)
    for e in range(experts.num_experts):
        token, choice = torch.where(chosen == e)
        rows = x[token]
        hidden = F.silu(rows @ experts.w1[e].T) * (rows @ experts.w3[e].T)
        out = (hidden @ experts.w2[e].T) * weights[token, choice, None]
        y = y.index_add(0, token, out.to(y.dtype))
    return y


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
    out = out * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add(0, token, out.to(x.dtype))


WAYS: dict[str, Layer] = {"hp": hp, "loop": loop, "grouped_mm": grouped_mm}


class Row(NamedTuple):
    """What one way costs."""

    milliseconds: float
    saved_mib: float


def measure(shape: Shape) -> dict[str, Row]:
    """Return the median CPU time and the saved bytes of each way."""
    torch.manual_seed(0)
    experts = GroupedExperts(shape.experts, shape.dim, shape.hidden, dtype=shape.dtype)
    x = torch.randn(shape.tokens, shape.dim, dtype=shape.dtype, requires_grad=True)
    scores = torch.randn(shape.tokens, shape.experts).softmax(-1)
    weights, chosen = scores.topk(shape.top_k)
    weights.requires_grad_()
    upstream = torch.randn_like(x)
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for repeat in range(REPEATS + 2):
        for name, layer in WAYS.items():
            for leaf in (x, weights, *experts.parameters()):
                leaf.grad = None
            start = time.process_time()
            layer(experts, x, weights, chosen).backward(upstream)
            if repeat >= 2:  # the first calls fill caches
                times[name].append(1e3 * (time.process_time() - start))
    return {
        name: Row(statistics.median(times[name]), saved(layer, experts, x, weights, chosen))
        for name, layer in WAYS.items()
    }


def saved(
    layer: Layer, experts: GroupedExperts, x: Tensor, weights: Tensor, chosen: Tensor
) -> float:
    """MiB that autograd keeps, each storage once, without the parameters."""
    known = {p.untyped_storage().data_ptr() for p in experts.parameters()}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(experts, x, weights, chosen)  # alive, so that no address is used twice
    del y
    return sum(storages.values()) / 2**20


def main() -> None:
    """Print one block for each shape."""
    torch.set_num_threads(1)
    for shape in SHAPES:
        print(
            f"{shape.tokens} tokens, dim {shape.dim}, hidden {shape.hidden}, "
            f"{shape.experts} experts, {shape.top_k} of them, {shape.dtype}"
        )
        table = measure(shape)
        ours = table["hp"]
        for name, row in table.items():
            slower, more = row.milliseconds / ours.milliseconds, row.saved_mib / ours.saved_mib
            print(
                f"  {name:<11}{row.milliseconds:8.1f} ms {slower:6.2f}x"
                f"{row.saved_mib:9.2f} MiB saved {more:6.2f}x"
            )


if __name__ == "__main__":
    main()
