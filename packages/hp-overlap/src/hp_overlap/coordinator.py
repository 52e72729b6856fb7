"""`HookCoordinator`: the state machine of Note [Turns] behind a lock."""

import threading

from hp_overlap.turn import OTHER, SECTIONS, Hook, Side, Turn
from hp_overlap.waiting import OverlapAbortedError, OverlapTimeoutError, TraceEntry, TurnHolder

__all__ = ["HookCoordinator", "OverlapAbortedError", "OverlapTimeoutError", "TraceEntry"]


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
