"""The interface of a training job that can be verified."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from hp_trainer.config import Config

if TYPE_CHECKING:
    from hp_train.verify.recording import Recorder
    from hp_trainer.launch.task import Worker


class Job(Protocol):
    """A training job as one rank of it.

    All ranks build it and call its methods together. What it computes must depend on the config
    and on the number of the step alone, but for the layout.
    """

    def train_step(self, record: Recorder) -> None:
        """Train one step and record it.

        Numbers of the whole step go into ``record.add_scalar("loss", ...)`` and ``"norm"``, this
        rank's parts of gradients and new weights into ``record.add("gradient", {name: ...})`` and
        ``"weight"``, in the order in which they are computed. The caller ends the step.
        """
        ...

    def close(self) -> None:
        """Leave the process groups."""
        ...


Build = Callable[[Config, "Worker"], Job]
"""Makes the job of a rank: the wiring of a model, in the layout that the config asks for."""
