"""The Ulysses exchange: a part of the sequence with all heads <-> all of it with a part of them.

From "DeepSpeed Ulysses" (Jacobs et al. 2023, arXiv:2309.14509). Both directions are one
all-to-all and each is the other's backward.

Shape symbols: N ranks, S whole sequence, s = S / N, H heads, h = H / N, `...` any other dims.
In the docstrings the sequence comes first; any two dims below the last will do.
"""

from dataclasses import dataclass
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
    head_counts: tuple[int, ...] | None = None,
) -> Tensor:
    """Exchange [s, H, ...] for [S, h, ...]. Differentiable.

    Args:
        x: This rank's positions with all heads.
        group: The ranks that share the sequence.
        seq_dim: Dimension of the sequence.
        head_dim: Dimension of the heads.
        head_index: The heads to send, rank by rank, each as often as it is needed; the gradients
            of replicas are summed. None: each once, in order.
        head_counts: Number of heads that go to each rank. None: as many to each.

    Returns:
        All positions in rank order with this rank's heads.
    """
    packing = Packing(group.size(), head_dim, head_index, head_counts)
    packed = packing.pack(x) if head_index is None else _Pack.apply(x, packing)
    sent, received = packing.splits(x.shape, group.rank())
    y: Tensor = all_to_all(packed, input_splits=sent, output_splits=received, group=group)
    return packing.arrived(y, x.shape, group.rank(), seq_dim)


def head_to_seq(
    x: Tensor,
    *,
    group: ProcessGroup,
    seq_dim: int = 1,
    head_dim: int = 2,
    head_counts: tuple[int, ...] | None = None,
) -> Tensor:
    """Exchange [S, h, ...] for [s, H, ...]. Differentiable; the inverse of `seq_to_head`.

    Args:
        x: All positions with this rank's heads. Heads merged with the head size, [S, h * D],
            are exchanged just as well.
        group: The ranks that share the sequence.
        seq_dim: Dimension of the sequence.
        head_dim: Dimension of the heads.
        head_counts: Number of heads of each rank. None: as many each.

    Returns:
        This rank's positions with all heads in rank order.
    """
    packed = x.unflatten(seq_dim, (group.size(), -1)).movedim(seq_dim, 0)
    packing = Packing(group.size(), head_dim, None, head_counts)
    shape = list(packed.shape[1:])
    if head_counts is not None:
        shape[head_dim] = shape[head_dim] // head_counts[group.rank()] * sum(head_counts)
        packed = packed.reshape(-1)
    received, sent = packing.splits(torch.Size(shape), group.rank())
    y: Tensor = all_to_all(
        packed.contiguous(), input_splits=sent, output_splits=received, group=group
    )
    return packing.unpacked(y, torch.Size(shape))


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of the heads of a tensor in the buffer that is sent.

    Equal numbers of heads: [N, s, h, ...]. Others: the [s, h_r, ...] of each rank r, flat, one
    after the other.

    Attributes:
        num_ranks: Number of ranks, N.
        head_dim: Dimension of the heads.
        index: The heads that are sent, rank by rank; None: all, in order.
        counts: Number of them that each rank gets; None: as many each.
    """

    num_ranks: int
    head_dim: int
    index: tuple[int, ...] | None
    counts: tuple[int, ...] | None

    def pack(self, x: Tensor) -> Tensor:
        """Return the send buffer for `x` [s, H, ...]; differentiable unless heads are indexed."""
        if self.counts is None:
            if self.index is not None:
                return self._pack_equal(x, self.index)
            parts: Tensor = x.unflatten(self.head_dim, (self.num_ranks, -1))
            return parts.movedim(self.head_dim, 0).contiguous()
        if self.index is None:
            blocks = x.split(list(self.counts), self.head_dim)
            return torch.cat([block.reshape(-1) for block in blocks])
        wanted = _on_device(self.index, x.device).split(list(self.counts))
        return torch.cat([x.index_select(self.head_dim, part).reshape(-1) for part in wanted])

    def splits(
        self, shape: torch.Size, rank: int
    ) -> tuple[list[int], list[int]] | tuple[None, None]:
        """Return the sizes sent to and received from each rank, for [s, H, ...] (`shape`)."""
        if self.counts is None:
            return None, None
        size = self._slot(shape, 1).numel()
        mine = self.counts[rank] * size
        return [n * size for n in self.counts], [mine] * self.num_ranks

    def arrived(self, received: Tensor, shape: torch.Size, rank: int, seq_dim: int) -> Tensor:
        """Return [S, h, ...] from the buffer received for [s, H, ...] (`shape`)."""
        if self.counts is not None:
            received = received.view(self.num_ranks, *self._slot(shape, self.counts[rank]))
        return received.movedim(0, seq_dim).flatten(seq_dim, seq_dim + 1)

    def unpacked(self, packed: Tensor, shape: torch.Size) -> Tensor:
        """Return [s, slots, ...] from a buffer laid out as by `pack`, in the order of ranks."""
        dim = self.head_dim
        if self.counts is None:
            slots: Tensor = packed.movedim(0, dim).flatten(dim, dim + 1)
            return slots
        shapes = [self._slot(shape, n) for n in self.counts]
        parts = packed.split([s.numel() for s in shapes])
        return torch.cat([part.view(s) for part, s in zip(parts, shapes, strict=True)], dim)

    def summed(self, packed: Tensor, shape: torch.Size) -> Tensor:
        """Return the gradient [s, H, ...] (`shape`) of the argument of `pack`; outside autograd."""
        slots = self.unpacked(packed, shape)
        if self.index is None:
            return slots
        wide = torch.promote_types(packed.dtype, torch.float32)
        total = packed.new_zeros(shape, dtype=wide)
        for heads, taken in _rounds(self.index):
            # A round names a head at most once: the sum has one order, on every device.
            part = slots.index_select(self.head_dim, _on_device(taken, packed.device)).to(wide)
            total.index_add_(self.head_dim, _on_device(heads, packed.device), part)
        return total.to(packed.dtype)

    def _pack_equal(self, x: Tensor, index: tuple[int, ...]) -> Tensor:
        shape = self._slot(x.shape, len(index) // self.num_ranks)
        packed = x.new_empty((self.num_ranks, *shape))
        heads = _on_device(index, x.device).view(self.num_ranks, -1)
        for part, wanted in zip(packed, heads, strict=True):
            torch.index_select(x, self.head_dim, wanted, out=part)
        return packed

    def _slot(self, shape: torch.Size, count: int) -> torch.Size:
        """Return the shape of `count` heads of [s, H, ...] (`shape`), merged with D or not."""
        merged = 1
        if self.index is None and self.counts is not None:
            merged = shape[self.head_dim] // sum(self.counts)
        dim = self.head_dim
        return torch.Size((*shape[:dim], count * merged, *shape[dim + 1 :]))


class _Pack(torch.autograd.Function):
    """Copy the indexed heads into the send buffer; no repeated tensor is made beside it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packing: Packing) -> Tensor:
        ctx.packing, ctx.shape = packing, x.shape
        return packing.pack(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.packing.summed(grad, ctx.shape), None


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
