"""The Ulysses exchange: a part of the sequence with all heads <-> all of it with a part of them.

From "DeepSpeed Ulysses" (Jacobs et al. 2023, arXiv:2309.14509). Both directions are one
all-to-all and each is the other's backward.

Shape symbols: N ranks, S whole sequence, s = S / N, H heads, h = H / N, `...` any other dims.
In the docstrings the sequence comes first; any two dims below the last will do.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from hp_platform import all_to_all


def seq_to_head(
    x: Tensor,
    *,
    group: ProcessGroup,
    seq_dim: int = 1,
    head_dim: int = 2,
    head_index: tuple[int, ...] | None = None,
) -> Tensor:
    """Exchange [s, H, ...] for [S, h, ...]. Differentiable.

    Args:
        x: This rank's positions with all heads.
        group: The ranks that share the sequence.
        seq_dim: Dimension of the sequence.
        head_dim: Dimension of the heads.
        head_index: The heads to send, rank by rank, each as often as it is needed; h is then
            its length over N, and the gradients of replicas are summed.

    Returns:
        All positions in rank order with this rank's heads.
    """
    num_ranks = group.size()
    if head_index is None:
        packed = x.unflatten(head_dim, (num_ranks, -1)).movedim(head_dim, 0).contiguous()
    else:
        packed = _PackHeads.apply(x, head_dim, head_index, num_ranks)
    received: Tensor = all_to_all(packed, group=group)
    return received.movedim(0, seq_dim).flatten(seq_dim, seq_dim + 1)


def head_to_seq(x: Tensor, *, group: ProcessGroup, seq_dim: int = 1, head_dim: int = 2) -> Tensor:
    """Exchange [S, h, ...] for [s, H, ...]. Differentiable; the inverse of `seq_to_head`.

    Args:
        x: All positions with this rank's heads. Heads merged with the head size, [S, h * D],
            are exchanged just as well.
        group: The ranks that share the sequence.
        seq_dim: Dimension of the sequence.
        head_dim: Dimension of the heads.

    Returns:
        This rank's positions with all heads in rank order.
    """
    packed = x.unflatten(seq_dim, (group.size(), -1)).movedim(seq_dim, 0).contiguous()
    received: Tensor = all_to_all(packed, group=group)
    return received.movedim(0, head_dim).flatten(head_dim, head_dim + 1)


class _PackHeads(torch.autograd.Function):
    """Copy the indexed heads into the send buffer; no repeated tensor is made beside it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, head_dim: int, index: tuple[int, ...], num_ranks: int
    ) -> Tensor:
        ctx.head_dim, ctx.index, ctx.shape = head_dim, index, x.shape
        return pack_heads(x, head_dim, index, num_ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return sum_packed(grad, ctx.head_dim, ctx.index, ctx.shape), None, None, None


def pack_heads(x: Tensor, head_dim: int, index: tuple[int, ...], num_ranks: int) -> Tensor:
    """Return [N, s, h, ...], the heads `index` names of `x` [s, H, ...]; outside autograd."""
    per_rank = len(index) // num_ranks
    shape = (*x.shape[:head_dim], per_rank, *x.shape[head_dim + 1 :])
    packed = x.new_empty((num_ranks, *shape))
    heads = _on_device(index, x.device).view(num_ranks, per_rank)
    for part, wanted in zip(packed, heads, strict=True):
        torch.index_select(x, head_dim, wanted, out=part)
    return packed


def sum_packed(grad: Tensor, head_dim: int, index: tuple[int, ...], shape: Sequence[int]) -> Tensor:
    """Return the gradient [s, H, ...] (`shape`) of what `pack_heads` was given."""
    slots = grad.movedim(0, head_dim).flatten(head_dim, head_dim + 1)
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = grad.new_zeros(shape, dtype=wide)
    for heads, taken in _rounds(index):
        # A round names a head at most once: the sum has one order, on every device.
        part = slots.index_select(head_dim, _on_device(taken, grad.device)).to(wide)
        total.index_add_(head_dim, _on_device(heads, grad.device), part)
    return total.to(grad.dtype)


@lru_cache(maxsize=256)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


@lru_cache(maxsize=256)
def _rounds(index: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Split slots into rounds of distinct heads, as (heads, slots): first replicas, second, ..."""
    rounds: list[list[tuple[int, int]]] = []
    seen: dict[int, int] = {}
    for slot, head in enumerate(index):
        replica = seen.get(head, 0)
        seen[head] = replica + 1
        if replica == len(rounds):
            rounds.append([])
        rounds[replica].append((head, slot))
    return [(tuple(h for h, _ in pairs), tuple(s for _, s in pairs)) for pairs in rounds]
