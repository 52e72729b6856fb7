"""The baton that orders the launches of a forward and a backward running at once. No torch here.

[Note: Baton]
Two parties run one chunk each: the *forward* party on the thread that starts the pair, the
*backward* party on any other thread. Hooks A, B, C, D surround dispatch and combine in both
directions, so that a layer reads, in launch order::

    forward    attention  A  dispatch  B  experts   C  combine   D  attention ...
    backward   ...        D  combine   C  experts   B  dispatch  A  attention

One party at a time holds the turn and only the holder runs; the other waits inside a hook. The
hooks *after* a collective (forward B and D, backward C and A) hand the turn over; the hooks
before one only mark the place. Hence, with a collective that is launched and not waited for:

* what is launched next after a collective is the other party's compute, which hides it;
* the launch order is total and a function of the two programs alone, so every rank that runs
  the same pair launches its collectives in the same order, whatever the numbers of layers;
* only a party without the turn waits, and a party that ends gives the turn away, so there is no
  cycle to wait in: the pair cannot deadlock;
* a failure stops the other party at its next hook, hence within one section.

The backward party starts, so that the very first pair (its last combine against the first
attention) has its collective in front as well. A hook whose direction is not that of the party
that reaches it is a recomputation (a forward inside backward) or an inner backward. It never
hands the turn over: activation checkpointing swaps the global random state while it recomputes,
and the other party must not draw from it meanwhile.

`Baton` holds this state machine and no threads, so that tests walk through every interleaving
of the code that ships; `HookCoordinator` puts it behind a lock.
"""

import threading
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Party = Literal["forward", "backward"]
Hook = Literal["A", "B", "C", "D"]

OTHER: dict[Party, Party] = {"forward": "backward", "backward": "forward"}
# What a party launches after each of its hooks, in the order it meets them.
SECTIONS: dict[Party, dict[Hook, str]] = {
    "forward": {"A": "dispatch", "B": "experts", "C": "combine", "D": "attention"},
    "backward": {"D": "combine", "C": "experts", "B": "dispatch", "A": "attention"},
}
COMPUTE = frozenset({"attention", "experts"})  # a hook that leads into these follows a collective


class OverlapAbortedError(RuntimeError):
    """Raised in a party whose pair ended early: the other party failed, or it was disabled."""


class OverlapTimeoutError(TimeoutError):
    """Raised in a party that waited too long for its turn; says where the other party is."""


class TraceEntry(NamedTuple):
    """A hook as it was passed; `section` is what the party ran after it, or "recompute"."""

    party: Party
    hook: Hook
    section: str


@dataclass(frozen=True, slots=True)
class Baton:
    """Who holds the turn, who has not ended, who failed first. See [Note: Baton]."""

    holder: Party = "backward"
    live: frozenset[Party] = frozenset(OTHER)
    failed: Party | None = None

    def stops(self, party: Party) -> bool:
        """Whether `party` must end at its hook because the other one failed."""
        return self.failed not in (None, party)

    def ready(self, party: Party) -> bool:
        """Whether `party`, waiting in a hook, may leave it: to run, or to stop."""
        return self.holder == party or self.stops(party)

    def at_hook(self, party: Party, direction: Party, name: Hook) -> "Baton":
        """The state after `party` reached a hook of `direction`."""
        hands_over = direction == party and SECTIONS[direction][name] in COMPUTE
        return replace(self, holder=OTHER[party]) if hands_over and len(self.live) == 2 else self

    def left(self, party: Party, *, failed: bool) -> "Baton":
        """The state after `party` returned or raised."""
        first = self.failed or (party if failed else None)
        return Baton(OTHER[party], self.live - {party}, first)


class HookCoordinator:
    """Orders the hooks of two threads by one turn; every hook is a no-op while disabled.

    Args:
        timeout: Seconds a party waits for its turn before it raises `OverlapTimeoutError`.
            Progress never needs it. It should exceed the longest section and the time-out of
            the collectives, whose own error says more.

    Attributes:
        trace: The hooks of the current or last pair, in the order they were passed.
        errors: What the parties raised so far, the root cause first.
        places: Where each party stands.
    """

    def __init__(self, *, timeout: float = 600.0) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout ({timeout}) must be > 0 seconds")
        self.timeout = timeout
        self.trace: list[TraceEntry] = []
        self.errors: dict[Party, BaseException] = {}
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
                there = "; ".join(
                    f"{p} party in {self.places[p]}" for p in sorted(self._baton.live)
                )
                raise RuntimeError(f"coordinator must have no live party to be enabled: {there}")
            self.trace, self.errors = [], {}
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
        """Pass hook `name`, handing the turn over where [Note: Baton] says so.

        Raises:
            OverlapAbortedError: The other party failed, or the pair was disabled.
            OverlapTimeoutError: The turn did not come back within `timeout` seconds.
        """
        if self._baton is None:
            return
        party, section = self._party(), SECTIONS[direction][name]
        with self._changed:
            if self._baton is None or party not in self._baton.live:
                return
            self._baton = self._baton.at_hook(party, direction, name)
            self._changed.notify_all()
            self._wait_for_turn(party, f"hook {name}")
            section = section if direction == party else "recompute"
            self.places[party] = f"section {section!r} after hook {name}"
            self.trace.append(TraceEntry(party, name, section))

    def recomputes(self, direction: Party) -> bool:
        """Whether a hook of `direction` in this thread belongs to a recomputation."""
        return self._baton is not None and direction != self._party()

    def start(self, party: Party) -> None:
        """Wait for the first turn of `party`; raises what `hook` raises."""
        with self._changed:
            self._wait_for_turn(party, "its start")

    def leave(self, party: Party, error: BaseException | None) -> None:
        """Give the turn away for good; with an error the other party stops at its next hook."""
        with self._changed:
            if error is not None:
                self.errors.setdefault(party, error)
            if self._baton is not None:
                self._baton = self._baton.left(party, failed=error is not None)
                self._changed.notify_all()

    def _party(self) -> Party:
        # Backward runs where autograd runs it: on the helper thread, or on a device's thread.
        return "forward" if threading.get_ident() == self._forward_thread else "backward"

    def _wait_for_turn(self, party: Party, where: str) -> None:
        def ready() -> bool:
            return self._baton is None or self._baton.ready(party)

        if not self._changed.wait_for(ready, self.timeout):
            raise OverlapTimeoutError(
                f"{party} party at {where}: no turn within timeout ({self.timeout:g} s), "
                f"{OTHER[party]} party still in {self.places[OTHER[party]]}"
            )
        if self._baton is None or self._baton.stops(party):
            cause = f"{OTHER[party]} party failed" if self._baton else "the pair was disabled"
            raise OverlapAbortedError(f"{party} party stopped at {where}: {cause}")
