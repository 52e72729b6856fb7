"""Routing in one pass over the logits, and its gradient in another.

| kernel | reads | writes |
|---|---|---|
| `route` | 4 T * E, experts 8 T * K if they are given | 4 T * E + 12 T * K |
| `route_backward` | 4 T * E + 12 T * K, 4 T * E more with `grad_scores` | 4 T * E |

The computation of `TopKRouter` by torch is the reference of both.

Shape symbols: T tokens, E experts, K experts per token.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hp_expert.kernels.launching import launch_kernel, power_from

_launch = partial(launch_kernel, "triton_routing_kernels")
_MOST_EXPERTS = 2048
_TILE = 2048  # numbers of a program's tokens


@dataclass(frozen=True, slots=True)
class Rule:
    """The settings by which scores become a choice of experts and their weights.

    Attributes:
        top_k: Number of experts per token, K.
        sigmoid: Whether scores are sigmoids; else they are a softmax.
        normalize: Whether weights are divided by their sum.
        scaling_factor: Factor of all weights, applied last.
        num_groups: Number of groups, equal runs of experts. Where a token's experts are limited to
            some groups, this and the number of experts must be powers of two.
        num_limited_groups: Number of groups that may have experts of a token.
        top2_sum: Whether the score of a group is the sum of its best two; else it is the best one.
    """

    top_k: int
    sigmoid: bool
    normalize: bool
    scaling_factor: float
    num_groups: int = 1
    num_limited_groups: int = 1
    top2_sum: bool = False

    def fits(self, num_experts: int) -> bool:
        """Tell whether the kernels take this number of experts, in these groups."""
        if self.num_limited_groups == self.num_groups:
            return num_experts <= _MOST_EXPERTS
        powers = all(n & (n - 1) == 0 for n in (num_experts, self.num_groups))
        return powers and num_experts <= _MOST_EXPERTS


def route(
    logits_TE: Tensor, rule: Rule, *, bias: Tensor | None, experts_TK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Score the experts of each token, choose the best, and weigh them.

    Args:
        logits_TE: fp32 or fp64 [T, E].
        rule: Settings of the router.
        bias: Bias added to the scores for the choice only [E]; None: nothing.
        experts_TK: Given experts, int64 [T, K]; one that does not exist gets the
            weight 0. None: the best ones, of equal scores the lower index.

    Returns:
        Scores [T, E], weights [T, K] and experts, int64 [T, K].
    """
    logits, (T, E), K = logits_TE.contiguous(), logits_TE.shape, rule.top_k
    scores, weights = torch.empty_like(logits), logits.new_empty(T, K)
    if experts_TK is not None:
        experts_TK = experts_TK.contiguous()
    experts = logits.new_empty(T, K, dtype=torch.int64) if experts_TK is None else experts_TK
    sizes, grid = _sizes(E, T)
    _launch(
        "route",
        grid,
        made=(scores, weights, experts),
        given=(logits, bias, experts_TK),
        varying=(T,),
        writes=None if experts_TK is None else (scores, weights),
        constants={
            **sizes,
            "BLOCK_K": power_from(K),
            "GROUPS": rule.num_groups,
            "LIMITED": rule.num_limited_groups,
            "TOP2": rule.top2_sum,
            **_constants(rule, logits),
        },
    )
    return scores, weights, experts


def route_backward(
    scores_TE: Tensor,
    experts_TK: Tensor,
    rule: Rule,
    *,
    grad_weights: Tensor | None,
    grad_scores: Tensor | None,
    load: Tensor | None,
) -> Tensor:
    """Return the gradient of the logits [T, E].

    Args:
        scores_TE: Scores that `route` returned.
        experts_TK: Experts of its weights.
        rule: Settings that `route` was given.
        grad_weights: Gradient of the weights [T, K]; None: zero.
        grad_scores: Gradient of the scores [T, E] besides that through the weights; None: zero.
        load: Counter to which the slots of each expert are added, int64 [E]; None: not counted.
    """
    grad_logits, (T, E) = torch.empty_like(scores_TE), scores_TE.shape
    sizes, grid = _sizes(E, T)
    grads = [None if g is None else g.contiguous() for g in (grad_weights, grad_scores)]
    _launch(
        "route_backward",
        grid,
        made=(grad_logits, load),
        given=(*grads, scores_TE, experts_TK),
        varying=(T,),
        updated=(load,),
        # With four warps some registers would spill.
        constants={**sizes, **_constants(rule, scores_TE, num_warps=8)},
    )
    return grad_logits


def _sizes(num_experts: int, num_tokens: int) -> tuple[dict[str, int], tuple[int]]:
    block = power_from(num_experts)
    tokens = max(1, _TILE // block)
    return {"E": num_experts, "BLOCK_E": block, "BLOCK_T": tokens}, (-(-num_tokens // tokens),)


def _constants(rule: Rule, like: Tensor, *, num_warps: int = 4) -> dict[str, float]:
    return {
        "K": rule.top_k,
        "SIGMOID": rule.sigmoid,
        "NORMALIZE": rule.normalize,
        "SCALE": float(rule.scaling_factor),
        "TINY": torch.finfo(like.dtype).tiny,
        "num_warps": num_warps,
        "enable_fp_fusion": False,
    }
