"""Parameters that are part of a larger tensor.

A parameter may be a `DTensor`, so that checkpoints, FSDP2 and gradient norms know the whole tensor.
The experts compute with the local part, whose gradient has the same placements: a rank receives all
rows of its experts, and so computes the whole gradient of its part.
"""

from typing import overload

from torch import Tensor
from torch.distributed.tensor import DTensor


@overload
def local_part(parameter: Tensor) -> Tensor: ...
@overload
def local_part(parameter: None) -> None: ...
def local_part(parameter: Tensor | None) -> Tensor | None:
    """Return the local part of a parameter; not differentiable."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def placed_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return a tensor of the shape and placements of a parameter, from its local part."""
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
