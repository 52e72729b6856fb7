"""Attention of one block in plain torch, forward and backward, where no kernel of torch applies.

Query heads that share a key/value head are folded into rows, [B, G, (H/G)*Q, D], so that keys and
values are not repeated. Queries are taken a few at a time, so that no more scores exist at once
than `TILE` says, or those of one query.

A soft cap acts on single scores: c * tanh(score / c). Dropout acts on single weights, after the
softmax, whose log-sum-exp is of all scores. Neither asks what other blocks hold, so both go with
the merge of blocks and with backward by blocks: a dropped weight gives nothing to the output and
takes nothing of its gradient.

Dropout is a function of head and positions, not of the rank. Whether a weight is dropped follows
from a seed, the place in the batch, the head among all heads and the positions of query and key, by
a hash (the finalizer of splitmix64: Steele, Lea and Flood 2014, "Fast splittable pseudorandom
number generators"). However heads and positions are dealt out to ranks, the same weights are
dropped, and backward needs the seed alone.

Shape symbols: B batch, Q queries, K keys, H query heads, G key/value heads, D head size of
queries and keys, E head size of values, R = H / G * Q rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_BITS = 53  # of a hash that are compared with the probability


@dataclass(frozen=True, slots=True)
class Dropout:
    """The rule by which weights of a call are dropped.

    Attributes:
        probability: Probability of dropping each weight, > 0 and < 1.
        seed: Seed of the call; see `draw_seed`.
        first_head: The first query head of this rank among all heads.
    """

    probability: float
    seed: int
    first_head: int = 0

    def of_block(self, query: range, key: range) -> "BlockDropout":
        """Return the rule for a block of positions."""
        return BlockDropout(self, query, key)


@dataclass(frozen=True, slots=True)
class BlockDropout:
    """The rule by which weights of one block are dropped."""

    call: Dropout
    query: range
    key: range

    def factors(self, batch: int, heads: int, rows: slice, columns: slice, like: Tensor) -> Tensor:
        """Return [B, H, Q, K] for some queries and keys: 0 where dropped, 1 / (1 - p) elsewhere.

        Args:
            batch: Batch size, B.
            heads: Number of query heads, H.
            rows: Queries of the block.
            columns: Keys of the block.
            like: Tensor that has the dtype and the device of the result.
        """
        device, first = like.device, self.call.first_head
        state = torch.full((), self.call.seed, dtype=torch.int64, device=device)
        for size, start in ((batch, 0), (heads, first)):
            state = _mixed(state[..., None] + _numbers(start, start + size, device))
        query, key = self.query[rows], self.key[columns]
        by_query = _mixed(state[..., None] + _numbers(query.start, query.stop, device))
        # Keys are hashed once for all queries, and the two together once for each pair.
        by_key = _mixed(_mixed(_numbers(key.start, key.stop, device)) ^ self.call.seed)
        pairs = _mixed(by_query[..., None] + by_key)
        kept = _shifted(pairs, 64 - _BITS) >= int(self.call.probability * 2**_BITS)
        return kept.to(like.dtype).div_(1 - self.call.probability)


def draw_seed() -> int:
    """Return a seed from torch's generator of the CPU: recomputation restores it."""
    return int(torch.randint(2**62, (), device="cpu"))


def _numbers(start: int, stop: int, device: torch.device) -> Tensor:
    return torch.arange(start + 1, stop + 1, device=device) * _GOLDEN


def _mixed(z: Tensor) -> Tensor:
    """Hash int64 to int64; products wrap around."""
    z = (z ^ _shifted(z, 30)) * _MIX1
    z = (z ^ _shifted(z, 27)) * _MIX2
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right with zeros from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


TILE = 1 << 24  # scores


@dataclass(frozen=True, slots=True)
class Scoring:
    """The rule by which weights follow from queries and keys, apart from the mask.

    Attributes:
        scale: Factor of the scores.
        softcap: Bound of the scores, by tanh; None: no bound.
        dropout: Rule by which weights of this block are dropped.
    """

    scale: float
    softcap: float | None = None
    dropout: BlockDropout | None = None


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some queries of a block, the keys that they may see and the mask of both."""

    rows: slice
    columns: slice
    mask: Tensor | None


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Q, E] and its log-sum-exp [B, H, Q]; see `kernels.block_forward`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    outs, lses = [], []
    for tile in _tiles(q, k, mask, causal):
        q_tile, k_tile, v_tile = q[:, :, tile.rows], k[:, :, tile.columns], v[:, :, tile.columns]
        scores, _ = _scores(q_tile, k_tile, tile, scoring)  # [B, G, R, K]
        lse = scores.logsumexp(-1, keepdim=True)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
        weights *= _kept(weights, q_tile, tile, scoring)
        out = (weights @ v_tile.to(wide)).unflatten(2, (-1, q_tile.size(2))).flatten(1, 2)
        outs.append(out.to(q.dtype))
        lses.append(lse.squeeze(-1).view(q_tile.shape[:-1]))
    return torch.cat(outs, 2), torch.cat(lses, 2)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scoring: Scoring,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv in float32 or wider; see `kernels.block_backward`."""
    wide, num_kv_heads = torch.promote_types(q.dtype, torch.float32), k.size(1)
    dqs = []
    dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    for tile in _tiles(q, k, mask, causal):
        rows, columns = tile.rows, tile.columns
        grad_rows, q_rows, out_rows = (
            _fold(x[:, :, rows].to(wide), num_kv_heads) for x in (grad_out, q, out)
        )  # [B, G, R, D or E]
        lse_rows = lse[:, :, rows].reshape(*grad_rows.shape[:-1], 1)
        scores, slope = _scores(q[:, :, rows], k[:, :, columns], tile, scoring)
        weights = (scores - lse_rows).exp_()
        kept = _kept(weights, q[:, :, rows], tile, scoring)
        delta = (grad_rows * out_rows).sum(-1, keepdim=True)
        dweights = grad_rows @ v[:, :, columns].to(wide).mT * kept
        dv[:, :, columns] += (weights * kept).mT @ grad_rows
        dscores = weights.mul_(dweights - delta).mul_(scoring.scale).mul_(slope)
        dq = dscores @ k[:, :, columns].to(wide)
        dqs.append(dq.unflatten(2, (-1, rows.stop - rows.start)).flatten(1, 2))
        dk[:, :, columns] += dscores.mT @ q_rows
    return torch.cat(dqs, 2), dk, dv


def _tiles(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Iterator[_Tile]:
    num_queries, num_keys = q.size(2), k.size(2)
    step = max(1, TILE // max(1, q.size(0) * q.size(1) * num_keys))
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        if causal:
            # Keys behind the last of these queries are seen by none of them.
            triangle = torch.ones(stop - start, stop, dtype=torch.bool, device=q.device)
            yield _Tile(slice(start, stop), slice(stop), triangle.tril_(start))
        else:
            part = None if mask is None else mask[start:stop]
            yield _Tile(slice(start, stop), slice(num_keys), part)


def _scores(q: Tensor, k: Tensor, tile: _Tile, scoring: Scoring) -> tuple[Tensor, Tensor | float]:
    """Return the scores [B, G, R, K], -inf where a query must not see a key.

    And their derivative by the scores without a soft cap.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (_fold(q.to(wide), k.size(1)) @ k.to(wide).mT).mul_(scoring.scale)
    slope: Tensor | float = 1.0
    if scoring.softcap is not None:
        bounded = scores.div_(scoring.softcap).tanh_()
        slope = 1 - bounded.square()
        scores = bounded.mul_(scoring.softcap)
    if tile.mask is not None:
        scores.unflatten(2, (-1, q.size(2))).masked_fill_(~tile.mask, -torch.inf)
    return scores, slope


def _kept(weights: Tensor, q: Tensor, tile: _Tile, scoring: Scoring) -> Tensor | float:
    """Return the factors of dropout for the weights [B, G, R, K]."""
    if scoring.dropout is None:
        return 1.0
    batch, heads = q.shape[:2]
    factors = scoring.dropout.factors(batch, heads, tile.rows, tile.columns, weights)
    return factors.view_as(weights)


def _fold(x: Tensor, num_kv_heads: int) -> Tensor:
    """Return [B, G, R, D] of [B, H, Q, D]."""
    rows: Tensor = x.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
    return rows
