"""What torch's operators of variable lengths are defined to compute, run on the CPU.

`torch.ops.aten._flash_attention_forward` and `_flash_attention_backward` have kernels for CUDA
alone. Here they are loops over segments in plain torch, in the dtype they are given, float64 too,
so that all that leads to them and from them runs as on a GPU. What a kernel leaves undefined is
NaN here: gradients of keys that belong to no segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hp_context.kernels import varlen


@dataclass
class Launches:
    """What the operators were called with.

    Attributes:
        nothing_seen: Log-sum-exp of a query without keys: +inf in flash attention 2, -inf later.
        forward: Queries, keys and segments of each call.
        backward: The same.
    """

    nothing_seen: float = torch.inf
    forward: list[tuple[int, int, int]] = field(default_factory=list)
    backward: list[tuple[int, int, int]] = field(default_factory=list)


def _allowed(queries: int, keys: int, window: tuple[int, int]) -> Tensor:
    """The last query is aligned with the last key."""
    left, right = window
    aligned = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        allowed &= key >= aligned - left
    if right >= 0:
        allowed &= key <= aligned + right
    return allowed


@dataclass(frozen=True)
class _Segment:
    rows: slice
    columns: slice
    allowed: Tensor


def _segments(
    q: Tensor, k: Tensor, v: Tensor, terms: tuple[Any, ...], window: tuple[int, int]
) -> list[_Segment]:
    starts, key_starts, longest, key_longest, dropout, causal, debug = terms
    assert starts.dtype == key_starts.dtype == torch.int32
    assert starts.is_contiguous()
    assert key_starts.is_contiguous()
    assert len(starts) == len(key_starts)
    assert (starts[0], key_starts[0]) == (0, 0)
    assert starts[-1] == len(q), "every query belongs to a segment"
    assert key_starts[-1] <= len(k) == len(v)
    assert q.size(-1) == k.size(-1) == v.size(-1)
    assert q.size(1) % k.size(1) == 0
    assert (dropout, debug) == (0.0, False)
    assert causal == (window == (-1, 0))
    assert all(x.stride(-1) == 1 for x in (q, k, v))
    # FlashAttention 2 reads sides of windows as its host code does.
    left, right = (-1 if side >= key_longest else side for side in window)
    if left >= 0 > right:
        right = key_longest
    if right >= 0 > left:
        left = key_longest
    found = []
    lengths = []
    for (a, b), (c, d) in zip(
        pairwise(starts.tolist()), pairwise(key_starts.tolist()), strict=True
    ):
        assert a <= b
        assert c <= d
        lengths.append((b - a, d - c))
        found.append(_Segment(slice(a, b), slice(c, d), _allowed(b - a, d - c, (left, right))))
    assert longest == max(q for q, _ in lengths)
    assert key_longest >= max(k for _, k in lengths)
    return found


def _scores(q: Tensor, k: Tensor, segment: _Segment, scale: float) -> Tensor:
    """[H, queries, keys]."""
    heads = q[segment.rows].movedim(1, 0)
    of_keys = k[segment.columns].movedim(1, 0).repeat_interleave(q.size(1) // k.size(1), 0)
    return (heads @ of_keys.mT * scale).masked_fill(~segment.allowed, -torch.inf)


def _window(kwargs: dict[str, Any]) -> tuple[int, int]:
    return kwargs["window_size_left"], kwargs["window_size_right"]


def forward(launches: Launches, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """The forward operator."""
    q, k, v, *terms = args
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(q)
    lse = torch.full((q.size(1), len(q)), launches.nothing_seen, dtype=wide)
    found = _segments(q, k, v, tuple(terms), _window(kwargs))
    launches.forward.append((len(q), int(terms[1][-1]), len(found)))
    for segment in found:
        scores = _scores(q.to(wide), k.to(wide), segment, kwargs["scale"])
        if not scores.numel():
            continue
        values = v[segment.columns].to(wide).movedim(1, 0)
        weights = scores.softmax(-1).nan_to_num(0.0)
        part = weights @ values.repeat_interleave(q.size(1) // k.size(1), 0)
        out[segment.rows] = part.movedim(0, 1).to(q.dtype)
        own = scores.logsumexp(-1)
        lse[:, segment.rows] = own.masked_fill(own == -torch.inf, launches.nothing_seen)
    state = torch.empty(2, dtype=torch.uint64)
    return out, lse, state, torch.empty((), dtype=torch.uint64), torch.empty(0, dtype=q.dtype)


def backward(launches: Launches, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The backward operator."""
    grad, q, k, v, out, lse, *terms = args
    (starts, key_starts, longest, key_longest, dropout, causal, *_) = terms
    assert grad.shape == out.shape == q.shape
    assert lse.shape == (q.size(1), len(q))
    assert lse.is_contiguous()
    assert all(x.stride(-1) == 1 for x in (grad, out))
    wide, shared = torch.promote_types(q.dtype, torch.float32), q.size(1) // k.size(1)
    dq = torch.zeros_like(q)
    dk, dv = (torch.full_like(x, torch.nan) for x in (k, v))
    asked = (starts, key_starts, longest, key_longest, dropout, causal, False)
    found = _segments(q, k, v, asked, _window(kwargs))
    launches.backward.append((len(q), int(key_starts[-1]), len(found)))
    for segment in found:
        rows, columns = segment.rows, segment.columns
        if rows.start == rows.stop or columns.start == columns.stop:
            dk[columns], dv[columns] = 0.0, 0.0
            continue
        heads = [x[rows].to(wide).movedim(1, 0) for x in (grad, q, out)]
        k_h, v_h = (x[columns].to(wide).movedim(1, 0).repeat_interleave(shared, 0) for x in (k, v))
        scores = _scores(q.to(wide), k.to(wide), segment, kwargs["scale"])
        weights = (scores - lse[:, rows].unsqueeze(-1)).exp()
        delta = (heads[0] * heads[2]).sum(-1, keepdim=True)
        dscores = weights * (heads[0] @ v_h.mT - delta) * kwargs["scale"]
        dq[rows] = (dscores @ k_h).movedim(0, 1).to(q.dtype)
        for total, part in ((dk, dscores.mT @ heads[1]), (dv, weights.mT @ heads[0])):
            summed = part.unflatten(0, (-1, shared)).sum(1)
            total[columns] = summed.movedim(0, 1).to(q.dtype)
    return dq, dk, dv


@contextmanager
def on_cpu(nothing_seen: float = torch.inf) -> Iterator[Launches]:
    """Let calls of variable lengths be taken on the CPU, in any dtype, inside the context."""
    launches = Launches(nothing_seen)
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", lambda *a, **k: forward(launches, *a, **k), "CPU")
    library.impl("_flash_attention_backward", lambda *a, **k: backward(launches, *a, **k), "CPU")
    as_module: Any = varlen
    usual = varlen.DEVICES, as_module.cuda_flash
    varlen.DEVICES = ("cpu",)
    as_module.cuda_flash = SimpleNamespace(applies=lambda *_, mask, **__: mask is None)
    try:
        yield launches
    finally:
        varlen.DEVICES, as_module.cuda_flash = usual
        library._destroy()
