"""Values of stored tensors from values of ours, and back; see `hp_train.hugging_face.plan`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from hp_train.hugging_face.plan import Stored


def to_theirs(stored: Stored, values: Sequence[Tensor]) -> Tensor:
    """Values of a stored tensor from the same box of each of its parts."""
    turned = [v.mT if v.ndim == 3 else v for v in values]
    if stored.arrangement == "interleaved":
        return torch.stack(turned, dim=-1).flatten(-2)
    return turned[0] if stored.arrangement == "transposed" else values[0]


def to_ours(stored: Stored, part: int, values: Tensor) -> Tensor:
    """Values of one part from those of a stored tensor, at the place that `theirs_of` gives."""
    if stored.arrangement == "interleaved":
        values = values.unflatten(-1, (-1, 2))[..., part]
    if stored.arrangement in ("interleaved", "transposed") and values.ndim == 3:
        return values.mT
    return values
