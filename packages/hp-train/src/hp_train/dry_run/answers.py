"""Answers to host reads of a device that computes nothing; see `hp_platform.dry_device`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hp_expert import ExchangeRead, LocalRead
from hp_plan.costs.kernels import routed
from hp_plan.costs.routing import ALL_LAYERS, Skew
from hp_platform.threads import current_place
from hp_schedule.runtime import HeaderRead

SQUARES = "squared gradient norms"
"""What `hp_trainer.training` calls them, which decide whether gradients are clipped."""

_LARGE = 1e12


@dataclass(frozen=True, slots=True)
class Answers:
    """Numbers of a model of the routing; gradients that are clipped; zeros for all else.

    Attributes:
        skew: Model of the routing.
    """

    skew: Skew

    def __call__(self, copy: Tensor, purpose: object) -> Tensor:
        """See `hp_platform.dry_device.Answer`."""
        if isinstance(purpose, ExchangeRead | LocalRead):
            return routed(purpose, copy, self.skew, layer=_layer())
        if isinstance(purpose, HeaderRead):
            return purpose.numbers(like=copy)
        if purpose == SQUARES:
            return torch.full_like(copy, _LARGE)
        return copy


def _layer() -> str:
    """Name of the layer that this thread computes."""
    words = reversed(current_place().split(", "))
    return next((word for word in words if word.startswith(("layers.", "mtp."))), ALL_LAYERS)


def evenly(copy: Tensor, purpose: object) -> Tensor:
    """Answer for a script that uses our experts: every expert gets as much as any other."""
    return Answers(Skew("uniform"))(copy, purpose)
