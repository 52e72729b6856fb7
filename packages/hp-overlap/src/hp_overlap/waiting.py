"""`TurnHolder`: one turn behind a lock, and two threads that wait for it. No torch."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from hp_overlap.turn import OTHER, Hook, Side, Turn


class OverlapAbortedError(RuntimeError):
    """Raised in a side whose pair ended early: the other side failed, or it was disabled."""


class OverlapTimeoutError(TimeoutError):
    """Raised in a side that waited too long for its turn; says where the other side is."""


class TraceEntry(NamedTuple):
    """A hook that a side passed; `section` names the side's next work, or is "recompute"."""

    side: Side
    hook: Hook
    section: str


class TurnHolder:
    """The turn behind a lock, with the place of both sides and the hooks that they passed.

    Args:
        timeout: Seconds; see `HookCoordinator`.
    """

    def __init__(self, *, timeout: float) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout ({timeout}) must be > 0 seconds")
        self.timeout = timeout
        self.trace: list[TraceEntry] = []
        self.places: dict[Side, str] = {}
        self.put_off: Callable[[], object] = lambda: None
        self._changed = threading.Condition()
        self._turn: Turn | None = None

    def await_turn(self, side: Side, where: str = "its start") -> None:
        """Wait until `side` may go on; whenever the turn is lent to it, do the work it has put off.

        Raises:
            OverlapAbortedError: The other side failed, or the pair was disabled.
            OverlapTimeoutError: The other side passed no hook within `timeout` seconds.
        """
        while self._is_lent(side, where):
            with self._changed:
                self._pass(side, "N", "weight gradients")
            self.put_off()
            with self._changed:
                if self._turn is not None:
                    self._turn = self._turn.given_back()
                    self._changed.notify_all()

    def leave(self, side: Side, *, failed: bool) -> None:
        """Give the turn away for good; after a failure the other side stops at its next hook."""
        with self._changed:
            if self._turn is not None:
                self._turn = self._turn.left(side, failed=failed)
                self._changed.notify_all()

    def _is_lent(self, side: Side, where: str) -> bool:
        """Wait until `side` has the turn; return whether it has to give it back."""
        with self._changed:
            passed = len(self.trace)
            while not self._changed.wait_for(
                lambda: self._turn is None or self._turn.ready(side), self.timeout
            ):
                if len(self.trace) == passed:
                    raise OverlapTimeoutError(
                        f"{side} side at {where}: no turn within timeout ({self.timeout:g} s), "
                        f"{OTHER[side]} side still in {self.places[OTHER[side]]}"
                    )
                passed = len(self.trace)
            if self._turn is None or self._turn.stops(side):
                cause = f"{OTHER[side]} side failed" if self._turn else "the pair was disabled"
                raise OverlapAbortedError(f"{side} side stopped at {where}: {cause}")
            return self._turn.lent

    def _pass(self, side: Side, name: Hook, section: str) -> None:
        self.places[side] = f"section {section!r} after hook {name}"
        self.trace.append(TraceEntry(side, name, section))
