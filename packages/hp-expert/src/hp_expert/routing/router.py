"""The router: scores of all experts for each token, and the best of them.

Shape symbols: T tokens, E experts, K experts per token, D model width.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from hp_expert.routing.selection import top_k_experts
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
