"""How many slots each expert has, on the device and on the host.

Shape symbols: T tokens, K experts per token, S = T * K slots, E experts.
"""

from typing import Any

import torch
from torch import Tensor


def read_host(numbers: Tensor) -> list[Any]:
    """Wait for the device and read numbers: the only place of a layer that does."""
    values: list[Any] = numbers.tolist()
    return values


def count_slots(experts_TK: Tensor, num_experts: int) -> Tensor:
    """Count the slots of each expert, and after them the slots of no expert: int64 [E + 1]."""
    expert_S = experts_TK.reshape(-1)
    is_valid = (expert_S >= 0) & (expert_S < num_experts)
    bucket_S = expert_S.where(is_valid, num_experts).to(torch.int64)
    counts = bucket_S.new_zeros(num_experts + 1)
    return counts.scatter_add_(0, bucket_S, torch.ones_like(bucket_S))


def invalid_experts(num_invalid: int, num_experts: int) -> ValueError:
    """Say that slots have experts that do not exist."""
    return ValueError(
        f"experts must be in [0, num_experts ({num_experts})), but {num_invalid} are not"
    )
