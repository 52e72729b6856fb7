"""The best experts by score.

Shape symbols: T tokens, E experts, K experts per token.
"""

import math

import torch
from torch import Tensor


@torch.no_grad()
def top_k_experts(scores_TE: Tensor, top_k: int) -> Tensor:
    """Return the indices of the highest scores, best first; the lower index wins ties.

    `torch.topk` breaks ties arbitrarily, and a stable sort takes twice the time of K maxima, whose
    index is that of the first one.

    Args:
        scores_TE: Finite [T, E].
        top_k: K.

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
