"""Attention of a part of the queries over all keys, gathered from the ranks that share a sequence.

Known from Llama 3 (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2). Forward gathers keys and
values, packed into one tensor, and computes the blocks of its queries. Backward gathers them
again instead of keeping them, walks the same blocks, and sends the gradients of keys and values to
the ranks that they belong to.

Key/value heads do not know of each other, so they may be gathered in several strides: attention
over one stride runs while the next ones are on their way, and in backward the gradients of a stride
go home while the next is computed. Every head is computed as without strides, to the same bits (on
a CPU, where the queries of a run fill its vectors: torch rounds what is left over in another way).
The first gather of each direction and the last way home hide behind nothing.

Shape symbols: B batch, S whole sequence, N ranks, s = S / N, H query heads, G key/value heads, D
head size of queries and keys, E head size of values. Queries and keys are [B, H, s, D] and
[B, G, s, D]; gathered keys and values [K, B, G, D + E], K <= S of them in the order of positions.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from hp_context.attention.parts import (
    PartsMask,
    Work,
    new_results,
    packed,
    start_backward,
    start_forward,
)
from hp_context.attention.softmax import Scores
from hp_context.attention.spread import (
    HeadShare,
    Needs,
    Rows,
    Spread,
    add_to,
    in_order,
    length,
    take,
)
from hp_context.masks import Mask
from hp_context.masks.blocks import joined
from hp_context.methods.in_flight import OverlapRates
from hp_platform import Pending, launch_all_gather, launch_all_to_all

MAX_STRIDES = 4  # a fifth hides a twentieth of the exchange more and makes every kernel smaller
AHEAD = 2  # strides in flight behind the one that computes: the link has work, memory is bounded


class GatheredMask(PartsMask):
    """A mask whose attention gathers keys and values.

    Args:
        mask: Description of the keys that a query may see.
        spread: Positions of the sequence that each rank of the group holds.
        mode: Name of the mode, for messages.
        share: The query heads of this rank; None for all.
        rates: Rates that decide the number of strides, the same on all ranks; None: one stride.
    """

    def __init__(
        self,
        mask: Mask,
        spread: Spread,
        mode: str,
        share: HeadShare | None = None,
        rates: OverlapRates | None = None,
    ) -> None:
        super().__init__(mask, spread, mode, share)
        self.rates = rates

    def exchange(self, qkv: tuple[Tensor, Tensor, Tensor], scores: Scores) -> "_Call":
        """See `PartsMask.exchange`."""
        q, k, v = qkv
        routes = Routes(self.spread, self.mask)
        work = Work(self.mask, self.spread.mine, routes.held)
        strides = _strides(q.size(1), k.size(1), self._num_strides(q, k, v, routes))
        return _Call(scores, routes, work, strides)

    def _num_strides(self, q: Tensor, k: Tensor, v: Tensor, routes: "Routes") -> int:
        """Return the same number on all ranks: of means over them, not of this rank's work."""
        most = min(MAX_STRIDES, k.size(1))
        if self.rates is None or most == 1:
            return 1
        row = (k.nbytes + v.nbytes) / k.size(2)
        sizes = k.size(-1) + v.size(-1)
        flops = 2.0 * q.size(0) * q.size(1) * q.size(2) * sizes * routes.mean_seen
        return self.rates.strides(row * routes.mean_fetched, flops, most)


class Routes:
    """Rows of keys that a rank sends to and gets from each rank, and their exchanges.

    Args:
        spread: Positions of the sequence that each rank of the group holds.
        mask: Description of the keys that a query may see; None: all ranks get everything.

    Attributes:
        held: Positions of the gathered keys, in order.
        mean_seen: Keys that the queries of a rank may see, on the mean over ranks.
        mean_fetched: Keys among these that other ranks hold, likewise on the mean over ranks.
    """

    def __init__(self, spread: Spread, mask: Mask | None) -> None:
        needs = Needs(spread.runs, mask)
        self._group, self._mine = spread.group, spread.mine
        rank, ranks = spread.group.rank(), range(spread.group.size())
        self._sent = [needs.of(other, rank) for other in ranks]
        self._got = [needs.of(rank, other) for other in ranks]
        self._dense = needs.dense
        arriving = spread.runs if self._dense else self._got
        self._arriving: Rows = tuple(chain.from_iterable(arriving))
        self.held = in_order(self._arriving)
        self.mean_fetched = needs.num_fetched / len(ranks)
        self.mean_seen = self.mean_fetched + length(self._mine)

    def launch_gather(self, x: Tensor) -> Pending[Tensor]:
        """Start to gather [s, ...] of each rank; `gathered` makes sense of the result."""
        if self._dense:
            return launch_all_gather(x, group=self._group)
        rows = [take(x, rows, self._mine) for rows in self._sent]
        return launch_all_to_all(
            torch.cat(rows),
            output_splits=list(map(length, self._got)),
            input_splits=list(map(length, self._sent)),
            group=self._group,
        )

    def gathered(self, received: Tensor) -> Tensor:
        """Return [K, ...], the positions `held`."""
        return take(received, self.held, self._arriving)

    def launch_home(self, grads: Tensor) -> Pending[Tensor]:
        """Start to send [K, ...] to the ranks that the rows belong to."""
        rows = joined(list(chain.from_iterable(self._got)))
        return launch_all_to_all(
            take(grads, tuple(rows), tuple(joined(self.held))),
            output_splits=list(map(length, self._sent)),
            input_splits=list(map(length, self._got)),
            group=self._group,
        )

    def summed(self, received: Tensor) -> Tensor:
        """Sum gradients from all ranks: [s, ...].

        Each rank has gradients for the keys of all ranks. A reduce-scatter would sum them in the
        order of the backend, and Gloo runs it as an all-reduce of the whole. An all-to-all followed
        by a sum over ranks, in rank order, moves the same bytes as a good reduce-scatter and gives
        the same bits on every run. It is done in float32 or wider. Keys that a rank's queries do
        not see have no gradient there, and none is sent.
        """
        total = received.new_zeros((length(self._mine), *received.shape[1:]))
        parts = received.split(list(map(length, self._sent)))
        for rows, part in zip(self._sent, parts, strict=True):
            add_to(total, part, rows, self._mine)
        return total


def gather_keys(k: Tensor, v: Tensor, spread: Spread, *, seq_dim: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of all positions, in their order; differentiable.

    Args:
        k: This rank's keys, any shape with s at `seq_dim`.
        v: Its values, of the same shape but for the last dim.
        spread: Positions of the sequence that each rank of the group holds.
        seq_dim: Dimension of the sequence.
    """
    whole: tuple[Tensor, Tensor] = _Gather.apply(k, v, Routes(spread, None), seq_dim)
    return whole


@dataclass(frozen=True, slots=True)
class _Call:
    """Scores, routes and strides of one call of attention, for forward and backward."""

    scores: Scores
    routes: Routes
    work: Work
    strides: list[tuple[slice, slice]]
    """Key/value heads that are gathered together, and the query heads that use them."""

    def parts(self, k: Tensor, v: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the query heads and the gathered keys and values of one stride after the other."""
        mine = packed(k, v)
        launches = [
            partial(self.routes.launch_gather, mine[:, :, keys]) for keys, _ in self.strides
        ]
        for (_, queries), received in zip(self.strides, _in_turn(launches), strict=True):
            yield queries, self.routes.gathered(received)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """See `PartsExchange.attend`."""
        if len(self.strides) == 1:
            ((_, part),) = self.parts(k, v)
            attention = start_forward(q, self.scores)
            attention.add(part, self.work)
            return attention.result(v.size(-1))
        out, lse = new_results(q, v.size(-1))
        for heads, part in self.parts(k, v):
            attention = start_forward(q[:, heads], self.scores)
            attention.add(part, self.work)
            attention.write(out[:, heads], lse[:, heads])
        return out, lse

    def gradients(
        self, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, grad_out: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `PartsExchange.gradients`."""
        q, k, v = qkv
        dqs = []
        homeward = []
        for heads, part in self.parts(k, v):
            gradients = start_backward(
                q[:, heads],
                out=out[:, heads],
                lse=lse[:, heads],
                grad_out=grad_out[:, heads],
                scores=self.scores,
            )
            grads = gradients.add(part, self.work)
            homeward.append(self.routes.launch_home(grads))
            dqs.append(gradients.dq.to(q.dtype))
        home = torch.cat([self.routes.summed(pending.wait()) for pending in homeward], 2)
        return dqs[0] if len(dqs) == 1 else torch.cat(dqs, 1), home


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, k: Tensor, v: Tensor, routes: Routes, seq_dim: int
    ) -> tuple[Tensor, Tensor]:
        ctx.call = (k.size(-1), routes, seq_dim)
        received = routes.launch_gather(torch.cat([k, v], -1).movedim(seq_dim, 0)).wait()
        whole = routes.gathered(received).movedim(0, seq_dim)
        keys, values = whole.tensor_split([k.size(-1)], -1)
        return keys.contiguous(), values.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dkeys: Tensor, dvalues: Tensor) -> tuple[Tensor, Tensor, None, None]:
        head_size, routes, seq_dim = ctx.call
        wide = torch.promote_types(dkeys.dtype, torch.float32)
        grads = torch.cat([dkeys, dvalues], -1).movedim(seq_dim, 0).to(wide)
        home = routes.summed(routes.launch_home(grads).wait())
        dk, dv = home.movedim(0, seq_dim).to(dkeys.dtype).tensor_split([head_size], -1)
        return dk, dv, None, None


def _in_turn(launches: Iterable[Callable[[], Pending[Tensor]]]) -> Iterator[Tensor]:
    """Wait for one operation after the other while the next `AHEAD` are in flight."""
    flying: deque[Pending[Tensor]] = deque()
    for launch in launches:
        flying.append(launch())
        if len(flying) > AHEAD:
            yield flying.popleft().wait()
    while flying:
        yield flying.popleft().wait()


def _strides(num_heads: int, num_kv_heads: int, count: int) -> list[tuple[slice, slice]]:
    """Split the key/value heads into `count` strides whose sizes differ by one at most."""
    shared = num_heads // num_kv_heads
    ends = [i * num_kv_heads // count for i in range(count + 1)]
    return [(slice(a, b), slice(a * shared, b * shared)) for a, b in pairwise(ends)]
