"""Which positions of a sequence a rank holds, and moving between the whole and the parts.

A layout cuts the sequence into equal chunks and gives each rank some of them. Tokens, labels,
position ids and document ids are split by the same function, so that they cannot disagree.

Shape symbols: S length of the whole sequence, N ranks of the group, s = S / N.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_context.batch.checks import check_two_axes
from hp_platform import all_gather_uneven, resolve_group


class SequenceLayout(ABC):
    """How a sequence is dealt out to ranks, in equal chunks."""

    chunks_per_rank: ClassVar[int]

    @abstractmethod
    def chunks(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Return the numbers of the chunks that `rank` holds, in the order it holds them."""

    def runs(self, seq_len: int, num_ranks: int) -> tuple[tuple[range, ...], ...]:
        """Return the positions of each rank as runs, in the order it holds them.

        Raises:
            ValueError: The number of chunks does not divide `seq_len` (S).
        """
        size = _chunk_size(self, seq_len, num_ranks)
        return tuple(
            tuple(range(i * size, (i + 1) * size) for i in self.chunks(rank, num_ranks))
            for rank in range(num_ranks)
        )

    def order(self, num_ranks: int) -> tuple[int, ...]:
        """Return all chunks as they lie when the parts follow each other by rank."""
        return tuple(chain.from_iterable(self.chunks(r, num_ranks) for r in range(num_ranks)))


@dataclass(frozen=True, slots=True)
class Contiguous(SequenceLayout):
    """Rank r holds positions r*s ... (r+1)*s - 1."""

    chunks_per_rank: ClassVar[int] = 1

    def chunks(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """One chunk; see `SequenceLayout.chunks`."""
        del num_ranks
        return (rank,)


@dataclass(frozen=True, slots=True)
class HeadTail(SequenceLayout):
    """Rank r holds chunks r and 2N - 1 - r of 2N (zigzag).

    Under a causal mask a query sees the more keys the later it is. Each rank has as many early
    positions as late ones here, so all have the same work.
    """

    chunks_per_rank: ClassVar[int] = 2

    def chunks(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """One chunk from each end; see `SequenceLayout.chunks`."""
        return (rank, 2 * num_ranks - 1 - rank)


CONTIGUOUS = Contiguous()


def local_positions(
    seq_len: int,
    mesh_or_group: DeviceMesh | dist.ProcessGroup,
    *,
    layout: SequenceLayout = CONTIGUOUS,
    ulysses_degree: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the global positions this rank holds: int64 [s], the input of rotary embeddings.

    Args:
        seq_len: Length of the whole sequence, S.
        mesh_or_group: Same as in `shard_sequence`.
        layout: Same as in `shard_sequence`.
        ulysses_degree: Same as in `shard_sequence`.
        device: Device of the result.

    Raises:
        ValueError: The layout cannot split S evenly, or the mesh does not fit.
    """
    place = _place(mesh_or_group, ulysses_degree)
    runs = layout.runs(seq_len, place.num_ranks)[place.rank]
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def shard_sequence(
    x: Tensor,
    mesh_or_group: DeviceMesh | dist.ProcessGroup,
    *,
    seq_dim: int = 1,
    layout: SequenceLayout = CONTIGUOUS,
    ulysses_degree: int | None = None,
) -> Tensor:
    """Return this rank's part of `x`, which every rank holds whole.

    Args:
        x: S at `seq_dim`, any other dimensions, any dtype.
        mesh_or_group: The ranks that share the sequence: a group, a mesh of one axis, or that of
            two axes, outer and inner, that `ContextParallel` was applied to.
        seq_dim: Dimension of the sequence.
        layout: Which positions are whose.
        ulysses_degree: Ulysses degree of `ContextParallel`. Needed for a mesh of two axes alone,
            which otherwise may as well mean data parallelism times context parallelism.

    Returns:
        A contiguous copy with s at `seq_dim`.

    Raises:
        ValueError: The layout cannot split S evenly, or the mesh does not fit.
    """
    place = _place(mesh_or_group, ulysses_degree)
    num_ranks = place.num_ranks
    size = _chunk_size(layout, x.size(seq_dim), num_ranks)
    parts = [x.narrow(seq_dim, i * size, size) for i in layout.chunks(place.rank, num_ranks)]
    if len(parts) > 1:
        return torch.cat(parts, seq_dim).contiguous()
    return parts[0].clone(memory_format=torch.contiguous_format)


def unshard_sequence(
    x: Tensor,
    mesh_or_group: DeviceMesh | dist.ProcessGroup,
    *,
    seq_dim: int = 1,
    layout: SequenceLayout = CONTIGUOUS,
    ulysses_degree: int | None = None,
) -> Tensor:
    """Return the whole of what `shard_sequence` split, on every rank.

    Differentiable: the gradient of a part is the sum of what all ranks computed from it. A
    loss that every rank computes from the whole is hence counted N times.

    Args:
        x: s at `seq_dim`, the same shape on every rank.
        mesh_or_group: The ranks that share the sequence, as passed to `shard_sequence`.
        seq_dim: Dimension of the sequence.
        layout: Layout of the split, as passed to `shard_sequence`.
        ulysses_degree: Same as in `shard_sequence`.

    Returns:
        Like `x` with S at `seq_dim`, in the order of positions.

    Raises:
        ValueError: The layout cannot have made a part of s positions, or the mesh does not fit.
    """
    place = _place(mesh_or_group, ulysses_degree)
    layout.runs(x.size(seq_dim) * place.num_ranks, place.num_ranks)
    whole = x.contiguous()
    for group in place.groups:
        sizes = [whole.size(seq_dim)] * group.size()
        whole = all_gather_uneven(whole, sizes=sizes, dim=seq_dim, group=group)
    return to_positions(whole, layout, num_ranks=place.num_ranks, seq_dim=seq_dim)


class _Place(NamedTuple):
    """One rank among those that share a sequence; `groups` are its axes, the innermost first."""

    rank: int
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def num_ranks(self) -> int:
        return math.prod([group.size() for group in self.groups])


def _place(mesh_or_group: DeviceMesh | dist.ProcessGroup, degree: int | None) -> _Place:
    if isinstance(mesh_or_group, DeviceMesh) and mesh_or_group.ndim > 1 and degree is not None:
        check_two_axes(mesh_or_group, degree)
        outer, inner = mesh_or_group.get_group(0), mesh_or_group.get_group(1)
        return _Place(outer.rank() * inner.size() + inner.rank(), (inner, outer))
    group = resolve_group(mesh_or_group)
    return _Place(group.rank(), (group,))


def _chunk_size(layout: SequenceLayout, seq_len: int, num_ranks: int) -> int:
    num_chunks = layout.chunks_per_rank * num_ranks
    if seq_len % num_chunks:
        each = f"{layout.chunks_per_rank} times " if layout.chunks_per_rank > 1 else ""
        raise ValueError(
            f"sequence length ({seq_len}) must be divisible by {each}the number of ranks "
            f"({num_ranks}); pad it by {-seq_len % num_chunks}"
        )
    return seq_len // num_chunks


def to_positions(x: Tensor, layout: SequenceLayout, *, num_ranks: int, seq_dim: int) -> Tensor:
    """Put parts that follow each other by rank into the order of positions. Differentiable."""
    order = layout.order(num_ranks)
    return _reorder(x, [order.index(i) for i in range(len(order))], seq_dim)


def to_ranks(x: Tensor, layout: SequenceLayout, *, num_ranks: int, seq_dim: int) -> Tensor:
    """Undo `to_positions`. Differentiable."""
    return _reorder(x, list(layout.order(num_ranks)), seq_dim)


def _reorder(x: Tensor, order: list[int], dim: int) -> Tensor:
    """Return the chunks of `x` along `dim` in another order; `x` itself where they are in it."""
    if order == sorted(order):
        return x
    dim %= x.ndim
    chunks = x.unflatten(dim, (len(order), -1)).unbind(dim)
    return torch.cat([chunks[i] for i in order], dim)
