"""Routing by kernels: one pass over the logits, and one for their gradient.

Shape symbols: T tokens, E experts, K experts per token.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_expert.functions import Context
from hp_expert.kernels import triton_routing
from hp_expert.kernels.triton_routing import Rule


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
