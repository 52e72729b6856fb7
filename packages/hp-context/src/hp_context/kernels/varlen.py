# ruff: noqa: SLF001  # no public function of torch returns the log-sum-exp to its own backward
"""Attention of many segments in one launch, by torch's flash attention of variable lengths.

A segment is some queries and some keys, one after the other in tensors of all of them: see Note
[What one call of variable lengths can say]. `torch.nn.attention.varlen` is made of the same two
operators, but its backward starts from its own output; ours has to start from that of all parts
of the keys, with sinks: see Note [Backward by blocks]. Whatever
`torch.nn.attention.activate_flash_attention_impl` puts in place of flash attention 2 (FA3, FA4)
computes these calls too.

Note [Segments without queries or keys]
    Segments follow each other without a gap, so queries that see nothing are a segment without
    keys, and keys that nobody sees one without queries. Read in flash attention's sources (the
    early exits of flash_fwd_kernel.h and flash_bwd_kernel.h): their output and gradients are 0.
    The log-sum-exp of a query without keys is +inf in flash attention 2 and -inf in later ones.

Shape symbols: T queries of all segments, U keys of all segments, H query heads, G key/value heads
(G divides H), D head size of queries and keys, E head size of values, at most D.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from hp_context.kernels import cuda_flash

DEVICES: tuple[str, ...] = ("cuda",)
"""Types of devices that have the operators."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths and windows of the segments of a call.

    Attributes:
        starts: int32 [segments + 1]: starts of the segments among the queries, and the last end.
        key_starts: The same among the keys.
        longest: Most queries and most keys of a segment.
        window: Number of keys to the left and to the right of a query's own key that it sees; the
            last query's own key is the last one; -1: all.
    """

    starts: Tensor
    key_starts: Tensor
    longest: tuple[int, int]
    window: tuple[int, int]

    @property
    def causal(self) -> bool:
        """Tell whether the window is a causal mask, for which kernels have a variant."""
        return self.window == (-1, 0)


def applies(q: Tensor, v: Tensor) -> bool:
    """Tell whether the kernel takes the device, the dtype and the sizes of q [..., D], v [..., E].

    Rows of keys and values lie side by side between ranks: both sizes are to be aligned.
    """
    fits = q.device.type in DEVICES and v.size(-1) <= q.size(-1) and v.size(-1) % 8 == 0
    return fits and cuda_flash.applies(q, q, mask=None, softcap=None)


def padded(x: Tensor, size: int) -> Tensor:
    """Return [..., E] with columns of zeros up to `size`, which add nothing to any result."""
    return x if x.size(-1) == size else pad(x, (0, size - x.size(-1)))


def _longest_of(lengths: Lengths) -> tuple[int, int]:
    """Return the lengths of the longest segments of queries and of keys, as the kernel needs them.

    FlashAttention 2 takes a side of a window for all keys where it is no smaller than the keys of
    the longest segment, and the open side of a window for as many. Both are right, since the last
    query is aligned with the last key, only where no segment has more queries than that. So it is
    told at least so many keys; memory does not depend on it.
    """
    queries, keys = lengths.longest
    return queries, max(queries, keys)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, lengths: Lengths, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend.

    Args:
        q: [T, H, D].
        k: [U, G, D].
        v: [U, G, E].
        lengths: The segments.
        scale: Factor of the scores.

    Returns:
        Output [T, H, D], whose columns from E on are 0; log-sum-exp [H, T], float32 or wider,
        infinite for a query that sees no key.
    """
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        padded(v, q.size(-1)),
        lengths.starts,
        lengths.key_starts,
        *_longest_of(lengths),
        0.0,
        lengths.causal,
        False,
        scale=scale,
        window_size_left=lengths.window[0],
        window_size_right=lengths.window[1],
    )
    return out, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    lengths: Lengths,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv; see Note [Backward by blocks].

    Args:
        q: [T, H, D].
        k: [U, G, D].
        v: [U, G, E].
        grad_out: [T, H, D], padded.
        out: [T, H, D], over all keys that these queries see, padded.
        lse: [H, T], over the same keys; contiguous.
        lengths: Same as in `forward`.
        scale: Same as in `forward`.
    """
    # The random state of dropout, which is not read without any.
    unused = torch.empty(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        grad_out,
        q,
        k,
        padded(v, q.size(-1)),
        out,
        lse,
        lengths.starts,
        lengths.key_starts,
        *_longest_of(lengths),
        0.0,
        lengths.causal,
        unused,
        unused,
        scale=scale,
        window_size_left=lengths.window[0],
        window_size_right=lengths.window[1],
    )
    return dq, dk, dv[..., : v.size(-1)]
