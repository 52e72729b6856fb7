"""The load of experts, the number of slots that went to each, and routing by kernels, which count.

Kernels route in one pass over the logits, and one for their gradient.

Note [Counted in backward]. A router counts its choices when the gradient of its weights is
computed. That is once per token in training, however often its forward runs: with either kind of
activation checkpointing, and in schedules that first run a forward without gradients. A forward
without a backward is not counted, such as in evaluation.

`DistributedDataParallel` copies the buffers of rank 0 to all others before each forward, so the
counters of routers are plain tensors. Checkpoints do not contain them, but they are written after
an optimizer step, when the counters were taken and are zero.

Shape symbols: T tokens, E experts, K experts per token, B sequences, N slots of a sequence.
"""

import threading
from contextlib import nullcontext
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_expert.kernels import triton_routing
from hp_expert.kernels.triton_routing import Rule
from hp_platform.autograd import Context

# One lock for all counters: it is held for microseconds, and a module with a lock is not copyable.
_lock = threading.Lock()


def count_in_backward(
    weights: Tensor, experts: Tensor, total: Tensor, *, all_exist: bool = False
) -> Tensor:
    """Return the weights; count the experts when the gradient of the weights is computed.

    Args:
        weights: Weight of each chosen expert, fp32 or wider [T, K].
        experts: The chosen experts, int64 [T, K]; those outside [0, E) are not counted.
        total: Counter, int64 [E].
        all_exist: Whether all experts are in [0, E); one outside then raises, on CUDA as an
            assertion of the device.
    """
    slots = None
    if not all_exist:
        slots = (experts >= 0) & (experts < total.numel())
        experts = experts.clamp(0, total.numel() - 1)
    marked: Tensor = _CountInBackward.apply(weights, experts, slots, total)
    return marked


def count_by_sequence(experts_BN: Tensor, *, num_experts: int) -> Tensor:
    """Count the slots of each expert in [0, E): [B, N] to int64 [B, E]."""
    is_there = (experts_BN >= 0) & (experts_BN < num_experts)
    bucket_BN = experts_BN.where(is_there, num_experts)
    counts = bucket_BN.new_zeros(experts_BN.shape[0], num_experts + 1)
    return counts.scatter_add_(1, bucket_BN, torch.ones_like(bucket_BN))[:, :num_experts]


def take(total: Tensor) -> Tensor:
    """Return a copy of a counter, and set the counter to zero."""
    with _lock:
        taken = total.clone()
        total.zero_()
    return taken


class _CountContext(Protocol):
    experts: Tensor
    slots: Tensor | None
    total: Tensor


class _CountInBackward(torch.autograd.Function):
    """See Note [Counted in backward]."""

    @staticmethod
    def forward(
        ctx: _CountContext, weights: Tensor, experts: Tensor, slots: Tensor | None, total: Tensor
    ) -> Tensor:
        ctx.experts, ctx.slots, ctx.total = experts.view(-1), slots, total
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: _CountContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        total, experts, slots = ctx.total, ctx.experts, ctx.slots
        compiles = torch.compiler.is_compiling()
        # Atomic on CUDA, where the lock does not keep two streams apart.
        with nullcontext() if compiles else _lock:
            if slots is None and not compiles:
                total.scatter_(0, experts, 1, reduce="add")
                return grad, None, None, None
            # Inductor expands this one only to the number of experts, not that of slots.
            one = total.new_ones(1) if slots is None else slots.view(-1).to(total.dtype)
            total.scatter_add_(0, experts, one.expand_as(experts))
        return grad, None, None, None


def route(
    logits_TE: Tensor,
    rule: Rule,
    *,
    bias: Tensor | None,
    experts_TK: Tensor | None,
    load: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Score, choose and weigh; see `triton_routing.route`.

    Differentiable once.

    Args:
        logits_TE: fp32 or fp64 [T, E].
        rule: How scores become weights.
        bias: Bias added to the scores for the choice only [E]; None: nothing.
        experts_TK: Given experts, int64 [T, K]; None: the best ones.
        load: Counter of the slots of each expert, int64 [E], to which backward adds; None: slots
            are not counted. See Note [Counted in backward].

    Returns:
        Scores [T, E], weights [T, K] and experts [T, K].
    """
    scores, weights, chosen = _Route.apply(logits_TE, rule, bias, experts_TK, load)
    return scores, weights, chosen if experts_TK is None else experts_TK


class _RouteContext(Context, Protocol):
    rule: Rule
    load: Tensor | None
    saved_tensors: tuple[Tensor, Tensor]


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # autograd passes by position
        ctx: _RouteContext,
        logits: Tensor,
        rule: Rule,
        bias: Tensor | None,
        experts: Tensor | None,
        load: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scores, weights, chosen = triton_routing.route(logits, rule, bias=bias, experts_TK=experts)
        ctx.rule, ctx.load = rule, load
        ctx.save_for_backward(scores, chosen)
        if experts is not None:
            chosen = chosen.new_empty(0)  # an input that is returned would be another tensor
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)
        return scores, weights, chosen

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _RouteContext,
        grad_scores: Tensor | None,
        grad_weights: Tensor | None,
        _experts: Tensor | None,
    ) -> tuple[Tensor, None, None, None, None]:
        scores, experts = ctx.saved_tensors
        grad = triton_routing.route_backward(
            scores,
            experts,
            ctx.rule,
            grad_weights=grad_weights,
            grad_scores=grad_scores,
            load=ctx.load,
        )
        return grad, None, None, None, None
