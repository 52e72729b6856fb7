"""Ranks that wait while others work hear of each other, and of a request to stop.

One process of a node tokenises, for hours perhaps, and the others have nothing to do. All ranks
meet every few seconds: so no wait is longer than a time-out allows, and a rank that hangs, fails or
is asked to stop ends the wait of all.
"""

import time
from typing import NamedTuple

from torch.distributed import ProcessGroup

from hp_platform import all_gather_json
from hp_trainer.launch.task import Worker

_EVERY_SECONDS = 5.0


class Stopped(Exception):  # noqa: N818 - it is no error
    """The run was asked to stop before there was anything to save."""


class Interrupted(Exception):  # noqa: N818 - it is no error of this rank
    """Work ends since another rank has failed, or all were asked to stop."""


class _State(NamedTuple):
    """What a rank tells the others."""

    works: bool
    has_failed: bool
    is_to_stop: bool


class Waiting:
    """A phase in which some ranks work and the others wait for them. All ranks construct it.

    Args:
        worker: This process.
        phase: What is done, for heartbeats.
        works: Whether this rank works.
        group: Group over all ranks for objects.
        timeout: Seconds that the group waits for a rank.
    """

    def __init__(
        self, worker: Worker, phase: str, *, works: bool, group: ProcessGroup | None, timeout: float
    ) -> None:
        self._worker, self._phase, self._works, self._group = worker, phase, works, group
        self._every = min(_EVERY_SECONDS, timeout / 4)
        self._met_at = time.monotonic()
        self._is_over = False
        self.stopped = False
        self._beat()

    def progress(self) -> None:
        """Say that this rank works on.

        Raises:
            Interrupted: When it is to end.
        """
        self._beat()
        if time.monotonic() - self._met_at >= self._every and self._meet(works=True):
            raise Interrupted

    def finish(self, *, has_failed: bool = False) -> None:
        """Wait for all that work, unless one of them fails or all are to stop."""
        while not self._is_over:
            self._meet(works=False, has_failed=has_failed)

    def _meet(self, *, works: bool, has_failed: bool = False) -> bool:
        """Meet all ranks; whether it is over."""
        mine = _State(works, has_failed, self._worker.stop.requested)
        states = all_gather_json(mine, of=_State, group=self._group)
        self._met_at = time.monotonic()
        self._beat()
        is_at_work = any(state.works for state in states)
        self.stopped = is_at_work and any(state.is_to_stop for state in states)
        self._is_over = not is_at_work or self.stopped or any(state.has_failed for state in states)
        return self._is_over

    def _beat(self) -> None:
        self._worker.heartbeats.beat(step=0, phase=self._phase, waiting=not self._works)
