"""Scores of the chosen experts divided by their sum, and the gradient of that in few operators.

Softmax or sigmoid, what a token's weights w_k = s_k / sum(s) are of its logits is a softmax over
the chosen experts, of the logits or of the logarithms of the sigmoids. So the gradient of the
logits, which are all that w depends on, is w_k * (dw_k - <dw, w>), for sigmoids times 1 - s_k: no
gradient of the scores is computed on the way.

Shape symbols: T tokens, E experts, K experts per token.
"""

from typing import Any

import torch
from torch import Tensor

from hp_expert.once import differentiable_once


def normalized(
    logits_TE: Tensor,
    scores_TE: Tensor,
    index_TK: Tensor,
    *,
    sigmoid: bool,
    absent_TK: Tensor | None = None,
    best: bool = False,
) -> Tensor:
    """Weights that add up to one, [T, K]. Differentiable once, with respect to the logits.

    Args:
        logits_TE: Logits, fp32 or wider [T, E].
        scores_TE: Their softmax or sigmoid [T, E].
        index_TK: Chosen experts, int64 [T, K].
        sigmoid: Whether scores are sigmoids.
        absent_TK: Which of them count nothing, bool [T, K]; None: all count.
        best: Whether a token's best expert is among them, as far as scores alone decide: of a
            softmax that one has 1/E at least, so that the sum needs no look.
    """
    scores_TE = scores_TE.detach()
    weights: Tensor = _Normalized.apply(
        logits_TE, scores_TE, index_TK, absent_TK, sigmoid, best and not sigmoid
    )
    return weights


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917  # autograd passes by position
        ctx: Any,
        logits: Tensor,
        scores: Tensor,
        index: Tensor,
        absent: Tensor | None,
        sigmoid: bool,
        is_sure: bool,
    ) -> Tensor:
        chosen = scores.gather(1, index)
        if absent is not None:
            chosen = chosen.masked_fill(absent, 0.0)
        total = chosen.sum(dim=-1, keepdim=True)
        if not is_sure:  # all K scores may have been rounded to zero
            total = total.clamp_min(torch.finfo(chosen.dtype).tiny)
        weights = chosen / total
        ctx.save_for_backward(weights, index, chosen if sigmoid else None)
        ctx.shape = logits.shape
        return weights

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, index, chosen = ctx.saved_tensors
        grad = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)  # noqa: SLF001
        if chosen is not None:
            grad = torch.addcmul(grad, grad, chosen, value=-1)
        return (grad.new_zeros(ctx.shape).scatter_add_(1, index, grad), *[None] * 5)
