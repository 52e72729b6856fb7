"""The choice of experts by their scores: the best, of the best groups, as far as they have room.

Shape symbols: T tokens in sequences of S, K experts per token, E experts, N = T * K slots, G groups
of M = E / G experts.
"""

import math
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

GroupScore = Literal["max", "top2_sum"]
DropPolicy = Literal["score", "position"]


@torch.no_grad()
def top_k_experts(scores_TE: Tensor, top_k: int, *, is_softmax: bool = False) -> Tensor:
    """Return the indices of the highest scores, best first; the lower index wins ties.

    `torch.topk` breaks ties arbitrarily, and a stable sort takes twice the time of K maxima, each
    of which finds the first of equal scores. The bits of fp32 numbers that are not negative are
    whole numbers in the same order; with the index in lower bits no two keys are equal, so that
    `torch.topk` has no ties.

    Args:
        scores_TE: Scores, finite, or -inf for no more than E - K experts [T, E].
        top_k: Number of experts per token, K.
        is_softmax: Whether scores are a softmax: none is negative, and NaN are all scores of a
            token or none.

    Returns:
        Indices, int64 [T, K].
    """
    if is_softmax and top_k > 1 and scores_TE.dtype == torch.float32:
        bits_TE = scores_TE.view(torch.int32)
        last_first_E = torch.arange(scores_TE.shape[1] - 1, -1, -1, device=scores_TE.device)
        return torch.add(last_first_E, bits_TE, alpha=1 << 32).topk(top_k, dim=-1).indices
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
    """Return the scores, -inf outside of each token's best groups; the lower group wins ties.

    Groups are equal runs of experts. The score of a group is that of its best expert ("max",
    DeepSeek-V2, arXiv:2405.04434, section 2.2.2) or the sum of its best two ("top2_sum",
    DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

    Args:
        scores_TE: Finite scores [T, E].
        num_groups: Number of groups, G, a divisor of E.
        num_limited_groups: Number of groups that a token keeps.
        group_score: Score of a group.

    Returns:
        Scores [T, E], of the dtype of `scores_TE`.
    """
    scores_TGM = scores_TE.view(-1, num_groups, scores_TE.shape[-1] // num_groups)
    if group_score == "max":
        groups_TG = scores_TGM.amax(dim=-1)
    else:
        groups_TG = scores_TGM.topk(2, dim=-1).values.sum(dim=-1)
    best = top_k_experts(groups_TG, num_limited_groups)
    is_out_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter_(-1, best, value=False)
    return scores_TGM.masked_fill(is_out_TG.unsqueeze(-1), -math.inf).flatten(-2)


def expert_capacity(factor: float, *, num_slots: int, num_experts: int) -> int:
    """Return ceil(factor * num_slots / num_experts) for the decimal digits of the factor.

    In floating point, 1.1 * 10 is a bit more than 11.
    """
    numerator, denominator = Fraction(str(factor)).as_integer_ratio()
    return -(-numerator * num_slots // (denominator * num_experts))


@torch.no_grad()
def is_within_capacity(
    experts_TK: Tensor,
    weights_TK: Tensor | None,
    *,
    capacity: int,
    sequence_length: int,
    num_experts: int,
) -> Tensor:
    """Return a mask of the slots for which the experts have room.

    Of the slots of one sequence, an expert takes those with the highest weights, of equal weights
    those of earlier tokens. The result for a sequence does not depend on other sequences, and so
    not on batches or ranks.

    Args:
        experts_TK: Expert of each slot, int64 in [0, E), no expert twice in a row [T, K].
        weights_TK: Weights by which experts take slots [T, K]; None: earlier tokens come first.
        capacity: Number of slots that an expert takes of one sequence.
        sequence_length: Length of a sequence, S, a divisor of T.
        num_experts: Number of experts, E.

    Returns:
        Mask, bool [T, K].
    """
    num_tokens, top_k = experts_TK.shape
    slots_per_sequence = max(sequence_length, 1) * top_k
    slot_N = torch.arange(num_tokens * top_k, device=experts_TK.device)
    sequence_N = slot_N.div(slots_per_sequence, rounding_mode="floor")
    bucket_N = sequence_N * num_experts + experts_TK.reshape(-1)
    if weights_TK is None:
        order_N = bucket_N.argsort(stable=True)
    else:
        best_first_N = weights_TK.reshape(-1).argsort(descending=True, stable=True)
        order_N = best_first_N[bucket_N[best_first_N].argsort(stable=True)]
    num_buckets = num_tokens * top_k // slots_per_sequence * num_experts
    counts = bucket_N.new_zeros(num_buckets).scatter_add_(0, bucket_N, torch.ones_like(bucket_N))
    first = counts.cumsum(0) - counts
    has_room_N = slot_N - first[bucket_N[order_N]] < capacity
    return torch.empty_like(has_room_N).scatter_(0, order_N, has_room_N).view_as(experts_TK)
