"""`HookCoordinator`: the state machine of Note [Turns] behind a lock. No torch."""

import threading
from collections.abc import Callable
from typing import NamedTuple

from hp_overlap.turn import OTHER, SECTIONS, Hook, Side, Turn


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


class HookCoordinator(TurnHolder):
    """Orders the hooks of two threads by one turn; every hook is a no-op while disabled.

    Args:
        timeout: Seconds in which neither side passes a hook, after which the one that waits raises
            `OverlapTimeoutError`. Progress never needs it. It should exceed the longest section and
            the time-out of the collectives, whose own error says more.

    Attributes:
        trace: The hooks of the current or last pair, in the order they were passed.
        places: Place of each side, in words.
        put_off: Function that the backward side calls where the forward side lends it the turn.
    """

    def __init__(self, *, timeout: float = 600.0) -> None:
        super().__init__(timeout=timeout)
        self._forward_thread = 0

    def enable(self) -> None:
        """Start a pair whose forward side is the calling thread.

        Raises:
            RuntimeError: A side of the last pair has not ended.
        """
        with self._changed:
            if self._turn is not None and self._turn.live:
                left = "; ".join(f"{p} side in {self.places[p]}" for p in sorted(self._turn.live))
                raise RuntimeError(f"coordinator must have no live side to be enabled: {left}")
            self.trace = []
            self.places = dict.fromkeys(OTHER, "its first section, before any hook")
            self._turn, self._forward_thread = Turn(), threading.get_ident()

    def disable(self) -> None:
        """End the pair: hooks are no-ops, a side waiting in one raises `OverlapAbortedError`."""
        with self._changed:
            self._turn = None
            self._changed.notify_all()

    def is_enabled(self) -> bool:
        """Tell whether hooks take part in a pair."""
        return self._turn is not None

    def hook(self, direction: Side, name: Hook) -> None:
        """Pass hook `name`, handing the turn over where Note [Turns] says so.

        Raises:
            OverlapAbortedError: The other side failed, or the pair was disabled.
            OverlapTimeoutError: The other side passed no hook within `timeout` seconds.
        """
        if self._turn is None:
            return
        # Backward runs where autograd runs it: on the helper thread, or on a device's thread.
        side, section = self.side(), SECTIONS[direction][name]
        with self._changed:
            if self._turn is None or side not in self._turn.live:
                return
            self._turn = self._turn.at_hook(side, direction, name)
            self._changed.notify_all()
        self.await_turn(side, f"hook {name}")
        with self._changed:
            self._pass(side, name, section if direction == side else "recompute")

    def side(self) -> Side:
        """Return the side of the calling thread in a pair."""
        return "forward" if threading.get_ident() == self._forward_thread else "backward"
