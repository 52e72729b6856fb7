"""Tensors as messages: one per pair of ranks and step, described to the other end, and back.

There is no copy where a message is one contiguous slice of a tensor.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hp_vtp.plan import StepKind, TransferPlan
from hp_vtp.topology.stages import Edge, Replicated, Sharded

HEADER_SIZE = 512  # bytes
_DIGEST = 32
ALIGNMENT = 16  # bytes; so that a receiver may view any element type in place


class Piece(NamedTuple):
    """The units `[start, stop)` of one tensor, at a byte offset within a message."""

    tensor: int
    start: int
    stop: int
    offset: int
    size: int


class Message(NamedTuple):
    """Pieces that one rank sends to another in a step; ranks are global."""

    sender: int
    receiver: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Return the bytes of the whole message."""
        last = self.pieces[-1]
        return last.offset + last.size


class MessageStep(NamedTuple):
    """Messages that may travel at the same time.

    Their order is the same on every rank. Ranks that issue their sends and receives in this order
    cannot deadlock even where each blocks until its peer arrives: of all messages still open, both
    ends of the first one have nothing else to do before it.
    """

    kind: StepKind
    round: int
    messages: tuple[Message, ...]

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.round}"


def bundle(plans: Sequence[TransferPlan], edge: Edge) -> tuple[MessageStep, ...]:
    """Merge the plans of several tensors that cross an edge together.

    Returns:
        Steps in order of round, then COLLECT before HOP before SPREAD, which is the order of every
        plan. Tensors may differ in algorithm and number of chunks.
    """
    merged: dict[tuple[int, StepKind], dict[tuple[int, int], list[Piece]]] = {}
    for tensor, plan in enumerate(plans):
        for step in plan.steps:
            senders, receivers = _ends(step.kind, edge)
            pairs = merged.setdefault((step.round, step.kind), {})
            for move in step.moves if plan.unit_bytes else ():
                pieces = pairs.setdefault((senders[move.sender], receivers[move.receiver]), [])
                end = pieces[-1].offset + pieces[-1].size if pieces else 0
                offset = -(-end // ALIGNMENT) * ALIGNMENT
                size = (move.stop - move.start) * plan.unit_bytes
                pieces.append(Piece(tensor, move.start, move.stop, offset, size))
    return tuple(
        MessageStep(
            kind,
            number,
            tuple(Message(*pair, tuple(pieces)) for pair, pieces in sorted(pairs.items())),
        )
        for (number, kind), pairs in sorted(merged.items())
        if pairs
    )


def _ends(kind: StepKind, edge: Edge) -> tuple[tuple[int, ...], tuple[int, ...]]:
    senders = edge.destination_ranks if kind == StepKind.SPREAD else edge.source_ranks
    receivers = edge.source_ranks if kind == StepKind.COLLECT else edge.destination_ranks
    return senders, receivers


def to_header(text: str) -> bytes:
    """Return the description of a transfer as exactly `HEADER_SIZE` bytes: different texts differ.

    Both ends of an edge exchange it before a transfer, so that no mistake becomes data: Gloo takes
    a bfloat16 message into a float32 buffer of as many bytes, and a short message into a longer
    buffer, without an error.

    Args:
        text: Readable description; at most `HEADER_SIZE - 32` bytes of it travel, behind the
            SHA-256 digest of all.
    """
    data = text.encode()
    return (hashlib.sha256(data).digest() + data).ljust(HEADER_SIZE, b"\0")[:HEADER_SIZE]


def text_of(header: bytes) -> str:
    """Return the readable text of a header."""
    return header[_DIGEST:].rstrip(b"\0").decode(errors="replace")


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Metadata of a tensor on which both ends of an edge must agree.

    Attributes:
        shape: Global shape, also where a rank holds a part.
        dtype: Element type.
        replicated: The tensor is replicated at both ends, whatever the stages' boundaries say,
            for example a mask that travels with sequence-parallel activations.
        requires_grad: Whether the received tensor is a leaf that requires grad. None: an activation
            of a floating-point type is, a gradient is not. Never where gradients are switched off.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    replicated: bool = False
    requires_grad: bool | None = None

    def is_leaf_on(self, edge: Edge) -> bool:
        """Tell whether the tensor is delivered as a leaf that requires grad."""
        if self.requires_grad is None:
            return edge.is_forward and self.dtype.is_floating_point
        return self.requires_grad


@dataclass(frozen=True, slots=True)
class Workspace:
    """The range of a tensor's units that a rank holds while a transfer runs.

    Attributes:
        plan: Plan of the tensor's transfer.
        start: First unit that is held.
        tensor: The units, contiguous.
    """

    plan: TransferPlan
    start: int
    tensor: Tensor

    @classmethod
    def of_source(cls, plan: TransferPlan, index: int, tensor: Tensor) -> "Workspace":
        """Return room for the units that source rank `index` sends, filled with its own part."""
        own = plan.source_range(index)
        start, stop = plan.workspace_range(index, at_destination=False)
        if (start, stop) == own:
            return cls(plan, start, tensor)
        room = cls(plan, start, tensor.new_empty(plan.range_shape(start, stop)))
        room.units(*own).copy_(tensor)
        return room

    @classmethod
    def of_destination(
        cls,
        plan: TransferPlan,
        index: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        into: Tensor | None = None,
    ) -> "Workspace":
        """Return room for the units that destination rank `index` gets; `into` if it is enough."""
        start, stop = plan.workspace_range(index, at_destination=True)
        if into is not None and (start, stop) == plan.destination_range(index):
            return cls(plan, start, into)
        shape = plan.range_shape(start, stop)
        return cls(plan, start, torch.empty(shape, dtype=dtype, device=device))

    def units(self, start: int, stop: int) -> Tensor:
        """Return a view of a range of units."""
        first = start - self.start
        if self.plan.dim is None:
            return self.tensor.view(-1)[first : first + stop - start]
        return self.tensor.narrow(self.plan.dim, first, stop - start)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory until the work of `stream` so far has been done."""
        self.tensor.record_stream(stream)

    def result(self, index: int) -> Tensor:
        """Return the part of destination rank `index`."""
        own = self.units(*self.plan.destination_range(index))
        return own.contiguous().view(self.plan.destination_shape(index))


def as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor as 1-D uint8."""
    return x.view(-1).view(torch.uint8)


def pack(message: Message, workspaces: Sequence[Workspace]) -> Tensor:
    """Return the bytes of a message; a view of the tensor where it is one contiguous piece."""
    parts = [workspaces[piece.tensor].units(piece.start, piece.stop) for piece in message.pieces]
    if len(parts) == 1:
        return as_bytes(parts[0].contiguous())
    # Zeros, so that the gaps of alignment never carry what the memory held before.
    buffer = torch.zeros(message.size, dtype=torch.uint8, device=parts[0].device)
    for piece, part in zip(message.pieces, parts, strict=True):
        _slot(buffer, piece).copy_(as_bytes(part.contiguous()))
    return buffer


def receive_buffer(message: Message, workspaces: Sequence[Workspace]) -> Tensor:
    """Return memory to receive a message in: the place itself if it is one contiguous piece."""
    first = message.pieces[0]
    target = workspaces[first.tensor].units(first.start, first.stop)
    if len(message.pieces) == 1 and target.is_contiguous():
        return as_bytes(target)
    return torch.empty(message.size, dtype=torch.uint8, device=target.device)


def unpack(message: Message, buffer: Tensor, workspaces: Sequence[Workspace]) -> None:
    """Copy a received message to its places, unless it was received in place."""
    for piece in message.pieces:
        target = workspaces[piece.tensor].units(piece.start, piece.stop)
        if target.data_ptr() == buffer.data_ptr():
            return
        part = torch.empty_like(target, memory_format=torch.contiguous_format)
        as_bytes(part).copy_(_slot(buffer, piece))
        target.copy_(part)


def _slot(buffer: Tensor, piece: Piece) -> Tensor:
    return buffer[piece.offset : piece.offset + piece.size]


def own_metas(edge: Edge, tensors: Sequence[Tensor], *, where: str) -> tuple[TensorMeta, ...]:
    """Return the metas of tensors that the source stage holds whole.

    Raises:
        ValueError: If the stage holds slices.
    """
    if isinstance(edge.source_boundary, Sharded):
        raise ValueError(  # noqa: TRY004 (an argument is missing, none is of a wrong type)
            f"{where}: metas (None) must be given where the source boundary is "
            f"{edge.source_boundary}, since a slice does not tell the global shape"
        )
    return tuple(TensorMeta(tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def require_parts(
    tensors: Sequence[Tensor],
    metas: Sequence[TensorMeta],
    plans: Sequence[TransferPlan],
    *,
    index: int,
    where: str,
) -> None:
    """Compare tensors with the parts that a source rank should have.

    Args:
        tensors: Tensors to be sent.
        metas: Global shape and dtype of each tensor.
        plans: Transfer plan of each tensor.
        index: Position of this rank in the source stage.
        where: Beginning of the messages of errors.

    Raises:
        ValueError: If a number, a shape or a dtype differs.
    """
    if len(tensors) != len(metas):
        raise ValueError(
            f"{where}: len(tensors) ({len(tensors)}) must equal len(metas) ({len(metas)})"
        )
    for i, (tensor, meta, plan) in enumerate(zip(tensors, metas, plans, strict=True)):
        expected = plan.source_shape(index)
        if tuple(tensor.shape) != expected:
            kind = "whole" if isinstance(plan.source, Replicated) else f"slice {index}"
            raise ValueError(
                f"{where}: tensors[{i}].shape ({tuple(tensor.shape)}) must equal that of the "
                f"{kind} ({expected})"
            )
        if tensor.dtype != meta.dtype:
            raise ValueError(
                f"{where}: tensors[{i}].dtype ({tensor.dtype}) must equal metas[{i}].dtype "
                f"({meta.dtype})"
            )


def describe(plans: Sequence[TransferPlan], metas: Sequence[TensorMeta]) -> str:
    """Return a readable text of everything that both ends must agree on."""
    return "; ".join(
        f"{str(meta.dtype).removeprefix('torch.')}{list(plan.shape)} "
        f"{plan.source} -> {plan.destination} by {plan.algorithm}"
        + (f" in {plan.chunks}" if plan.chunks > 1 else "")
        for plan, meta in zip(plans, metas, strict=True)
    )
