"""Which experts a token goes to, and the loss that keeps them equally busy.

Shape symbols: B sequences, S positions, T tokens, E experts, K experts per token, D model width.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hp_platform import linear

ScoreFunction = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """The experts of each token. All floating tensors are fp32 or wider and differentiable.

    Attributes:
        weights: What each chosen expert's output counts, [T, K].
        experts: The chosen experts, best first, int64 [T, K].
        scores: Scores of all experts, each in [0, 1], [T, E].
    """

    weights: Tensor
    experts: Tensor
    scores: Tensor


class TopKRouter(nn.Module):
    """Sends each token to the experts with the K highest scores.

    Of equal scores the lower expert index wins, on every device. Logits are computed in fp32 or
    wider, autocast or not: in bf16 a few percent of tokens would change experts.

    Args:
        dim: D.
        num_experts: E.
        top_k: K.
        score_function: "softmax" over the experts, or "sigmoid" of each (DeepSeek-V3,
            arXiv:2412.19437).
        normalize: Divide the chosen scores by their sum.
        device: Of the weight.
        dtype: Of the weight.

    Raises:
        ValueError: If `top_k` is not in 1 .. `num_experts`, or the score function is unknown.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        *,
        score_function: ScoreFunction = "softmax",
        normalize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k ({top_k}) must be in [1, num_experts ({num_experts})]")
        if score_function not in ("softmax", "sigmoid"):
            raise ValueError(f"score_function ({score_function}) must be softmax or sigmoid")
        self.num_experts, self.top_k = num_experts, top_k
        self.score_function, self.normalize = score_function, normalize
        self.weight = nn.Parameter(torch.empty(num_experts, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as `torch.nn.Linear` does."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_TD: Tensor) -> Routing:
        """Route tokens.

        Args:
            x_TD: Any floating dtype [T, D].
        """
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            return self.route(linear(x_TD.to(wide), self.weight.to(wide)))

    def route(self, logits_TE: Tensor, *, replay: Tensor | None = None) -> Routing:
        """Route by logits.

        Args:
            logits_TE: fp32 or wider [T, E].
            replay: Experts to take instead of the best ones, int64 [T, K]; their weights follow
                the logits all the same, and so do the gradients.
        """
        softmax = self.score_function == "softmax"
        scores_TE = logits_TE.softmax(dim=-1) if softmax else logits_TE.sigmoid()
        experts_TK = top_k_experts(scores_TE, self.top_k) if replay is None else replay
        weights_TK = scores_TE.gather(1, experts_TK)
        if self.normalize:
            # All K sigmoids may round to zero.
            tiny = torch.finfo(weights_TK.dtype).tiny
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp_min(tiny)
        return Routing(weights_TK, experts_TK, scores_TE)

    def extra_repr(self) -> str:
        """Show what the router does."""
        experts, dim = self.weight.shape
        return (
            f"dim={dim}, num_experts={experts}, top_k={self.top_k}, "
            f"score_function={self.score_function}, normalize={self.normalize}"
        )


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
