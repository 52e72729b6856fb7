"""Attention over parts of the keys put together by the log-sum-exp of the scores of each part.

From "Online normalizer calculation for softmax" (Milakov and Gimelshein 2018, arXiv:1805.02867). A
part with no key to see has log-sum-exp -inf and weighs nothing.

Shape symbols: B batch, H query heads, Q queries, E head size of values.
"""

import torch
from torch import Tensor


class Merge:
    """The running result over the parts of the keys seen so far, in float32 or wider."""

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Add one part.

        Args:
            out: [B, H, Q, E], attention over the keys of the part alone. May be overwritten.
            lse: [B, H, Q], log-sum-exp of its scores; -inf where a query sees none of the keys,
                and `out` 0 there.
        """
        wide = out.to(torch.promote_types(out.dtype, torch.float32))
        if self._out is None or self._lse is None:
            self._out, self._lse = wide, lse
            return
        total = torch.logaddexp(self._lse, lse)
        finite = for_backward(total)
        self._out.mul_((self._lse - finite).exp().unsqueeze(-1))
        self._out.addcmul_(wide, (lse - finite).exp().unsqueeze(-1))
        self._lse = total

    def result(self) -> tuple[Tensor, Tensor]:
        """Return output [B, H, Q, E] and log-sum-exp [B, H, Q]; exactly 0 and -inf for no key."""
        if self._out is None or self._lse is None:
            raise RuntimeError("Merge.result must follow at least one Merge.add")
        return self._out, self._lse


def for_backward(lse: Tensor) -> Tensor:
    """Return `lse` without -inf, so that exp(-inf - lse) is 0 for queries that see no key."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add one more term to the softmax of each query, with no value: attention that goes nowhere.

    Backward by blocks (Note [Backward by blocks]) is right with what this returns.

    Args:
        out: [B, H, Q, E] over all keys. May be overwritten.
        lse: [B, H, Q] likewise.
        sinks: [H], the score of the term; None: there is no such term.

    Returns:
        Output and log-sum-exp with the term in it.
    """
    if sinks is None:
        return out, lse
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    return out.mul_((lse - total).exp().to(out.dtype).unsqueeze(-1)), total


def sinks_gradient(sinks: Tensor, *, grad_out: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Return the gradient of the scores of `with_sinks`, [H], summed over batch and queries.

    Args:
        sinks: [H].
        grad_out: [B, H, Q, E].
        out: What `with_sinks` returned.
        lse: What `with_sinks` returned.
    """
    delta = (grad_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return (weights * delta).sum((0, 2)).neg().to(sinks.dtype)
