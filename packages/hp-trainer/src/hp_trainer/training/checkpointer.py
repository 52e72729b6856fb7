"""Saves and loads of a run: the state that a checkpoint holds, and lines about a save that failed.

The state is parameters and Adam moments by global name, and a position. What is cut over ranks is
offered as DTensors, everything else as plain tensors, so that a checkpoint says nothing of the
layout it was saved under.

A checkpoint whose hashes fit may still be one that somebody wrote by hand, so its position is not
taken as it comes: a type, a negative number or one that no run can reach is refused by name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.errors import CheckpointError
from hp_checkpoint import OnProgress
from hp_checkpoint.runs import BackgroundSaver, Loaded, load_latest, save_checkpoint
from hp_trainer.config import LARGEST, TrainConfig
from hp_trainer.layout.mesh import Mesh
from hp_trainer.model.parameters import Parameter
from hp_trainer.model.stage import Stage

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Checkpointer:
    """Saves the state of a run, at once or behind the training, and finds it again.

    All ranks call every method together. See Note [one agreed step] in
    `hp_trainer.training.gradients`: a save behind the training is over at the step at whose end all
    ranks know theirs to be.

    Args:
        directory: Directory of the run's checkpoints.
        config: Says how many are kept, and whether training waits.
        group: CPU group over all ranks, which nothing else uses.
        tensors: Gives this rank's live tensors by global name.
        extra: Gives what is saved beside them.
        on_progress: Function that is told what this rank does in a save or load for which training
            waits.
    """

    def __init__(
        self,
        directory: Path,
        config: TrainConfig,
        *,
        group: ProcessGroup,
        tensors: Callable[[], Mapping[str, Tensor]],
        extra: Callable[[], Mapping[str, Any]],
        on_progress: OnProgress,
    ) -> None:
        self._directory, self._config, self._group = directory, config, group
        self._tensors, self._extra, self._on_progress = tensors, extra, on_progress
        self._saver = BackgroundSaver(
            directory, group=group, keep=config.keep_checkpoints, keep_every=config.keep_every
        )
        self._step_under_way = 0
        self._saved: tuple[int, Path] | None = None

    @property
    def is_written(self) -> bool:
        """Tell whether a save is under way that is over on this rank."""
        return self._saver.is_written

    def begin(self, step: int) -> list[str]:
        """Save the state after a step; with ``train.async_save`` only copy it and go on.

        A full disk in the middle of a run is no reason to lose the run.

        Args:
            step: Done, and the same on all ranks.

        Returns:
            What went wrong, in lines, with this save or with the one before it.
        """
        problems = self.wait()
        if self._config.async_save:
            self._on_progress("copy")
            self._saver.start(step=step, tensors=self._tensors(), extra=self._extra())
            self._step_under_way = step
        else:
            try:
                self.save(step)
            except CheckpointError as error:
                problems.append(self._warning(error))
        return problems

    def wait(self) -> list[str]:
        """Wait for the save under way, if there is one.

        Returns:
            What went wrong with it, in lines.
        """
        if not self._saver.is_under_way:
            return []
        try:
            path = self._saver.finish(on_progress=self._on_progress)
        except CheckpointError as error:
            return [self._warning(error)]
        self._saved = (self._step_under_way, path)
        return []

    def save(self, step: int) -> Path:
        """Save the state after a step, and wait until it is on the disk; no save is under way.

        Args:
            step: Done, and the same on all ranks.

        Returns:
            The path of the checkpoint; of the one there is if this very state was saved before.

        Raises:
            CheckpointError: On every rank; what was saved before is intact.
        """
        if self._saved is None or self._saved[0] != step:
            path = save_checkpoint(
                self._directory,
                step=step,
                tensors=self._tensors(),
                extra=self._extra(),
                group=self._group,
                keep=self._config.keep_checkpoints,
                keep_every=self._config.keep_every,
                on_progress=self._on_progress,
            )
            self._saved = (step, path)
        return self._saved[1]

    def load(self) -> Loaded | None:
        """Load the newest good checkpoint into the live tensors, if there is one.

        Raises:
            CheckpointError: See :func:`load_latest`.
        """
        return load_latest(
            self._directory,
            tensors=self._tensors(),
            group=self._group,
            on_progress=self._on_progress,
        )

    def _warning(self, error: CheckpointError) -> str:
        return f"warning: {error}; going on, next try in {self._config.save_every} steps"


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


def set_optimizer_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set how many updates the optimizer counts as done: what its bias correction depends on."""
    for state in optimizer.state.values():
        if "step" in state:  # Muon has none
            state["step"].fill_(steps)


def checkpoint_tensors(
    parameters: Sequence[Parameter], optimizer: torch.optim.Optimizer, mesh: Mesh
) -> dict[str, Tensor]:
    """Return this rank's tensors under their global names. They share memory with the live state.

    Args:
        parameters: This rank's.
        optimizer: Materialised; see :func:`hp_trainer.training.optimizer.build_optimizer`.
        mesh: Mesh of the run.

    Returns:
        ``model.<name>``, ``optimizer.exp_avg.<name>`` and ``optimizer.exp_avg_sq.<name>``, of
        matrices of Muon ``optimizer.momentum_buffer.<name>``.
    """
    tensors = {}
    for parameter in parameters:
        state = optimizer.state[parameter.local]
        named = {"model": parameter.local}
        named |= {f"optimizer.{key}": value for key, value in state.items() if key != "step"}
        for prefix, tensor in named.items():
            tensors[f"{prefix}.{parameter.name}"] = parameter.as_whole(tensor, mesh)
    return tensors


def checkpoint_buffers(stages: Iterable[Stage]) -> dict[str, Tensor]:
    """Say what stages keep besides parameters, under global names: correction biases of routers."""
    return {
        f"model.{name}": buffer for stage in stages for name, buffer in stage.kept_buffers.items()
    }
