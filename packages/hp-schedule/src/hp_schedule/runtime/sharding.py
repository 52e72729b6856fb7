"""The protocol by which a schedule's FSDP steps drive an FSDP implementation."""

from contextlib import AbstractContextManager
from typing import Protocol

from hp_schedule.runtime.stage import PipelineStage


class StageSharding(Protocol):
    """Gathers and frees the parameters of stages when the schedule says so.

    The driver calls `during_run` around a whole run, the others at the steps of the schedule, all
    from the thread that runs the schedule, save for `wait_unshard`, which handlers may cause from
    their own threads.
    """

    def during_run(self) -> AbstractContextManager[None]:
        """Return a context in which the hooks of the FSDP itself start no collective.

        Left by an exception it need not restore more than a later run needs.
        """

    def unshard(self, stage: PipelineStage) -> None:
        """Start to gather a stage's parameters; does not wait for them."""

    def wait_unshard(self, stage: PipelineStage) -> None:
        """Wait until a stage's parameters are there; called before each of its compute steps.

        Raises:
            RuntimeError: If nobody has gathered them.
        """

    def reshard(self, stage: PipelineStage) -> None:
        """Free a stage's gathered parameters."""

    def reduce_grad(self, stage: PipelineStage) -> None:
        """Reduce the gradients that a stage's backwards of this run have left."""
