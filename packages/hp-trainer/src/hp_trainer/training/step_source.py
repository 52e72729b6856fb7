"""What gives the trainer its steps where `data.packing` names a package that makes them."""

from collections.abc import Callable
from typing import Protocol

from hp_data.dataset import Dataset
from hp_platform import Runtime
from hp_trainer.config import Config
from hp_trainer.layout.mesh import Mesh
from hp_trainer.plugins import plugin
from hp_trainer.training.batches import PlannedStep


class StepSource(Protocol):
    """Makes steps, the same on every rank; `str()` says in a line how."""

    def take(self, first: int, *, steps: int) -> PlannedStep:
        """Return the step whose batch begins with a sequence. All ranks call this together.

        Args:
            first: Global index of the first sequence.
            steps: Steps of the run that are left, this one included.
        """
        ...

    def close(self) -> None:
        """Make no more steps."""
        ...


def step_source(
    config: Config, mesh: Mesh, data: Dataset, *, runtime: Runtime, vocab_size: int
) -> StepSource | None:
    """Make the source of steps that `data.packing` asks for. All ranks call this together.

    Args:
        config: Configuration of the run.
        mesh: Mesh of the run.
        data: Training data.
        runtime: The initialised world.
        vocab_size: Rows of the embedding.

    Returns:
        None: batches are cut as they come.

    Raises:
        hp_base.errors.ConfigError: When the package that makes such steps is not installed.
    """
    packing = config.data.packing
    if packing != "planned":
        return None
    make: Callable[..., StepSource] = plugin(
        "hp_trainer.step_sources",
        packing,
        asked_by=f'data.packing ("{packing}")',
        package="hp-packing",
    )
    return make(config, mesh, data, runtime=runtime, vocab_size=vocab_size)
