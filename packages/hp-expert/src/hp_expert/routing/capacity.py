"""The slots that an expert has room for.

Shape symbols: T tokens in sequences of S, K experts per token, E experts, N = T * K slots.
"""

from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

DropPolicy = Literal["score", "position"]


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
