"""Layers of attention and of hp-expert's experts that take the time they are told.

All of a layer is real, its router, dispatcher, experts and what they exchange, but so small that it
takes no time. Attention and experts then spend theirs, in forward as in backward, without using a
core, as on a device that is not the CPU. Of a backward, half of the time goes into the gradients of
weights, which a schedule or a pair may put off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hp_expert import AllToAllDispatcher, ExpertParallel, GroupedExperts, MoE, TopKRouter
from hp_platform import submit_weight_grad

WIDTH, EXPERTS, HIDDEN = 32, 8, 16
WEIGHTS_SHARE = 0.5  # of a backward

Spend = Callable[[float], None]
"""Lets seconds pass, as compute does."""


@dataclass(frozen=True)
class Exchange:
    """Over which groups experts exchange, and how many of them a token goes to.

    Attributes:
        rows: Group that rows travel in.
        small: Group for all that travels beside them; None: the same.
        top_k: Number of experts of a token; from 4 of the 8 on, rows are deduplicated.
    """

    rows: ProcessGroup
    small: ProcessGroup | None = None
    top_k: int = 2

    def dispatcher(self, group: ProcessGroup, num_experts: int) -> AllToAllDispatcher:
        """Return what carries rows to their experts."""
        return AllToAllDispatcher(group, num_experts, small_group=self.small)


class _Busy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float, spend: Spend) -> Tensor:
        ctx.weight, ctx.seconds, ctx.spend = weight, seconds, spend
        spend(seconds)
        return x * 1.01

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        weight, seconds, spend = ctx.weight, ctx.seconds, ctx.spend
        grad = grad * 1.01  # waits for it, before time passes
        total = grad.sum().view(1)
        spend((1 - WEIGHTS_SHARE) * seconds)

        def gradient() -> Tensor:
            spend(WEIGHTS_SHARE * seconds)
            return total

        return grad, submit_weight_grad(weight, gradient), None, None


class TimedLayers(nn.Module):
    """Layers of a residual attention and a residual mixture of experts.

    Args:
        num_layers: Number of layers.
        exchange: How experts exchange.
        seconds: What attention takes, and what the experts take, in either direction.
        spend: Lets them pass.
        seed: Seed of the weights.
    """

    def __init__(
        self, num_layers: int, exchange: Exchange, *, seconds: float, spend: Spend, seed: int
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seconds, self.spend = seconds, spend
        self.attention = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
        self.moe = nn.ModuleList(
            MoE(TopKRouter(WIDTH, EXPERTS, exchange.top_k), GroupedExperts(EXPERTS, WIDTH, HIDDEN))
            for _ in range(num_layers)
        )
        self.weights = nn.ParameterList(torch.zeros(1) for _ in range(2 * num_layers))
        ExpertParallel(dispatcher=exchange.dispatcher).apply(self, exchange.rows)
        for moe, weight in zip(self.moe, self.weights[num_layers:], strict=True):
            assert isinstance(moe, MoE)
            moe.experts.register_forward_hook(
                lambda _module, _args, y, weight=weight: self._busy(y, weight)
            )

    def forward(self, x: Tensor) -> Tensor:
        """[rows, WIDTH] to the same."""
        for attention, moe, weight in zip(
            self.attention, self.moe, self.weights[: len(self.moe)], strict=True
        ):
            x = x + self._busy(attention(x), weight)
            x = x + moe(x)[0]
        return x

    def _busy(self, x: Tensor, weight: Tensor) -> Tensor:
        busy: Any = _Busy
        y: Tensor = busy.apply(x, weight, self.seconds, self.spend)
        return y
