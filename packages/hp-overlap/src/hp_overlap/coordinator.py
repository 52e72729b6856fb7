"""The turns of a forward and a backward that run at once, behind a lock. No torch.

Note [Turns]
Two sides run one chunk each: the *forward* side on the thread that starts the pair, the
*backward* side on any other thread. Hooks A, B, C, D surround dispatch and combine in both
directions, so that a layer reads, in launch order::

    forward    attention  A  dispatch  B  experts   C  combine   D  attention ...
    backward   ...        D  combine   C  experts   B  dispatch  A  attention

One side at a time holds the turn and only the holder runs; the other waits inside a hook. The
hooks *after* a collective (forward B and D, backward C and A) hand the turn over; the hooks
before one only mark the place. Hence, with a collective that is launched and not waited for:

* what is launched next after a collective is the other side's compute, which hides it;
* the launch order is total and a function of the two programs alone, so every rank that runs
  the same pair launches its collectives in the same order, whatever the numbers of layers;
* only a side without the turn waits, and a side that ends gives the turn away, so there is no
  cycle to wait in: the pair cannot deadlock;
* a failure stops the other side at its next hook, hence within one section.

Before dispatch a dispatcher of its own may tell ranks how many rows will come, and wait for what
they tell. Hook N, of forward alone, is where that has been launched::

    forward    attention  N  counts  A  dispatch  B ...

It lends the turn: the backward side stays in the hook that it waits in, does what it has put off
and needs no exchange for, the weight gradients of its last layer, and gives the turn back. So N
changes neither the order of the launches nor how far one side is ahead of the other.

The backward side starts, so that the very first pair (its last combine against the first
attention) has its collective in front as well. A hook whose direction is not that of the side
that reaches it is a recomputation (a forward inside backward) or an inner backward. It never
hands the turn over: activation checkpointing swaps the global random state while it recomputes,
and the other side must not draw from it meanwhile.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Side = Literal["forward", "backward"]
Hook = Literal["A", "B", "C", "D", "N"]

OTHER: dict[Side, Side] = {"forward": "backward", "backward": "forward"}
SECTIONS: dict[Side, dict[Hook, str]] = {
    "forward": {"N": "counts", "A": "dispatch", "B": "experts", "C": "combine", "D": "attention"},
    "backward": {"D": "combine", "C": "experts", "B": "dispatch", "A": "attention"},
}
"""The work that a side launches after each of its hooks, in the order it meets them."""

COMPUTE = frozenset({"attention", "experts"})
"""Sections that follow a collective: the hook that leads into one hands the turn over."""


@dataclass(frozen=True, slots=True)
class Turn:
    """State of a pair: the side that holds the turn, and the ends of the sides. See Note [Turns].

    Attributes:
        holder: Side that may run.
        live: Sides that have not ended.
        failed: Side that failed first, if one has.
        lent: Whether the holder only does the work it has put off, and gives the turn back.
    """

    holder: Side = "backward"
    live: frozenset[Side] = frozenset(OTHER)
    failed: Side | None = None
    lent: bool = False

    def stops(self, side: Side) -> bool:
        """Tell whether `side` must end at its hook because the other one failed."""
        return self.failed not in (None, side)

    def ready(self, side: Side) -> bool:
        """Tell whether `side`, waiting in a hook, may leave it: to run, or to stop."""
        return self.holder == side or self.stops(side)

    def at_hook(self, side: Side, direction: Side, name: Hook) -> "Turn":
        """Return the state after `side` reached a hook of `direction`."""
        section = SECTIONS[direction][name]
        lends = section == "counts"
        hands_over = direction == side and (lends or section in COMPUTE) and len(self.live) == 2
        return replace(self, holder=OTHER[side], lent=lends) if hands_over else self

    def given_back(self) -> "Turn":
        """Return the state after the holder of a lent turn has done the work it had put off."""
        return replace(self, holder=OTHER[self.holder], lent=False) if self.lent else self

    def left(self, side: Side, *, failed: bool) -> "Turn":
        """Return the state after `side` returned or raised."""
        first = self.failed or (side if failed else None)
        return Turn(OTHER[side], self.live - {side}, first)


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
