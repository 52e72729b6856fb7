"""Rows for experts in buffers of a fixed size, whose numbers the host does not read.

In a step, every rank has room for so many rows from each other rank, and nothing waits for the
device. Where rows did not fit, outputs were NaN on the ranks that share the experts. Each rank asks
once per step, after the backward and before the update, and tells all others in what they sum in
any case (see Note [one agreed step]). If it happened anywhere, all ranks drop the gradients and run
the step again with as much room as it takes: no update is made of fewer rows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from hp_expert import (
    BoundedAllToAllDispatcher,
    BufferOverflowError,
    rows_per_pair,
)
from hp_trainer.config import Config
from hp_trainer.layout.mesh import Mesh
from hp_trainer.layout.schedules import planned_tokens
from hp_trainer.model.stage import Stage, experts_of


class ExpertBuffers:
    """The buffers of one rank, shared by all its layers.

    Args:
        experts: Experts that exchange rows; none: there is nothing to bound.
        dispatcher: What exchanges them in buffers; None without experts.
    """

    def __init__(
        self, experts: Sequence[Any], dispatcher: BoundedAllToAllDispatcher | None
    ) -> None:
        self._experts, self._dispatcher = experts, dispatcher

    @classmethod
    def of(
        cls,
        stages: Sequence[Stage],
        config: Config,
        mesh: Mesh,
        *,
        positions: int,
        device: torch.device,
    ) -> "ExpertBuffers":
        """Make room for `mesh.ep_buffer` times the rows of an even routing of a rank's most tokens.

        Args:
            stages: Stages of this rank, their experts spread over ranks.
            config: Configuration of the run; without buffers where `mesh.ep_buffer` is 0.
            mesh: Mesh of the run.
            positions: Positions of a sequence that attention sees on this rank.
            device: Device of the rows.
        """
        factor = config.mesh.ep_buffer
        experts: list[Any] = [part for stage in stages for part in experts_of(stage)]
        if not factor or not experts or mesh.size("ep") == 1:
            return NO_BUFFERS
        group, num_experts = mesh.groups["ep"], experts[0].dispatcher.num_experts
        most = config.train.microbatch_size * positions
        if config.data.packing == "planned":
            most = planned_tokens(config)
        tokens = -(-most // mesh.size("tp"))
        rows = rows_per_pair(tokens, config.model.top_k, num_experts, group.size(), factor=factor)
        return cls(experts, BoundedAllToAllDispatcher(group, num_experts, rows, device))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Exchange rows in buffers inside of the context."""
        before = [part.dispatcher for part in self._experts]
        for part in self._experts:
            assert self._dispatcher is not None
            part.dispatcher = self._dispatcher
        try:
            yield
        finally:
            for part, dispatcher in zip(self._experts, before, strict=True):
                part.dispatcher = dispatcher

    def overflowed(self) -> int:
        """Ask whether rows did not fit since the last call: the one host read of a step.

        Returns:
            Most rows that went from one rank to another, if they were too many; else 0.
        """
        try:
            if self._dispatcher is not None:
                self._dispatcher.check()
        except BufferOverflowError as error:
            return error.rows_needed
        return 0


NO_BUFFERS: Final = ExpertBuffers((), None)
"""Those of a rank that exchanges no rows, or as many as there are."""
