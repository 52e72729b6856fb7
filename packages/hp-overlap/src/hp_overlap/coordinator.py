"""`HookCoordinator`: the state machine of Note [Baton] behind a lock."""

import threading
from typing import NamedTuple

from hp_overlap.baton import OTHER, SECTIONS, Baton, Hook, Party


class OverlapAbortedError(RuntimeError):
    """Raised in a party whose pair ended early: the other party failed, or it was disabled."""


class OverlapTimeoutError(TimeoutError):
    """Raised in a party that waited too long for its turn; says where the other party is."""


class TraceEntry(NamedTuple):
    """A hook as it was passed; `section` is what the party ran after it, or "recompute"."""

    party: Party
    hook: Hook
    section: str


class HookCoordinator:
    """Orders the hooks of two threads by one turn; every hook is a no-op while disabled.

    Args:
        timeout: Seconds in which neither party passes a hook, after which the one that waits raises
            `OverlapTimeoutError`. Progress never needs it. It should exceed the longest section and
            the time-out of the collectives, whose own error says more.

    Attributes:
        trace: The hooks of the current or last pair, in the order they were passed.
        places: Where each party stands.
    """

    def __init__(self, *, timeout: float = 600.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout ({timeout}) must be > 0 seconds")
        self.timeout = timeout
        self.trace: list[TraceEntry] = []
        self.places: dict[Party, str] = {}
        self._changed = threading.Condition()
        self._baton: Baton | None = None
        self._forward_thread = 0

    def enable(self) -> None:
        """Start a pair whose forward party is the calling thread.

        Raises:
            RuntimeError: A party of the last pair has not ended.
        """
        with self._changed:
            if self._baton is not None and self._baton.live:
                left = "; ".join(f"{p} party in {self.places[p]}" for p in sorted(self._baton.live))
                raise RuntimeError(f"coordinator must have no live party to be enabled: {left}")
            self.trace = []
            self.places = dict.fromkeys(OTHER, "its first section, before any hook")
            self._baton, self._forward_thread = Baton(), threading.get_ident()

    def disable(self) -> None:
        """End the pair: hooks are no-ops, a party waiting in one raises `OverlapAbortedError`."""
        with self._changed:
            self._baton = None
            self._changed.notify_all()

    def is_enabled(self) -> bool:
        """Whether hooks take part in a pair."""
        return self._baton is not None

    def hook(self, direction: Party, name: Hook) -> None:
        """Pass hook `name`, handing the turn over where Note [Baton] says so.

        Raises:
            OverlapAbortedError: The other party failed, or the pair was disabled.
            OverlapTimeoutError: The other party passed no hook within `timeout` seconds.
        """
        if self._baton is None:
            return
        # Backward runs where autograd runs it: on the helper thread, or on a device's thread.
        party, section = self.party(), SECTIONS[direction][name]
        with self._changed:
            if self._baton is None or party not in self._baton.live:
                return
            self._baton = self._baton.at_hook(party, direction, name)
            self._changed.notify_all()
            self.await_turn(party, f"hook {name}")
            section = section if direction == party else "recompute"
            self.places[party] = f"section {section!r} after hook {name}"
            self.trace.append(TraceEntry(party, name, section))

    def party(self) -> Party:
        """Which party the calling thread is, if there is a pair."""
        return "forward" if threading.get_ident() == self._forward_thread else "backward"

    def await_turn(self, party: Party, where: str = "its start") -> None:
        """Wait until `party` has the turn; raises what `hook` raises."""
        with self._changed:
            passed = len(self.trace)
            while not self._changed.wait_for(lambda: self._may_leave(party), self.timeout):
                if len(self.trace) == passed:
                    raise OverlapTimeoutError(
                        f"{party} party at {where}: no turn within timeout ({self.timeout:g} s), "
                        f"{OTHER[party]} party still in {self.places[OTHER[party]]}"
                    )
                passed = len(self.trace)
            if self._baton is None or self._baton.stops(party):
                cause = f"{OTHER[party]} party failed" if self._baton else "the pair was disabled"
                raise OverlapAbortedError(f"{party} party stopped at {where}: {cause}")

    def leave(self, party: Party, *, failed: bool) -> None:
        """Give the turn away for good; after a failure the other party stops at its next hook."""
        with self._changed:
            if self._baton is not None:
                self._baton = self._baton.left(party, failed=failed)
                self._changed.notify_all()

    def _may_leave(self, party: Party) -> bool:
        return self._baton is None or self._baton.ready(party)
