"""Optimizers of a process, updates that none of them makes, and parameters that no call shows."""

import gc
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import Optimizer

from hp_verify.recording.digests import digest_of
from hp_verify.recording.slices import placed, whole


@dataclass(slots=True)
class Updates:
    """State of the updates of the weights in a process.

    Attributes:
        are_by_hand: Whether the job has no optimizer of torch; None: not known before a backward.
        weights: Parameters that may be updated.
        done: Optimizers that have made an update in this step, and the first parameter of each.
        num_made: Updates by optimizers since a scaler has begun one.
    """

    are_by_hand: bool | None = None
    weights: list[Tensor] = field(default_factory=list)
    done: set[tuple[int, int]] = field(default_factory=set)
    num_made: int = 0
    _then: list[list[float]] | None = None

    def are_made_by_hand(self) -> bool:
        """Tell whether weights have other values than when this was asked last."""
        if not self.are_by_hand:
            return False
        parts = [placed(weight)[0] for weight in self.weights]
        now = [digest_of(part, whole(part.shape)).sums.flatten().tolist() for part in parts]
        before, self._then = self._then, now
        return before is not None and before != now[: len(before)]


def updated(optimizer: Optimizer) -> list[Tensor]:
    """Return what an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def optimizers_here() -> list[Optimizer]:
    """Return all optimizers of this process, in the order in which they were made."""
    return [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]


def models_of(parameters: Collection[Tensor]) -> list[nn.Module]:
    """Return the outermost modules that have some of these parameters.

    Args:
        parameters: Parameters, of any models.
    """
    wanted = {id(parameter) for parameter in parameters}
    objects: list[nn.Module] = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    holders = [o for o in objects if any(id(p) in wanted for p in o.parameters())]
    inner = {id(m) for holder in holders for m in holder.modules() if m is not holder}
    return [holder for holder in holders if id(holder) not in inner]
