"""Sequences of a batch that ranks share: layouts, and moving between the whole and the parts.

A layout cuts the sequence into runs and gives each rank some of them. Tokens, labels, position ids
and document ids are split by the same function, so that they cannot disagree.

Shape symbols: S length of the whole sequence, N ranks of the group, s = S / N.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from operator import and_
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hp_context.checks import check_two_axes
from hp_context.masks import Both, EachSequence, Full, Mask
from hp_platform import all_gather_uneven, resolve_group


class SequenceLayout(ABC):
    """A division of a sequence over ranks: equal chunks, unless a subclass defines `runs`."""

    chunks_per_rank: ClassVar[int]

    @abstractmethod
    def chunks(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Return the numbers of the chunks of `rank`, in its order."""

    def runs(self, seq_len: int, num_ranks: int) -> tuple[tuple[range, ...], ...]:
        """Return the positions of each rank as runs, in its order.

        Raises:
            ValueError: The number of chunks does not divide `seq_len` (S).
        """
        size = _chunk_size(self, seq_len, num_ranks)
        return tuple(
            tuple(range(i * size, (i + 1) * size) for i in self.chunks(rank, num_ranks))
            for rank in range(num_ranks)
        )


@dataclass(frozen=True, slots=True)
class Contiguous(SequenceLayout):
    """Rank r holds positions r*s ... (r+1)*s - 1."""

    chunks_per_rank: ClassVar[int] = 1

    def chunks(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Return one chunk; see `SequenceLayout.chunks`."""
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
        """Return one chunk from each end; see `SequenceLayout.chunks`."""
        return (rank, 2 * num_ranks - 1 - rank)


@dataclass(frozen=True)
class Deal(SequenceLayout, Mask):
    """The layout of a single sequence, run by run.

    It travels with the call: `attn_mask=Causal() & Documents(lengths) & deal` tells a core
    attention under `ContextParallel` that q, k and v have these positions. As a mask it limits
    nothing. `deal_documents` makes one.

    Args:
        parts: Positions of each rank, as runs in the order that it has them. Together they are all
            positions of the sequence, each once. Ranks may have different numbers of them where
            keys are gathered or travel, but not where heads are shared.

    Raises:
        ValueError: A position is missing, or is there twice, or a rank has none.

    Example:
        >>> Deal(((range(0, 2), range(6, 8)), (range(2, 6),))).seq_len
        8
    """

    chunks_per_rank: ClassVar[int] = 1

    parts: tuple[tuple[range, ...], ...]

    def __post_init__(self) -> None:
        ordered = sorted(chain.from_iterable(self.parts), key=lambda run: run.start)
        position = 0
        for run in ordered:
            if run.start != position or run.step != 1 or not run:
                raise ValueError(
                    f"runs of a Deal must be all positions, each once, but after {position} comes "
                    f"{run}"
                )
            position = run.stop
        if not all(self.parts) or not ordered:
            raise ValueError(f"parts of a Deal ({self.parts}) must have positions, each of them")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.parts)

    def allowed(self, query: Tensor, key: Tensor) -> Tensor:
        """Return all true; see `Mask.allowed`."""
        return torch.ones_like(query - key, dtype=torch.bool)

    def visible(self, query: int) -> range:
        """Return all keys; see `Mask.visible`."""
        return Full().visible(query)

    def check(self, seq_len: int) -> None:
        """See `Mask.check`."""
        if seq_len != self.seq_len:
            raise ValueError(
                f"sequence length ({seq_len}) must be that of the Deal ({self.seq_len})"
            )

    @cached_property
    def seq_len(self) -> int:
        """Return the length of the sequence, S."""
        return sum(map(len, chain.from_iterable(self.parts)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Return the number of positions of each rank."""
        return tuple(sum(map(len, part)) for part in self.parts)

    def chunks(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """Refuse: runs have no numbers here.

        Raises:
            ValueError: Always; see `runs`.
        """
        raise ValueError(f"a Deal has no equal chunks (rank {rank} of {num_ranks}): use runs")

    def runs(self, seq_len: int, num_ranks: int) -> tuple[tuple[range, ...], ...]:
        """See `SequenceLayout.runs`.

        Raises:
            ValueError: It is of another length, or of other ranks.
        """
        if seq_len != self.seq_len or num_ranks != len(self.parts):
            raise ValueError(
                f"sequence length ({seq_len}) and number of ranks ({num_ranks}) must be those of "
                f"the Deal ({self.seq_len} and {len(self.parts)})"
            )
        return self.parts


CONTIGUOUS = Contiguous()


def without_deal(mask: Mask) -> tuple[Mask | None, Deal | None]:
    """Return a mask without its layout, None if nothing is left, and the layout.

    Raises:
        ValueError: Two layouts came with it, or one for each sequence of a batch.
    """
    if isinstance(mask, Deal):
        return None, mask
    if isinstance(mask, EachSequence):
        limits, deals = zip(*map(without_deal, mask.masks), strict=True)
    elif isinstance(mask, Both):
        limits, deals = zip(*map(without_deal, (mask.first, mask.second)), strict=True)
        deals = tuple(filter(None, deals))
    else:
        return mask, None
    if len(set(deals)) > 1:
        raise ValueError(
            f"a call must have one Deal, but {len(set(deals))} came with its mask: attend to "
            "sequences that are dealt out differently one after the other"
        )
    if not deals or deals[0] is None:
        return mask, None
    if isinstance(mask, EachSequence):
        return EachSequence(tuple(Full() if each is None else each for each in limits)), deals[0]
    rest = [each for each in limits if each is not None]
    return (reduce(and_, rest) if rest else None), deals[0]


def local_positions(
    seq_len: int,
    mesh_or_group: DeviceMesh | dist.ProcessGroup,
    *,
    layout: SequenceLayout = CONTIGUOUS,
    ulysses_degree: int | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """Return the global positions of this rank: int64 [s], the input of rotary embeddings.

    Args:
        seq_len: Length of the whole sequence, S.
        mesh_or_group: Same as in `shard_sequence`.
        layout: Same as in `shard_sequence`.
        ulysses_degree: Same as in `shard_sequence`.
        device: Device of the result.

    Raises:
        ValueError: The layout cannot split S evenly, or the mesh does not fit.
    """
    place = _member(mesh_or_group, ulysses_degree)
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
    """Return this rank's part of `x`, which every rank has whole.

    Args:
        x: S at `seq_dim`, any other dimensions, any dtype.
        mesh_or_group: The ranks that share the sequence: a group, a mesh of one axis, or that of
            two axes, outer and inner, that `ContextParallel` was applied to.
        seq_dim: Dimension of the sequence.
        layout: Positions of each rank.
        ulysses_degree: Ulysses degree of `ContextParallel`. Needed for a mesh of two axes alone,
            which otherwise may as well mean data parallelism times context parallelism.

    Returns:
        A contiguous copy with s at `seq_dim`.

    Raises:
        ValueError: The layout cannot split S evenly, or the mesh does not fit.
    """
    place = _member(mesh_or_group, ulysses_degree)
    runs = layout.runs(x.size(seq_dim), place.num_ranks)[place.rank]
    parts = [x.narrow(seq_dim, run.start, len(run)) for run in runs]
    if len(parts) != 1:
        parts = parts or [x.narrow(seq_dim, 0, 0)]
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
    """Return the whole tensor that `shard_sequence` has split, on every rank.

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
    place = _member(mesh_or_group, ulysses_degree)
    num_ranks, whole = place.num_ranks, x.contiguous()
    seq_len = length_of(layout, x.size(seq_dim), num_ranks)
    sizes = [sum(map(len, runs)) for runs in layout.runs(seq_len, num_ranks)]
    if sizes[place.rank] != x.size(seq_dim):
        raise ValueError(
            f"sequence of x ({x.size(seq_dim)}) must be what the layout gives rank {place.rank} "
            f"({sizes[place.rank]})"
        )
    inner = 1  # ranks whose parts are one piece already
    for group in place.groups:
        pieces = [sum(sizes[i : i + inner]) for i in range(0, num_ranks, inner)]
        first = place.rank // inner - group.rank()
        held = pieces[first : first + group.size()]
        whole = all_gather_uneven(whole, sizes=held, dim=seq_dim, group=group)
        inner *= group.size()
    return to_positions(whole, layout, num_ranks=num_ranks, seq_dim=seq_dim)


class _Member(NamedTuple):
    """This rank among those that share a sequence; `groups` are its axes, the innermost first."""

    rank: int
    groups: tuple[dist.ProcessGroup, ...]

    @property
    def num_ranks(self) -> int:
        return math.prod([group.size() for group in self.groups])


def _member(mesh_or_group: DeviceMesh | dist.ProcessGroup, degree: int | None) -> _Member:
    if isinstance(mesh_or_group, DeviceMesh) and mesh_or_group.ndim > 1 and degree is not None:
        check_two_axes(mesh_or_group, degree)
        outer, inner = mesh_or_group.get_group(0), mesh_or_group.get_group(1)
        return _Member(outer.rank() * inner.size() + inner.rank(), (inner, outer))
    group = resolve_group(mesh_or_group)
    return _Member(group.rank(), (group,))


def _chunk_size(layout: SequenceLayout, seq_len: int, num_ranks: int) -> int:
    num_chunks = layout.chunks_per_rank * num_ranks
    if seq_len % num_chunks:
        each = f"{layout.chunks_per_rank} times " if layout.chunks_per_rank > 1 else ""
        raise ValueError(
            f"sequence length ({seq_len}) must be divisible by {each}the number of ranks "
            f"({num_ranks}); pad it by {-seq_len % num_chunks}"
        )
    return seq_len // num_chunks


def length_of(layout: SequenceLayout, part: int, num_ranks: int) -> int:
    """Return the length of the whole sequence of which a rank has `part` positions."""
    return layout.seq_len if isinstance(layout, Deal) else part * num_ranks


def check_part(layout: SequenceLayout, part: int, *, group: dist.ProcessGroup, degree: int) -> None:
    """Raise `ValueError` if a rank has other positions than a `Deal` of this call gives it.

    Args:
        layout: Positions of each rank.
        part: Number of positions that this rank has.
        group: The ranks.
        degree: Number of ranks that share heads.
    """
    if not isinstance(layout, Deal):
        return
    layout.runs(layout.seq_len, group.size())
    if layout.sizes[group.rank()] != part:
        raise ValueError(
            f"sequence of q ({part}) must be what the Deal gives rank {group.rank()} "
            f"({layout.sizes[group.rank()]})"
        )
    if degree > 1 and len(set(layout.sizes)) > 1:
        raise ValueError(
            f"parts of the Deal ({layout.sizes}) must be equal where {degree} ranks share heads"
        )


def to_positions(x: Tensor, layout: SequenceLayout, *, num_ranks: int, seq_dim: int) -> Tensor:
    """Put parts that follow each other by rank into the order of positions. Differentiable."""
    runs = list(chain.from_iterable(layout.runs(x.size(seq_dim), num_ranks)))
    order = sorted(range(len(runs)), key=lambda i: runs[i].start)
    return _reorder(x, [len(run) for run in runs], order, seq_dim)


def to_ranks(x: Tensor, layout: SequenceLayout, *, num_ranks: int, seq_dim: int) -> Tensor:
    """Undo `to_positions`. Differentiable."""
    runs = list(chain.from_iterable(layout.runs(x.size(seq_dim), num_ranks)))
    order = sorted(range(len(runs)), key=lambda i: runs[i].start)
    places = sorted(range(len(order)), key=order.__getitem__)
    return _reorder(x, [len(runs[i]) for i in order], places, seq_dim)


def _reorder(x: Tensor, sizes: list[int], order: list[int], dim: int) -> Tensor:
    """Return runs of `x` along `dim` in another order; `x` itself where they are in it."""
    if order == sorted(order):
        return x
    runs = x.split(sizes, dim)
    return torch.cat([runs[i] for i in order], dim)
