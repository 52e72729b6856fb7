"""What one process computes of a model.

Shape symbols: B sequences, S positions, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Trained:
    """What one process computes.

    Attributes:
        logits: Logits of the first step, float64 [B, S, V].
        losses: Mean cross-entropy of each step.
        norms: Norm of all gradients of each step.
        gradients: Gradients of each step, before they are clipped, by the names of transformers.
        weights: Weights after the last step.
    """

    logits: Tensor
    losses: list[float]
    norms: list[float]
    gradients: Sequence[Mapping[str, Tensor]]
    weights: Mapping[str, Tensor]
