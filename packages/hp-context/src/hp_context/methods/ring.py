"""Attention over keys that travel round a ring of ranks, the next ones on their way meanwhile.

From "Ring Attention with Blockwise Transformers" (Liu, Zaharia and Abbeel 2023, arXiv:2310.01889),
balanced by the head-tail layout ("zigzag"). A rank holds its own keys and values and those of one
other rank at a time, where the all-gather K/V mode holds all of them.

Where a call has a layout of its own (`Deal`), a document is on any ranks. In step t a rank then
sends those of its own keys that rank r + t sees straight to that rank, and none through others;
gradients come straight home, where they are added in the order of steps. Steps in which nobody
needs anything are left out.

What a rank sends and receives in a step is posted as one (`hp_platform.isend_irecv`), in the same
order of steps on all ranks; threads that share a group must keep to one order of calls, as with any
collective. Nothing is left in flight: a step is waited for even where an exception ends the loop,
since the next call would take its message for its own.

Shape symbols: B batch, s queries of this rank, K keys of a rank that travel, N ranks, H query
heads, G key/value heads, D head size of queries and keys, E head size of values.
"""

from collections.abc import Generator
from contextlib import closing, suppress
from typing import NamedTuple

import torch
from torch import Tensor

from hp_context.attention.parts import (
    PartsMask,
    Work,
    packed,
    start_backward,
    start_forward,
)
from hp_context.attention.softmax import Scores
from hp_context.attention.spread import HeadShare, Needs, Rows, Spread, add_to, length, take
from hp_context.masks import Mask
from hp_platform import Pending, isend_irecv
from hp_platform.groups import global_ranks

_KEYS, _GRADIENTS = 1, 2  # tags: both kinds are in flight between the same ranks


class RingMask(PartsMask):
    """A mask whose attention sends keys and values round a ring.

    Args:
        mask: See `PartsMask`.
        spread: See `PartsMask`.
        mode: See `PartsMask`.
        share: See `PartsMask`.
        straight: Whether keys go straight to the ranks that see them, and through no others.
    """

    def __init__(
        self,
        mask: Mask,
        spread: Spread,
        mode: str,
        share: HeadShare | None = None,
        *,
        straight: bool = False,
    ) -> None:
        super().__init__(mask, spread, mode, share)
        self.straight = straight

    def exchange(self, qkv: tuple[Tensor, Tensor, Tensor], scores: Scores) -> "Ring":
        """See `PartsMask.exchange`."""
        del qkv
        return StraightRing(self.spread, scores) if self.straight else Ring(self.spread, scores)


class Route(NamedTuple):
    """Keys of a rank that travel, and the number of ranks after it that they travel to."""

    rows: Rows
    hops: int


def routes(runs: tuple[Rows, ...], mask: Mask) -> tuple[Route, ...]:
    """Return the route of the keys of each rank.

    In step t rank r has the keys of rank r - t. It computes the blocks that its queries see of
    them, and passes them on to rank r + 1 unless no rank from there on sees any. What sets out at
    all is what any other rank sees. Both follow from the mask, so every rank knows of all routes
    beforehand: under a sliding window keys go as far as the window reaches, under a contiguous
    causal layout to the last rank and not round.

    Args:
        runs: Positions of each rank.
        mask: Description of the keys that a query may see.
    """
    needs = Needs(runs, mask)
    num_ranks = len(runs)
    result = []
    for source in range(num_ranks):
        far = range(num_ranks - 1, 0, -1)
        hops = next((t for t in far if needs.of((source + t) % num_ranks, source)), 0)
        result.append(Route(needs.of_others(source), hops))
    return tuple(result)


class Step(NamedTuple):
    """Keys that are at this rank in one step of the ring.

    Attributes:
        number: 0 for this rank's own keys.
        rows: Positions of the keys.
        part: Keys and values [K, B, G, D + E], overwritten two steps later; None if none came by.
    """

    number: int
    rows: Rows
    part: Tensor | None


class Ring:
    """The hops of one call, forward and once more backward.

    Args:
        spread: Positions of the sequence that each rank of the group holds.
        scores: How queries and keys make scores.
    """

    def __init__(self, spread: Spread, scores: Scores) -> None:
        self.spread, self.scores = spread, scores
        self.group, self.rank = spread.group, spread.group.rank()
        self.num_steps = self._plan()

    def _plan(self) -> int:
        """Find out where keys go; returns the number of steps."""
        self.routes = routes(self.spread.runs, self.scores.mask)
        return 1 + max(route.hops for route in self.routes)

    def at(self, step: int) -> Route:
        """Return the route whose keys may be at this rank in a step."""
        return self.routes[(self.rank - step) % len(self.routes)]

    def peer(self, offset: int) -> int:
        """Return the global rank of another rank of the ring."""
        return global_ranks(self.group)[(self.rank + offset) % len(self.spread.runs)]

    def work(self, step: Step) -> Work:
        """Return the part of the keys of a step, and the queries that attend to it."""
        return Work(self.scores.mask, self.spread.mine, step.rows)

    def steps(self, mine: Tensor) -> Generator[Step, None, None]:
        """Yield each step of the ring while the keys of the next one are in flight.

        Args:
            mine: Keys and values of this rank, [s, B, G, D + E].
        """
        held: Tensor | None = mine
        buffers = self._buffers(mine)
        for number in range(self.num_steps):
            flight = self._send_next(number, mine, held, buffers[number % 2])
            try:
                rows = self.spread.mine if number == 0 else self.rows_at(number)
                yield Step(number, rows, held)
            except BaseException:
                drain(flight)
                raise
            held = next(iter(flight.wait()), None)

    def _send_next(
        self, number: int, mine: Tensor, held: Tensor | None, buffer: Tensor
    ) -> Pending[list[Tensor]]:
        """Start to send the keys of a step on and to receive those of the next one."""
        if number == 0:
            held = take(mine, self.at(0).rows, self.spread.mine)
        goes_on, comes = (self.at(n).hops > number for n in (number, number + 1))
        sends = [(held, self.peer(1))] if held is not None and goes_on else []
        receives = [(buffer[: length(self.at(number + 1).rows)], self.peer(-1))] if comes else []
        return isend_irecv(sends, receives, group=self.group, tag=_KEYS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `PartsExchange.attend`."""
        attention = start_forward(q, self.scores)
        with closing(self.steps(packed(k, v))) as steps:
            for step in steps:
                if step.part is not None:
                    attention.add(step.part, self.work(step))
        return attention.result(v.size(-1))

    def gradients(
        self, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `PartsExchange.gradients`."""
        q, k, v = qkv
        gradients = start_backward(q, out=out, lse=lse, grad_out=grad_out, scores=self.scores)
        home = torch.empty(0)
        with closing(self.sums()) as sums, closing(self.steps(packed(k, v))) as steps:
            for step in steps:
                share = None
                if step.part is not None:
                    share = gradients.add(step.part, self.work(step))
                if step.number == 0 and share is not None:
                    home = share
                else:
                    sums.add(step, share, home)
            sums.add_home_to(home)
        return gradients.dq, home

    def sums(self) -> "Sums":
        """Return the sums that bring gradients home."""
        return Sums(self)

    def rows_at(self, step: int) -> Rows:
        """Return the keys that may be at this rank in a step."""
        return self.at(step).rows

    def _buffers(self, mine: Tensor) -> list[Tensor]:
        """Return two buffers for keys that arrive, used by turns; fresh memory is slow."""
        arriving = [length(self.rows_at(n)) for n in range(1, self.num_steps)]
        sizes = [max(arriving[first::2], default=0) for first in range(2)]
        return [mine.new_empty((size, *mine.shape[1:])) for size in sizes]


class Sums:
    """The gradients of the keys that travel.

    Backward sends the keys on their routes again. Each rank on the way adds its share of the
    gradients to what it got from the rank before, in float32 or wider, and passes the sum on; the
    last one sends it home, where the share of the owner is added. The sum has one order on every
    run. It is sent while the next step computes; the last way home has nothing to hide behind.

    Args:
        ring: The hops of the keys.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._flight: Pending[list[Tensor]] | None = None
        self._passed: Tensor | None = None
        self._home: Tensor | None = None
        self._comes = self._comes_home = False

    def add(self, step: Step, grads: Tensor | None, like: Tensor) -> None:
        """Add this rank's share to the sum for the keys of a step and send it on, or home.

        Args:
            step: Any but the first; each in its turn, also where no keys came by.
            grads: This rank's share, [K, B, G, D + E]; None where no keys came by. Overwritten.
            like: Tensor with the dtype, the device and, but for K, the shape of the shares.
        """
        ring, number = self._ring, step.number
        self._wait()
        sends, receives = [], []
        if grads is not None:
            if self._passed is not None:
                grads += self._passed
            goes_on = ring.at(number).hops > number
            sends.append((grads, ring.peer(1 if goes_on else -number)))
        self._comes = ring.at(number + 1).hops > number
        self._comes_home = ring.at(0).hops == number
        if self._comes:
            receives.append((_rows_like(like, ring.at(number + 1).rows), ring.peer(-1)))
        if self._comes_home:
            receives.append((_rows_like(like, ring.at(0).rows), ring.peer(number)))
        self._flight = isend_irecv(sends, receives, group=ring.group, tag=_GRADIENTS)

    def add_home_to(self, mine: Tensor) -> None:
        """Add the sum that came home to the gradients [s, ...] of this rank's own keys."""
        self._wait()
        if self._home is not None:
            add_to(mine, self._home, self._ring.at(0).rows, self._ring.spread.mine)

    def close(self) -> None:
        """Wait for messages in flight, also after an error."""
        if self._flight is not None:
            drain(self._flight)

    def _wait(self) -> None:
        """Wait for the messages of the step before."""
        received = iter(self._received())
        self._passed = next(received) if self._comes else None
        if self._comes_home:
            self._home = next(received)

    def _received(self) -> list[Tensor]:
        """Wait for the messages in flight, if there are any, and return the received ones."""
        flight, self._flight = self._flight, None
        return [] if flight is None else flight.wait()


class StraightRing(Ring):
    """The steps of one call in which keys go straight to those that need them.

    Args:
        spread: Positions of the sequence that each rank of the group holds.
        scores: How queries and keys make scores.

    Attributes:
        distances: For each step, the number of ranks that its keys come back.
    """

    def _plan(self) -> int:
        """Find out where keys go; returns the number of steps."""
        self._needs = Needs(self.spread.runs, self.scores.mask)
        ranks = range(len(self.spread.runs))
        self.distances = [0] + [
            step
            for step in ranks[1:]
            if any(self._needs.of(rank, rank - step + (step > rank) * len(ranks)) for rank in ranks)
        ]
        return len(self.distances)

    def rows_at(self, step: int) -> Rows:
        """See `Ring.rows_at`."""
        source = (self.rank - self.distances[step]) % len(self.spread.runs)
        return self._needs.of(self.rank, source)

    def rows_away(self, step: int) -> Rows:
        """Return the keys of this rank that leave it in a step."""
        target = (self.rank + self.distances[step]) % len(self.spread.runs)
        return self._needs.of(target, self.rank)

    def sums(self) -> "StraightSums":
        """See `Ring.sums`."""
        return StraightSums(self)

    def _send_next(
        self, number: int, mine: Tensor, held: Tensor | None, buffer: Tensor
    ) -> Pending[list[Tensor]]:
        """Start to send and to receive the keys of the next step."""
        del held
        following = number + 1
        if following == self.num_steps:
            return isend_irecv([], [], group=self.group, tag=_KEYS)
        away, comes = self.rows_away(following), self.rows_at(following)
        far = self.distances[following]
        sends = [(take(mine, away, self.spread.mine), self.peer(far))] if away else []
        receives = [(buffer[: length(comes)], self.peer(-far))] if comes else []
        return isend_irecv(sends, receives, group=self.group, tag=_KEYS)


class StraightSums(Sums):
    """The gradients of keys that went straight to others; see `Sums`."""

    def __init__(self, ring: StraightRing) -> None:
        super().__init__(ring)
        self._straight = ring
        self._arrived: list[tuple[Rows, Tensor]] = []
        self._awaited: Rows = ()

    def add(self, step: Step, grads: Tensor | None, like: Tensor) -> None:
        """See `Sums.add`."""
        self._wait()
        ring = self._straight
        far, back = ring.distances[step.number], ring.rows_away(step.number)
        sends = [] if grads is None else [(grads, ring.peer(-far))]
        receives = [(_rows_like(like, back), ring.peer(far))] if back else []
        self._awaited = back
        self._flight = isend_irecv(sends, receives, group=ring.group, tag=_GRADIENTS)

    def add_home_to(self, mine: Tensor) -> None:
        """See `Sums.add_home_to`."""
        self._wait()
        for rows, part in self._arrived:
            add_to(mine, part, rows, self._straight.spread.mine)

    def _wait(self) -> None:
        self._arrived += [(self._awaited, part) for part in self._received()]


def drain(flight: Pending[list[Tensor]]) -> None:
    """Wait for an operation on the way out of an exception."""
    with suppress(RuntimeError):
        flight.wait()


def _rows_like(x: Tensor, rows: Rows) -> Tensor:
    return x.new_empty((length(rows), *x.shape[1:]))
