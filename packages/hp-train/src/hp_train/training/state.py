"""What a checkpoint holds: parameters and Adam moments by global name, and a few numbers.

What is cut over ranks is offered as DTensors, everything else as plain tensors, so that a
checkpoint says nothing of the layout it was saved under.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hp_train.layout.mesh import Mesh
from hp_train.model.parameters import Parameter

_MOMENTS = ("exp_avg", "exp_avg_sq")


def materialize_optimizer(optimizer: torch.optim.AdamW) -> None:
    """Give every parameter its Adam state now instead of at the first step.

    A resumed run loads into the very tensors the optimizer will use.
    """
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            state = optimizer.state[tensor]
            if not state:
                # Beside the parameter: a fused update on a GPU takes nothing from the host.
                state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                for moment in _MOMENTS:
                    state[moment] = torch.zeros_like(tensor, memory_format=torch.preserve_format)


def set_optimizer_steps(optimizer: torch.optim.AdamW, steps: int) -> None:
    """Set how many updates the optimizer counts as done: what its bias correction depends on."""
    for state in optimizer.state.values():
        state["step"].fill_(steps)


def checkpoint_tensors(
    parameters: Sequence[Parameter], optimizer: torch.optim.AdamW, mesh: Mesh
) -> dict[str, Tensor]:
    """This rank's tensors under their global names. They share memory with the live state.

    Args:
        parameters: This rank's.
        optimizer: Materialised; see :func:`materialize_optimizer`.
        mesh: Mesh of the run.

    Returns:
        ``model.<name>``, ``optimizer.exp_avg.<name>`` and ``optimizer.exp_avg_sq.<name>``.
    """
    tensors = {}
    for parameter in parameters:
        state = optimizer.state[parameter.local]
        named = {"model": parameter.local}
        named |= {f"optimizer.{moment}": state[moment] for moment in _MOMENTS}
        for prefix, tensor in named.items():
            tensors[f"{prefix}.{parameter.name}"] = parameter.as_whole(tensor, mesh)
    return tensors


def checkpoint_buffers(stages: Iterable[nn.Module]) -> dict[str, Tensor]:
    """What stages keep besides parameters, under global names: correction biases of routers."""
    return {f"model.{name}": buffer for stage in stages for name, buffer in stage.named_buffers()}
