"""The state that a checkpoint holds: parameters and Adam moments by global name, and a position.

What is cut over ranks is offered as DTensors, everything else as plain tensors, so that a
checkpoint says nothing of the layout it was saved under.

A checkpoint whose hashes fit may still be one that somebody wrote by hand, so its position is not
taken as it comes: a type, a negative number or one that no run can reach is refused by name.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from hp_base.errors import CheckpointError
from hp_checkpoint.runs import Loaded
from hp_trainer.config import LARGEST
from hp_trainer.layout.mesh import Mesh
from hp_trainer.model.parameters import Parameter
from hp_trainer.model.stage import Stage
from hp_trainer.training.optimizer import MOMENTS

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """The position of a run: what it resumes from, besides tensors.

    Attributes:
        step: Updates done, those that were skipped included.
        next_sequence: Global index of the first sequence that was not read.
        skipped: Steps that changed nothing.
        skipped_in_a_row: Number of skipped steps in a row at the end.
        data: Digest of the tokens; None: not known, as the checkpoint was imported.
    """

    step: _Count
    next_sequence: _Count
    data: str | None
    skipped: _Count = 0
    skipped_in_a_row: _Count = 0

    @classmethod
    def of(cls, loaded: Loaded) -> "Position":
        """Return the position of a checkpoint.

        Raises:
            CheckpointError: Naming what is wrong with it.
        """
        try:
            position = msgspec.convert(loaded.extra, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{loaded.path}: extra: {error}") from None
        if problem := position._problem(loaded.step):  # noqa: SLF001 - of this class
            raise CheckpointError(f"{loaded.path}: extra: {problem}")
        return position

    def _problem(self, step: int) -> str:
        if self.step != step:
            return f"step ({self.step}) must equal that of the manifest ({step})"
        if self.skipped > self.step:
            return f"skipped ({self.skipped}) must be at most step ({self.step})"
        if self.skipped_in_a_row > self.skipped:
            return (
                f"skipped_in_a_row ({self.skipped_in_a_row}) must be at most skipped "
                f"({self.skipped})"
            )
        most = self.step * LARGEST
        if self.next_sequence > most:
            return (
                f"next_sequence ({self.next_sequence}) must be at most what {self.step} steps can "
                f"read ({most})"
            )
        return ""


def set_optimizer_steps(optimizer: torch.optim.AdamW, steps: int) -> None:
    """Set how many updates the optimizer counts as done: what its bias correction depends on."""
    for state in optimizer.state.values():
        state["step"].fill_(steps)


def checkpoint_tensors(
    parameters: Sequence[Parameter], optimizer: torch.optim.AdamW, mesh: Mesh
) -> dict[str, Tensor]:
    """Return this rank's tensors under their global names. They share memory with the live state.

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
