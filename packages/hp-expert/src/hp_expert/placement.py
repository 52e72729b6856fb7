"""Parameters that are part of a larger tensor.

A parameter may be a `DTensor`, so that checkpoints, FSDP2 and gradient norms know the whole. The
experts compute with the part that is here, and its gradient has the same placements: a rank's rows
are those of its experts, and it computes all of the gradient of the part it holds.
"""

from typing import overload

from torch import Tensor
from torch.distributed.tensor import DTensor


@overload
def local_part(parameter: Tensor) -> Tensor: ...
@overload
def local_part(parameter: None) -> None: ...
def local_part(parameter: Tensor | None) -> Tensor | None:
    """Return the part of a parameter that is here; not differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def placed_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return what is as large and placed as a parameter, from the part of it that is here."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
