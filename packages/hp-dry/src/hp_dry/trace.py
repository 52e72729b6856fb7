"""Trace of one rank in a dry run: events in the order in which its host issued them. No torch.

Memory is replayed from a trace, the order of streams and of ranks is proven on it, and reports are
made from it. Blocks are pieces of device memory (storages), named by unique numbers. Streams,
events and works are numbers too; stream 0 is the default stream, and every communicator has a
stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Self, TypeAlias

import msgspec

__all__ = [
    "KINDS",
    "Allocate",
    "Borrow",
    "Collective",
    "Event",
    "Fault",
    "HostAccess",
    "HostMessage",
    "HostWait",
    "Label",
    "Launch",
    "RecordEvent",
    "Release",
    "Shapes",
    "Trace",
    "WaitEvent",
    "WaitWork",
]

Shapes: TypeAlias = "tuple[tuple[tuple[int, ...], str], ...]"
"""Shape and dtype (such as `"bfloat16"`) of each tensor."""


class Event(msgspec.Struct, frozen=True, kw_only=True, array_like=True, tag=True):
    """Attributes that all events have.

    Attributes:
        at: `file:line` of the innermost line outside torch and of its callers, joined by `" < "`.
        place: Place of the thread, in the words of `hp_platform.doing`, such as
            `"step 1, microbatch 2, stage 0, layers.3.attention"`.
        thread: Number of the thread of the host, 0 for the first that was seen.
    """

    at: str = ""
    place: str = ""
    thread: int = 0


class Allocate(Event, frozen=True):
    """Allocation of device memory.

    Attributes:
        block: Number of the new block.
        num_bytes: Size of the request in bytes.
        stream: Stream that was current.
        what: Operator that allocates, such as `"aten.mm.default"`.
        shape: Shape of the tensor that gets the memory; () if it is not known.
        dtype: Dtype of that tensor, such as `"bfloat16"`; "" if it is not known.
    """

    block: int
    num_bytes: int
    stream: int
    what: str
    shape: tuple[int, ...] = ()
    dtype: str = ""


class Release(Event, frozen=True):
    """Release of a block by the host: its last reference ended, or FSDP resized it to nothing.

    Attributes:
        block: Number of the block.
        resized: Whether its storage was resized, so that remaining references have no memory.
    """

    block: int
    resized: bool = False


class Borrow(Event, frozen=True):
    """`Tensor.record_stream`: the allocator must not reuse the block before `stream` is done."""

    block: int
    stream: int


class Label(Event, frozen=True):
    """Purpose of a block, one of `KINDS`; the last label counts."""

    block: int
    kind: str


class Launch(Event, frozen=True):
    """Launch of an operator on `stream`.

    Attributes:
        what: Name of the operator, such as `"aten.mm.default"`.
        num_kernels: Kernels that CUDA launches for it; 0 for an operator that only reads shapes.
        num_bytes: Bytes read and written, every operand counted once.
        flops: Operations of matrix products, a multiplication and its addition counted as two; 0
            for other operators.
        reads: Numbers of the blocks that it reads.
        writes: Numbers of the blocks that it writes.
        host_reads: Numbers of the host buffers that the device reads while the host continues:
            sources of asynchronous copies. They are not numbers of blocks.
        host_writes: Numbers of the host buffers that the device fills while the host continues.
        variant: Name and variant of a kernel that is not torch's, which is compiled and loaded at
            its first launch; "" for operators of torch.
    """

    what: str
    stream: int
    num_kernels: int
    num_bytes: int
    flops: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    host_reads: tuple[int, ...] = ()
    host_writes: tuple[int, ...] = ()
    variant: str = ""


class HostWait(Event, frozen=True):
    """Wait of the host for the device.

    Attributes:
        what: Function that the host called, such as `"aten._local_scalar_dense"`, `"copy to host"`,
            `"Event.synchronize"`.
        stream: Number of the awaited stream; -1 for all streams of the device, or for an event.
        event: Number of the awaited event; -1 for streams.
        num_bytes: Bytes that were copied to the host.
    """

    what: str
    stream: int
    event: int = -1
    num_bytes: int = 0


class HostAccess(Event, frozen=True):
    """Read or write by the host of a host buffer that a `Launch` uses.

    Attributes:
        what: Operator or method, such as `"tolist"`.
        buffer: Number of the host buffer.
        writes: Whether the host changed the buffer.
    """

    what: str
    buffer: int
    writes: bool = False


class RecordEvent(Event, frozen=True):
    """Record of `event`: it is reached when the work that `stream` has so far is done."""

    event: int
    stream: int


class WaitEvent(Event, frozen=True):
    """Wait of later work of `stream` for the last record of `event`."""

    event: int
    stream: int


class Collective(Event, frozen=True):
    """Launch of an operation between ranks on the stream of its communicator.

    It begins after the work that `issuer` has so far. Sends and receives are such operations too.

    Attributes:
        op: Name of the operation: `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all`,
            `broadcast`, `reduce`, `gather`, `scatter`, `barrier`, `send`, `recv`.
        group: Name of the communicator, a key of `Trace.groups`.
        issuer: Current stream of the thread that called it.
        stream: Stream that runs it: the stream of the communicator, or `issuer`.
        inputs: Shape and dtype of each tensor that this rank sends.
        outputs: Shape and dtype of each tensor that this rank receives.
        reads: Numbers of the blocks of `inputs`.
        writes: Numbers of the blocks of `outputs`.
        work: Number that `WaitWork` names.
        detail: Further properties, on which ranks must agree, such as `"sum"` or `"root 3"`.
        input_splits: Rows for each rank of the group; empty: equally many.
        output_splits: Rows from each rank of the group; empty: equally many.
        peer: Global rank of the other side of a message; -1 otherwise.
        batch: Number that operations of one batch share; -1: no batch.
    """

    op: str
    group: str
    issuer: int
    stream: int
    inputs: Shapes
    outputs: Shapes
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    work: int
    detail: str = ""
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    peer: int = -1
    batch: int = -1


class WaitWork(Event, frozen=True):
    """Wait of later work of `stream` for an operation between ranks.

    On NCCL the host does not wait. Stream -1 is the host, which waits for a `HostMessage`.
    """

    work: int
    stream: int


class HostMessage(Event, frozen=True):
    """Operation between the hosts of ranks (Gloo, a store), for which the host waits.

    Attributes:
        op: Name of the operation, as in `Collective`, or `connect`, `new_group`, `split_group`.
        group: Name of the communicator, a key of `Trace.groups`.
        shapes: Shape and dtype of each tensor that this rank sends, or receives if it sends none.
        detail: Further properties, on which ranks must agree, as in `Collective`.
        peer: Global rank of the other side of a message; -1 otherwise.
        waits: Whether the host waits for the operation at once.
        work: Number that `WaitWork` names if the host waits later; -1 otherwise.
    """

    op: str
    group: str
    shapes: Shapes
    detail: str = ""
    peer: int = -1
    waits: bool = True
    work: int = -1


class Fault(Event, frozen=True):
    """Operation that the device would refuse, such as an operator with operands on two devices."""

    what: str


KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered parameters",
    "activations",
    "exchange buffers",
    "logits",
    "casts",
    "other",
)
"""Purposes of device memory; without a label, memory of a module is `"activations"`."""

_EVENT: msgspec.json.Decoder[Event] = msgspec.json.Decoder(
    Allocate
    | Release
    | Borrow
    | Label
    | Launch
    | HostWait
    | HostAccess
    | RecordEvent
    | WaitEvent
    | Collective
    | WaitWork
    | HostMessage
    | Fault
)


class Trace(msgspec.Struct, omit_defaults=True):
    """Events of one rank, with its groups.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        groups: Global ranks of each communicator that has this rank as a member, by name of the
            communicator: the name of its family, then its ranks in brackets.
        events: Events in the order in which the host issued them.
        families: Name of a family -> global ranks of all its communicators, with or without this
            rank. The groups of a mesh axis are a family.
        connected: Names of the groups whose ranks NCCL has connected, in that order: at once for a
            group that is bound to a device or split off, else at its first operation.
    """

    rank: int
    world_size: int
    groups: dict[str, tuple[int, ...]] = {}
    events: list[Event] = []
    families: dict[str, tuple[tuple[int, ...], ...]] = {}
    connected: list[str] = []

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def write(self, path: Path) -> None:
        """Write the trace as lines of JSON: a head, then the name and values of each event."""
        head, encode = msgspec.structs.replace(self, events=[]), msgspec.json.Encoder().encode
        with path.open("wb") as file:
            file.writelines(encode(line) + b"\n" for line in (head, *self.events))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a trace that `write` has written.

        Raises:
            ValueError: If the file contains no trace.
        """
        with path.open("rb") as file:
            try:
                trace = msgspec.json.decode(file.readline(), type=cls)
                trace.events += map(_EVENT.decode, file)
            except msgspec.DecodeError as error:
                raise ValueError(f"{path} must be a trace: {error}") from error
        return trace
