"""The best experts by score.

Shape symbols: T tokens, E experts, K experts per token, G groups of experts, M = E / G.
"""

import math
from typing import Literal

import torch
from torch import Tensor

GroupScore = Literal["max", "top2_sum"]


@torch.no_grad()
def top_k_experts(scores_TE: Tensor, top_k: int) -> Tensor:
    """Return the indices of the highest scores, best first; the lower index wins ties.

    `torch.topk` breaks ties arbitrarily, and a stable sort takes twice the time of K maxima, whose
    index is that of the first one.

    Args:
        scores_TE: Finite, or -inf for no more than E - K experts [T, E].
        top_k: Number of experts per token, K.

    Returns:
        int64 [T, K].
    """
    left_TE = scores_TE.clone() if top_k > 1 else scores_TE
    chosen = []
    for choice in range(top_k):
        best_T1 = left_TE.max(dim=-1, keepdim=True).indices
        chosen.append(best_T1)
        if choice < top_k - 1:
            left_TE.scatter_(-1, best_T1, -math.inf)
    return torch.cat(chosen, dim=-1)


@torch.no_grad()
def limit_to_groups(
    scores_TE: Tensor, *, num_groups: int, num_limited_groups: int, group_score: GroupScore
) -> Tensor:
    """Leave each token the experts of its best groups; of equal groups the lower index wins.

    Groups are equal runs of experts. A group counts as much as its best expert ("max", DeepSeek-V2,
    arXiv:2405.04434, section 2.2.2) or its best two together ("top2_sum", DeepSeek-V3,
    arXiv:2412.19437, section 2.1.2).

    Args:
        scores_TE: Finite [T, E].
        num_groups: G, a divisor of E.
        num_limited_groups: How many groups a token keeps.
        group_score: What a group counts.

    Returns:
        The scores, -inf for the experts of all other groups [T, E].
    """
    scores_TGM = scores_TE.view(-1, num_groups, scores_TE.shape[-1] // num_groups)
    if group_score == "max":
        groups_TG = scores_TGM.amax(dim=-1)
    else:
        groups_TG = scores_TGM.topk(2, dim=-1).values.sum(dim=-1)
    best = top_k_experts(groups_TG, num_limited_groups)
    is_out_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(-1, best, value=False)
    return scores_TGM.masked_fill(is_out_TG.unsqueeze(-1), -math.inf).flatten(-2)
