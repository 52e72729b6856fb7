"""Parameters that no call of a module shows: of models in compiled functions, or bare tensors."""

import gc
from collections.abc import Collection

from torch import Tensor, nn
from torch.optim import Optimizer


def optimizers_here() -> list[Optimizer]:
    """All optimizers of this process, in the order in which they were made."""
    return [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]


def models_of(parameters: Collection[Tensor]) -> list[nn.Module]:
    """The outermost modules that have some of these parameters.

    Args:
        parameters: Parameters, of any models.
    """
    wanted = {id(parameter) for parameter in parameters}
    objects: list[nn.Module] = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    holders = [o for o in objects if any(id(p) in wanted for p in o.parameters())]
    inner = {id(m) for holder in holders for m in holder.modules() if m is not holder}
    return [holder for holder in holders if id(holder) not in inner]
