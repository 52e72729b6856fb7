"""Operators of one MoE layer, forward and backward, beside those of torchtitan's layer.

    python benchmarks/bench_moe_operators.py
    PYTHONPATH=$PYTHONPATH:FOLDER python benchmarks/bench_moe_operators.py   # torchtitan's, too

Counted are leaf operators: what torch's dispatcher, or a Triton kernel's launch, sees below
autograd, without views, without matrix products (one for each expert on a CPU, grouped elsewhere),
and without what only allocates. `cpu` runs the layer; `cuda` runs it on a device that computes
nothing (`hp_dry`), which takes the branches of CUDA. torchtitan's layer (0.3.0, one rank,
no shared expert) is restated operator by operator, as it needs triton, tyro and more to be
imported; where it can be, its own is counted on the CPU as well, and must agree.

Sizes do not matter: 128 tokens, 8 experts, top 2, in bf16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_dry import DryDevice, active_device
from hp_dry.trace import Launch
from hp_expert import GroupedExperts, MoE, TopKRouter
from hp_platform.testing import watch_operators

T, D, H, E, K = 128, 64, 32, 8, 2
PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "_grouped_mm"}
NO_WORK = {"empty", "new_empty", "empty_like", "empty_strided", "promote_types"}

Layer = Callable[[Tensor], Tensor]


class TorchtitanLayer(nn.Module):
    """`torchtitan.models.common.moe.MoE` with a softmax router whose weights are normalised."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, E, bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.randn(E, H, D)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(E, D, H))
        self.load: Tensor
        self.register_buffer("load", torch.zeros(E))

    def forward(self, x_BLD: Tensor) -> Tensor:
        """[B, L, D] to the same."""
        scores_BLE = F.softmax(self.gate(x_BLD), dim=-1)
        _, chosen_BLK = torch.topk(scores_BLE, k=K, dim=-1, sorted=False)
        weights_BLK = scores_BLE.gather(dim=-1, index=chosen_BLK)
        weights_BLK = weights_BLK / (weights_BLK.sum(dim=-1, keepdim=True) + 1e-20)
        weights_BLK = weights_BLK * 1.0
        taken_BLE = torch.zeros_like(scores_BLE, dtype=torch.bool).scatter_(-1, chosen_BLK, True)
        counts_E = taken_BLE.sum(dim=(0, 1))
        with torch.no_grad():
            self.load.add_(counts_E)
        x_TD = x_BLD.view(-1, D)
        order_N = torch.argsort(chosen_BLK.view(-1), stable=True)
        weights_N = weights_BLK.view(-1)[order_N]
        token_N = order_N // K
        ends_E = torch.cumsum(counts_E, dim=0, dtype=torch.int32)
        rows_ND = x_TD[token_N]

        def product(a: Tensor, b: Tensor) -> Tensor:
            return F.grouped_mm(a, b.bfloat16().transpose(-2, -1), offs=ends_E)

        h_NH = F.silu(product(rows_ND.bfloat16(), self.w1))
        h_NH = h_NH * product(rows_ND.bfloat16(), self.w3)
        out_ND = product(h_NH, self.w2).type_as(rows_ND)
        out_ND = (out_ND.to(torch.float32) * weights_N.reshape(-1, 1)).to(out_ND.dtype)
        y_TD = torch.zeros_like(x_TD)
        return y_TD.scatter_add(0, token_N.reshape(-1, 1).expand(-1, D), out_ND).view_as(x_BLD)


def hp_layer(device: str, *, counts_load: bool = False) -> Layer:
    """hp-expert's layer; without counters of load, which a correction bias alone reads."""
    with torch.device(device):
        layer = MoE(TopKRouter(D, E, K, counts_load=counts_load), GroupedExperts(E, D, H))
    layer.experts.to(torch.bfloat16)
    return lambda x: layer(x)[0]


def restated_layer(device: str) -> Layer:
    """Torchtitan's layer, restated."""
    with torch.device(device):
        return TorchtitanLayer().to(torch.bfloat16)


def torchtitan_layer(device: str) -> Layer:
    """Torchtitan's own."""
    common = "torchtitan.models.common"
    linear: Any = import_module(f"{common}.linear")
    moe: Any = import_module(f"{common}.moe")
    token_dispatcher: Any = import_module(f"{common}.token_dispatcher")

    config: Any = moe.MoE.Config(
        num_experts=E,
        load_balance_coeff=None,
        router=moe.TokenChoiceTopKRouter.Config(
            num_experts=E,
            gate=linear.Linear.Config(in_features=D, out_features=E, bias=False),
            top_k=K,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=moe.RoutedExperts.Config(
            inner_experts=moe.GroupedExperts.Config(dim=D, hidden_dim=H, num_experts=E),
            token_dispatcher=token_dispatcher.LocalTokenDispatcher.Config(num_experts=E, top_k=K),
        ),
    )
    with torch.device(device):
        layer: nn.Module = config.build()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.routed_experts.to(torch.bfloat16)
    layer.router.to(torch.bfloat16)
    return layer


def run(layer: Layer, device: str) -> None:
    """Run forward and backward once."""
    x = torch.randn(2, T // 2, D, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    torch.autograd.backward(y, torch.empty_like(y))


def is_view(name: str) -> bool:
    """Whether an operator returns memory of its argument and writes none."""
    packet, _, overload = name.removeprefix("aten::").partition(".")
    operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    arguments = [] if operator is None else operator._schema.arguments  # noqa: SLF001
    aliases = [a.alias_info for a in arguments if a.alias_info is not None]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def on_cpu(make: Callable[[str], Layer]) -> Counter[str]:
    """Count the operators of a layer that computes."""
    layer, found = make("cpu"), Counter[str]()
    run(layer, "cpu")
    with watch_operators(lambda name, _args, _kwargs: found.update([name])):
        run(layer, "cpu")
    return Counter({name: n for name, n in found.items() if not is_view(name)})


def on_cuda(make: Callable[[str], Layer]) -> Counter[str]:
    """Count the launches of a layer on a device that computes nothing."""
    with DryDevice():
        layer = make("cuda")
        run(layer, "cuda")
        events = active_device().trace.events
        first = len(events)
        run(layer, "cuda")
        found = Counter[str]()
        for event in events[first:]:
            if isinstance(event, Launch) and event.num_kernels:
                found[event.what] += event.num_kernels
    return found


def beside_products(found: Counter[str]) -> int:
    """How many of them do work, and are no products."""
    left = 0
    for name, count in found.items():
        operator = name.removeprefix("aten::").removeprefix("aten.").partition(".")[0]
        left += count if operator not in PRODUCTS | NO_WORK else 0
    return left - found["aten::randn"] - found["aten.randn.default"]


LAYERS: dict[str, Callable[[str], Layer]] = {
    "hp-expert": hp_layer,
    "hp-expert, with load": partial(hp_layer, counts_load=True),
    "torchtitan, restated": restated_layer,
}


def main() -> None:
    """Print a line for each layer."""
    print(f"{'':24}{'cpu':>6}{'cuda':>6}")
    for name, make in LAYERS.items():
        print(f"{name:24}{beside_products(on_cpu(make)):6}{beside_products(on_cuda(make)):6}")
    if find_spec("torchtitan") is not None:  # its autocast of CUDA is nothing for a dry device
        print(f"{'torchtitan':24}{beside_products(on_cpu(torchtitan_layer)):6}")


if __name__ == "__main__":
    main()
