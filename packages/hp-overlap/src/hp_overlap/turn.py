"""The turns of a forward and a backward that run at once: a state machine. No torch, no threads.

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

from dataclasses import dataclass, replace
from typing import Literal

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
