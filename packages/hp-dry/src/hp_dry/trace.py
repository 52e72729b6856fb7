"""Trace of one rank in a dry run: events in the order in which its host issued them. No torch.

A trace is what is looked at: memory is replayed from it, the order of streams and of ranks is
proven on it, and it is what reports are drawn from. Blocks are pieces of device memory (storages),
named by numbers that are not used twice. Streams, events and works are numbers too; stream 0 is
the default stream, and every communicator has a stream of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self, TypeAlias

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Attributes that all events have.

    Attributes:
        at: `file:line` of the innermost line outside torch and of its callers, joined by `" < "`.
        place: What the thread was doing, as `hp_platform.doing` says it, such as
            `"step 1, microbatch 2, stage 0, layers.3.attention"`.
        thread: Number of the thread of the host, 0 for the first that was seen.
    """

    at: str = ""
    place: str = ""
    thread: int = 0


@dataclass(frozen=True, slots=True)
class Allocate(Event):
    """Device memory was allocated.

    Attributes:
        block: Number of the new block.
        num_bytes: Size of the request in bytes.
        stream: Stream that was current.
        what: Operator that asked, such as `"aten.mm.default"`.
        shape: Shape of the tensor that gets the memory; () if that is not known.
        dtype: Dtype of that tensor, such as `"bfloat16"`; "" if that is not known.
    """

    block: int
    num_bytes: int
    stream: int
    what: str
    shape: tuple[int, ...] = ()
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Release(Event):
    """The host let go of a block: the last reference went, or FSDP shrank it to nothing.

    Attributes:
        block: Number of the block.
        resized: Whether its storage was resized, so that it is gone for all who still refer to it.
    """

    block: int
    resized: bool = False


@dataclass(frozen=True, slots=True)
class Borrow(Event):
    """`Tensor.record_stream`: the block is not used again before `stream` is done with it."""

    block: int
    stream: int


@dataclass(frozen=True, slots=True)
class Label(Event):
    """Says what a block is for, one of `KINDS`; the last label counts."""

    block: int
    kind: str


@dataclass(frozen=True, slots=True)
class Launch(Event):
    """An operator was queued on `stream`.

    Attributes:
        what: Name of the operator, such as `"aten.mm.default"`.
        num_kernels: Kernels that CUDA launches for it; 0 for one that only looks at shapes.
        num_bytes: Bytes read and written, every operand counted once.
        flops: Operations of matrix products, a multiplication and its addition counted as two; 0
            for other operators.
        reads: Numbers of the blocks that it reads.
        writes: Numbers of the blocks that it writes.
        host_reads: Numbers of the host buffers that the device reads while the host continues:
            sources of asynchronous copies. They have nothing to do with numbers of blocks.
        host_writes: Numbers of the host buffers that the device fills while the host continues.
        variant: Name and variant of a kernel that is none of torch's, which is compiled and loaded
            when it is launched first; "" for operators of torch.
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


@dataclass(frozen=True, slots=True)
class HostWait(Event):
    """The host waited for the device.

    Attributes:
        what: What the host called, such as `"aten._local_scalar_dense"`, `"copy to host"`,
            `"Event.synchronize"`.
        stream: Number of the awaited stream; -1 for all streams of the device, and if it was an
            event.
        event: Number of the awaited event; -1 if it was a stream.
        num_bytes: Bytes that were copied to the host.
    """

    what: str
    stream: int
    event: int = -1
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class HostAccess(Event):
    """The host looked at, or changed, a buffer of its own that a `Launch` has named.

    Attributes:
        what: Operator or method that did so, such as `"tolist"`.
        buffer: Number of the host buffer.
        writes: Whether it changed the buffer.
    """

    what: str
    buffer: int
    writes: bool = False


@dataclass(frozen=True, slots=True)
class RecordEvent(Event):
    """`event` is reached when all that `stream` was given so far is done."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class WaitEvent(Event):
    """Has what `stream` is given from now on wait for `event`, as it was recorded last."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class Collective(Event):
    """An operation between ranks was queued on the stream of its communicator.

    It begins after what `issuer` was given so far. Sends and receives are such operations too.

    Attributes:
        op: Name of the operation: `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all`,
            `broadcast`, `reduce`, `gather`, `scatter`, `barrier`, `send`, `recv`.
        group: Name of the communicator, a key of `Trace.groups`.
        issuer: Stream that was current on the thread that called it.
        stream: Stream that runs it: that of the communicator, or `issuer`.
        inputs: Shape and dtype of each tensor that this rank gives.
        outputs: Shape and dtype of each tensor that this rank gets.
        reads: Numbers of the blocks of `inputs`.
        writes: Numbers of the blocks of `outputs`.
        work: Number that `WaitWork` names.
        detail: Further properties, on which ranks must agree, such as `"sum"` or `"root 3"`.
        input_splits: Rows for each rank of the group; empty: the same for all.
        output_splits: Rows from each rank of the group; empty: the same from all.
        peer: Global rank of the other side of a message; -1 otherwise.
        batch: Number that operations share which are started as one; -1: it is on its own.
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


@dataclass(frozen=True, slots=True)
class WaitWork(Event):
    """Has what `stream` is given from now on wait for an operation between ranks.

    The host does not, on NCCL; -1 stands for the host, which waits for a `HostMessage`.
    """

    work: int
    stream: int


@dataclass(frozen=True, slots=True)
class HostMessage(Event):
    """An operation between the hosts of ranks (Gloo, a store): the host waits until it is done.

    Attributes:
        op: Name of the operation, as in `Collective`, or `connect`, `new_group`, `split_group`.
        group: Name of the communicator, a key of `Trace.groups`.
        shapes: Shape and dtype of each tensor that this rank gives, or gets where it gives none.
        detail: Further properties, on which ranks must agree, as in `Collective`.
        peer: Global rank of the other side of a message; -1 otherwise.
        waits: Whether the host goes on only when the operation is done.
        work: Number that `WaitWork` names where the host waits later; -1 otherwise.
    """

    op: str
    group: str
    shapes: Shapes
    detail: str = ""
    peer: int = -1
    waits: bool = True
    work: int = -1


@dataclass(frozen=True, slots=True)
class Fault(Event):
    """Names what the device would refuse, as it was issued: operands on two devices and such."""

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
"""What device memory is for; memory without a label is `"activations"` if a module made it."""

_CLASSES: dict[str, type[Event]] = {
    each.__name__: each
    for each in (
        Allocate,
        Release,
        Borrow,
        Label,
        Launch,
        HostWait,
        HostAccess,
        RecordEvent,
        WaitEvent,
        Collective,
        WaitWork,
        HostMessage,
        Fault,
    )
}
_NAMES = {kind: tuple(each.name for each in fields(kind)) for kind in _CLASSES.values()}


@dataclass(slots=True)
class Trace:
    """Tells what one rank did.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        groups: Global ranks of each communicator that has this rank as a member, by name of the
            communicator: that of its family, then its ranks in brackets.
        events: Events in the order in which the host issued them.
        families: Global ranks of all communicators that were made alike, this rank's or not, by the
            name of the family: the partition of a mesh axis.
        connected: Names of those groups whose ranks NCCL has connected, in the order of it: at
            once where a group is bound to a device or split off, else at its first operation.
    """

    rank: int
    world_size: int
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    families: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    connected: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def write(self, path: Path) -> None:
        """Write it as lines of JSON: a head, then the name of an event and its values."""
        head = {
            "rank": self.rank,
            "world_size": self.world_size,
            "groups": self.groups,
            "families": self.families,
            "connected": self.connected,
        }
        with path.open("w") as file:
            file.write(json.dumps(head) + "\n")
            for event in self.events:
                values = [getattr(event, name) for name in _NAMES[type(event)]]
                file.write(json.dumps([type(event).__name__, *values]) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote.

        Raises:
            ValueError: If it is none.
        """
        with path.open() as file:
            try:
                head = json.loads(file.readline())
                groups = {name: tuple(ranks) for name, ranks in head["groups"].items()}
                families = {name: _frozen(lists) for name, lists in head["families"].items()}
                events = list(_decoded(json.loads(line) for line in file))
                connected = list(map(str, head["connected"]))
                return cls(head["rank"], head["world_size"], groups, events, families, connected)
            except (KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} must be a trace: {error}") from error


def _decoded(lines: Iterable[Sequence[Any]]) -> Iterator[Event]:
    for name, *values in lines:
        kind = _CLASSES[name]
        frozen = (_frozen(value) if type(value) is list else value for value in values)
        yield kind(**dict(zip(_NAMES[kind], frozen, strict=True)))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
