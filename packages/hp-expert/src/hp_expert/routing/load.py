"""How many slots went to each expert.

Note [Counted in backward]. A router counts what it decided when the gradient of its weights is
computed. That is once per token that is trained on, however often its forward runs: with either
kind of activation checkpointing, and in schedules that run a forward without gradients first. What
has no backward is not counted: evaluation, with gradients disabled or not asked for.

Note [No buffers]. `DistributedDataParallel` copies the buffers of rank 0 to all others before each
forward, so the counters of routers are plain tensors. A checkpoint lacks them, but they are zero
after every optimizer step that takes them, which is when checkpoints are written.

Shape symbols: T tokens, E experts, K experts per token, B sequences, N slots of a sequence.
"""

import threading
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

# One for all counters: it is held for microseconds, and a lock of a module could not be copied.
_lock = threading.Lock()


def count_in_backward(
    weights: Tensor, experts: Tensor, total: Tensor, *, all_exist: bool = False
) -> Tensor:
    """Return the weights; count the experts when their gradient is computed.

    Args:
        weights: Weight of each chosen expert, fp32 or wider [T, K].
        experts: The chosen experts, int64 [T, K]; those outside [0, E) are not counted.
        total: The counter, int64 [E].
        all_exist: Whether none is outside; one that is nevertheless raises, on CUDA on the device.
    """
    slots = None
    if not all_exist:
        slots = (experts >= 0) & (experts < total.numel())
        experts = experts.clamp(0, total.numel() - 1)
    marked: Tensor = _CountInBackward.apply(weights, experts, slots, total)
    return marked


def count_by_sequence(experts_BN: Tensor, *, num_experts: int) -> Tensor:
    """Count the slots of each expert: [B, N] to int64 [B, E]; -1 and such are not counted."""
    is_there = (experts_BN >= 0) & (experts_BN < num_experts)
    bucket_BN = experts_BN.where(is_there, num_experts)
    counts = bucket_BN.new_zeros(experts_BN.shape[0], num_experts + 1)
    return counts.scatter_add_(1, bucket_BN, torch.ones_like(bucket_BN))[:, :num_experts]


def take(total: Tensor) -> Tensor:
    """Return a copy of a counter and set it to zero."""
    with _lock:
        taken = total.clone()
        total.zero_()
    return taken


class _CountInBackward(torch.autograd.Function):
    """See Note [Counted in backward]."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, experts: Tensor, slots: Tensor | None, total: Tensor
    ) -> Tensor:
        ctx.experts, ctx.slots, ctx.total = experts.view(-1), slots, total
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        total: Tensor = ctx.total
        experts: Tensor = ctx.experts
        slots: Tensor | None = ctx.slots
        compiles = torch.compiler.is_compiling()
        # Atomic on CUDA, where the lock does not keep two streams apart.
        with nullcontext() if compiles else _lock:
            if slots is None and not compiles:
                total.scatter_(0, experts, 1, reduce="add")
                return grad, None, None, None
            # Inductor makes as many ones of that one as there are experts, not slots.
            one = total.new_ones(1) if slots is None else slots.view(-1).to(total.dtype)
            total.scatter_add_(0, experts, one.expand_as(experts))
        return grad, None, None, None
