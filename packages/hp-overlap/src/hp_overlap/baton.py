"""Who may run when a forward and a backward run at once: a state machine. No torch, no threads.

Note [Baton]
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
"""

from dataclasses import dataclass, replace
from typing import Literal

Party = Literal["forward", "backward"]
Hook = Literal["A", "B", "C", "D"]

OTHER: dict[Party, Party] = {"forward": "backward", "backward": "forward"}
SECTIONS: dict[Party, dict[Hook, str]] = {
    "forward": {"A": "dispatch", "B": "experts", "C": "combine", "D": "attention"},
    "backward": {"D": "combine", "C": "experts", "B": "dispatch", "A": "attention"},
}
"""What a party launches after each of its hooks, in the order it meets them."""

COMPUTE = frozenset({"attention", "experts"})
"""Sections that follow a collective: the hook that leads into one hands the turn over."""


@dataclass(frozen=True, slots=True)
class Baton:
    """Who holds the turn, who has not ended, who failed first. See Note [Baton]."""

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
