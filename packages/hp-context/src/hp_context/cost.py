"""Bytes that a rank sends to others in one attention, by mode; tests compare exchanges with it.

Shape symbols: B batch, S whole sequence, N ranks, s = S / N, d Ulysses degree, n = N / d ranks of
the outer axis, H query heads and h those of a rank, G key/value heads, K of them sent to all ranks
(those that several ranks need counted for each) and k to one, D head size of queries and keys, E
head size of values.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hp_context.attention.spread import Needs, Rows, length, split_heads
from hp_context.batch import CONTIGUOUS, SequenceLayout
from hp_context.masks import Full, Mask
from hp_context.methods.hybrid import outer_runs
from hp_context.methods.ring import routes


class ExchangedBytes(NamedTuple):
    """Bytes that one rank sends to the others.

    Attributes:
        forward: Bytes sent in forward.
        backward: Bytes sent in backward.
    """

    forward: int
    backward: int


def exchanged_bytes(
    *,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    num_ranks: int,
    ulysses_degree: int | None = None,
    ring: bool = False,
    mask: Mask | None = None,
    layout: SequenceLayout = CONTIGUOUS,
    value_size: int | None = None,
    batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    by_blocks: bool = True,
    rank: int | None = None,
) -> ExchangedBytes:
    """Return the bytes that a rank sends in a mode of `ContextParallel`, to choose a mode by.

    Of B*s positions, the exchange of heads sends forward

        (H - h)*D + (K - k)*(D + E) + (d - 1)*h*E   elements: q, k and v, the output,

    and backward the gradients of these. Of the B*s*d positions that a rank then has, it sends
    k*(D + E) elements to each of the n - 1 outer ranks that see them, in forward and once more in
    backward, where the gradients of as many come home in float32 or wider. With G divisible by N,
    D = E and no mask, all-gather K/V sends less forward than Ulysses where N < 1 + H / G.

    Args:
        seq_len: Length of the whole sequence, S.
        num_heads: Number of query heads, H.
        num_kv_heads: Number of key/value heads, G.
        head_size: Head size of queries and keys, D.
        num_ranks: Number of ranks that share the sequence, N.
        ulysses_degree: Ulysses degree, d; None is N, or 1 for a ring, as in `ContextParallel`.
        ring: Same as in `ContextParallel`.
        mask: Keys that a query may see: those that no query of a rank sees are not sent there.
            None: all.
        layout: Same as in `ContextParallel`.
        value_size: Head size of values, E; None is D.
        batch_size: Number of sequences in the batch, B.
        dtype: Dtype of q, k and v.
        by_blocks: Whether the core attention is an `hp_context.Attention`. Any other is given all
            keys and keeps them for backward.
        rank: Rank whose bytes are returned; None: the mean over all, rounded.

    Raises:
        ValueError: The heads, the ranks or the sequence cannot be divided so.
    """
    default = 1 if ring else num_ranks
    degree = default if ulysses_degree is None else ulysses_degree
    _check(num_heads, num_kv_heads, num_ranks, degree)
    shape = _Shape(
        heads=(num_heads, num_kv_heads),
        sizes=(head_size, head_size if value_size is None else value_size),
        positions=batch_size * (seq_len // num_ranks),
        batch=batch_size,
        degree=degree,
        width=dtype.itemsize,
        wide=torch.promote_types(dtype, torch.float32).itemsize,
    )
    runs = outer_runs(layout, seq_len, num_ranks, degree)
    seen = Full() if mask is None or not by_blocks else mask
    rows = _ring_rows(runs, seen) if ring else _gathered_rows(runs, seen)
    every = [_of_rank(shape, i, *rows[i // degree], again=by_blocks) for i in range(num_ranks)]
    if rank is not None:
        return every[rank]
    return ExchangedBytes(*(round(sum(way) / num_ranks) for way in zip(*every, strict=True)))


@dataclass(frozen=True)
class _Shape:
    heads: tuple[int, int]
    sizes: tuple[int, int]
    positions: int
    batch: int
    degree: int
    width: int
    wide: int


def _of_rank(shape: _Shape, rank: int, keys: int, gradients: int, *, again: bool) -> ExchangedBytes:
    """Return the bytes of a rank that sends a number of rows of keys and of gradients."""
    split = split_heads(*shape.heads, shape.degree)
    inner, others = rank % shape.degree, shape.degree - 1
    queries, kv_heads = len(split.query[inner]), len(split.kv[inner])
    queries_away = shape.heads[0] - queries
    kv_away = sum(map(len, split.kv)) - kv_heads
    head_size, value_size = shape.sizes
    both = head_size + value_size
    forward = queries_away * head_size + kv_away * both + others * queries * value_size
    backward = others * (queries * head_size + kv_heads * both) + queries_away * value_size
    row = shape.batch * kv_heads * both
    return ExchangedBytes(
        shape.positions * forward * shape.width + keys * row * shape.width,
        shape.positions * backward * shape.width
        + row * (keys * shape.width * again + gradients * shape.wide),
    )


def _gathered_rows(runs: tuple[Rows, ...], mask: Mask) -> list[tuple[int, int]]:
    """Return the rows of keys that each outer rank sends, and those of gradients."""
    needs = Needs(runs, mask)
    ranks = range(len(runs))
    found = []
    for rank in ranks:
        others = [other for other in ranks if other != rank]
        sent = sum(length(needs.of(other, rank)) for other in others)
        got = sum(length(needs.of(rank, other)) for other in others)
        found.append((length(runs[rank]) * len(others) if needs.dense else sent, got))
    return found


def _ring_rows(runs: tuple[Rows, ...], mask: Mask) -> list[tuple[int, int]]:
    """Return the rows of keys and of gradients that each outer rank sends on in a ring."""
    ranks, by_rank = range(len(runs)), routes(runs, mask)
    found = []
    for rank in ranks:
        # In a step there are the keys of the rank that is so many places before.
        at = [by_rank[rank - step] for step in ranks]
        keys = sum(length(route.rows) for t, route in enumerate(at) if route.hops > t)
        sums = sum(length(route.rows) for t, route in enumerate(at) if route.hops >= t > 0)
        found.append((keys, sums))
    return found


def _check(num_heads: int, num_kv_heads: int, num_ranks: int, degree: int) -> None:
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads ({num_kv_heads}) must divide num_heads ({num_heads})")
    if degree < 1 or num_ranks % degree:
        raise ValueError(f"ulysses_degree ({degree}) must divide the number of ranks ({num_ranks})")
    if num_heads < degree:
        raise ValueError(f"ulysses_degree ({degree}) must be <= num_heads ({num_heads})")
