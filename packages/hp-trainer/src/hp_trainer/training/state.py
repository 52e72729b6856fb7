"""What a checkpoint holds: parameters and Adam moments by global name, and a few numbers.

What is cut over ranks is offered as DTensors, everything else as plain tensors, so that a
checkpoint says nothing of the layout it was saved under.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hp_trainer.layout.mesh import Mesh
from hp_trainer.model.parameters import Parameter
from hp_trainer.model.stage import Stage
from hp_trainer.training.optimizer import MOMENTS


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
        optimizer: Materialised; see :func:`hp_trainer.training.optimizer.build_optimizer`.
        mesh: Mesh of the run.

    Returns:
        ``model.<name>``, ``optimizer.exp_avg.<name>`` and ``optimizer.exp_avg_sq.<name>``.
    """
    tensors = {}
    for parameter in parameters:
        state = optimizer.state[parameter.local]
        named = {"model": parameter.local}
        named |= {f"optimizer.{moment}": state[moment] for moment in MOMENTS}
        for prefix, tensor in named.items():
            tensors[f"{prefix}.{parameter.name}"] = parameter.as_whole(tensor, mesh)
    return tensors


def checkpoint_buffers(stages: Iterable[Stage]) -> dict[str, Tensor]:
    """Say what stages keep besides parameters, under global names: correction biases of routers."""
    return {
        f"model.{name}": buffer for stage in stages for name, buffer in stage.kept_buffers.items()
    }
