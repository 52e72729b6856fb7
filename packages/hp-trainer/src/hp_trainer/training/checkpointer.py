"""Saves and loads of a run, and the lines about a save that has failed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.errors import CheckpointError
from hp_checkpoint import OnProgress
from hp_checkpoint.runs import BackgroundSaver, Loaded, load_latest, save_checkpoint
from hp_trainer.config import TrainConfig


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
