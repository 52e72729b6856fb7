"""Several tensors over one edge: plans merged into one message per pair and step, and headers.

Needs no torch.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from hp_vtp.plan import StepKind, TransferPlan
from hp_vtp.topology.stages import Edge

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
