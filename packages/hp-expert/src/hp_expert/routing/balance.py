"""Losses that keep experts equally busy.

Shape symbols: B sequences, S positions, E experts, K experts per token.
"""

import torch
from torch import Tensor


def sequence_balance_loss(scores: Tensor, experts: Tensor, *, num_experts: int) -> Tensor:
    """How unequally each sequence uses the experts: 1 for equal use, more otherwise.

    For a sequence, the sum over experts of f_e * P_e, with f_e the share of its slots that went to
    expert e times E, and P_e the mean over its tokens of the expert's share of the scores
    ("DeepSeek-V3 Technical Report", arXiv:2412.19437, section 2.1.2). A sequence has one value
    whatever batch it is in, so a sum over sequences does not depend on microbatches or ranks.

    Args:
        scores: Scores of all experts, not negative [B, S, E].
        experts: The chosen experts, int64 [B, S, K].
        num_experts: E.

    Returns:
        One value per sequence [B], fp32 or wider; gradients flow through `scores` alone.

    Raises:
        ValueError: If the shapes do not fit each other.
    """
    if scores.ndim != 3 or scores.shape[-1] != num_experts:
        raise ValueError(
            f"scores ({tuple(scores.shape)}) must be [B, S, num_experts ({num_experts})]"
        )
    if experts.ndim != 3 or experts.shape[:2] != scores.shape[:2]:
        raise ValueError(
            f"experts ({tuple(experts.shape)}) must be [B, S, K] for scores ({tuple(scores.shape)})"
        )
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    chosen_BN = experts.flatten(1)
    counts_BE = scores.new_zeros(scores.shape[0], num_experts)
    counts_BE.scatter_add_(1, chosen_BN, torch.ones_like(chosen_BN, dtype=scores.dtype))
    f_BE = counts_BE * (num_experts / max(chosen_BN.shape[1], 1))
    tiny = torch.finfo(scores.dtype).tiny
    shares_BSE = scores / scores.sum(dim=-1, keepdim=True).clamp_min(tiny)
    p_BE = shares_BSE.sum(dim=1) / max(scores.shape[1], 1)
    return (f_BE * p_BE).sum(dim=1)
