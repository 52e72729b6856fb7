"""Traffic of a rank with others, by communicator and in order. No torch."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import groupby, islice

import msgspec
from msgspec.structs import replace

from hp_dry.trace import Collective, HostMessage, Shapes, Trace

_NUM_FIRST = 12
_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}


class Operation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Operation between ranks, or a run of equal operations.

    Attributes:
        op: Name of the operation, as in `hp_dry.trace.Collective`.
        group: Name of the communicator.
        given: Shape and dtype of each tensor that this rank sends.
        taken: Shape and dtype of each tensor that this rank receives.
        bytes: Bytes that this rank sends or receives, the larger number.
        at: Line that issued it, and its callers.
        place: Place of the rank.
        detail: Reduction or root, such as `"sum"` or `"root 3"`.
        peer: Global rank of the other side of a message; -1 otherwise.
        times: Number of consecutive equal operations.
    """

    op: str
    group: str
    given: Shapes
    taken: Shapes
    bytes: int
    at: str
    place: str
    detail: str = ""
    peer: int = -1
    times: int = 1


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """Operations of one kind.

    Attributes:
        count: Number of operations.
        bytes: Sum of their `Operation.bytes`.
    """

    count: int
    bytes: int


class Communicator(msgspec.Struct, frozen=True, kw_only=True):
    """Communicator with its operations.

    Attributes:
        name: Name of the communicator.
        ranks: Global ranks of its members.
        on_host: Whether only hosts meet in it (Gloo, a store).
        operations: Number and bytes of its operations, by their kind.
        first: Its first operations in order; equal neighbours as one, such as `"all_gather x48"`.
    """

    name: str
    ranks: tuple[int, ...]
    on_host: bool
    operations: dict[str, Count]
    first: tuple[str, ...]

    @property
    def total(self) -> Count:
        """Return the number and bytes of all operations."""
        counts = self.operations.values()
        return Count(count=sum(c.count for c in counts), bytes=sum(c.bytes for c in counts))


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Operations between ranks in which a rank takes part over a run.

    Attributes:
        communicators: Communicators in the order of their first use.
        operations: All operations in the order in which the host issued them.
    """

    communicators: tuple[Communicator, ...]
    operations: tuple[Operation, ...]


def traffic_of(trace: Trace) -> Traffic:
    """List the exchanges of a trace."""
    operations = tuple(_merged(trace))
    devices = {event.group for event in trace.events if isinstance(event, Collective)}
    by_group: dict[str, list[Operation]] = {}
    for each in operations:
        by_group.setdefault(each.group, []).append(each)
    communicators = tuple(
        Communicator(
            name=name,
            ranks=trace.groups.get(name, ()),
            on_host=name not in devices,
            operations=_counts(members),
            first=_first(members),
        )
        for name, members in by_group.items()
    )
    return Traffic(communicators=communicators, operations=operations)


def _merged(trace: Trace) -> Iterator[Operation]:
    """Yield the operations in order, equal neighbours as one."""
    events = (event for event in trace.events if isinstance(event, Collective | HostMessage))
    for operation, equal in groupby(map(_operation, events)):
        yield replace(operation, times=len([*equal]))


def _operation(event: Collective | HostMessage) -> Operation:
    given, taken = (
        (event.inputs, event.outputs) if isinstance(event, Collective) else (event.shapes, ())
    )
    return Operation(
        op=event.op,
        group=event.group,
        given=given,
        taken=taken,
        bytes=max(_bytes(given), _bytes(taken)),
        at=event.at,
        place=event.place,
        detail=event.detail,
        peer=event.peer,
    )


def _bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * _ITEM_BYTES.get(dtype, 1) for shape, dtype in shapes)


def _counts(operations: list[Operation]) -> dict[str, Count]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for each in operations:
        counts[each.op] += each.times
        sizes[each.op] += each.times * each.bytes
    return {op: Count(count=counts[op], bytes=sizes[op]) for op in counts}


def _first(operations: list[Operation]) -> tuple[str, ...]:
    """Name the first operations, equal neighbours as one."""
    runs = []
    for name, equal in islice(groupby(operations, key=_name), _NUM_FIRST):
        times = sum(each.times for each in equal)
        runs.append(name if times == 1 else f"{name} x{times}")
    return tuple(runs)


def _name(operation: Operation) -> str:
    return operation.op if operation.peer < 0 else f"{operation.op} {operation.peer}"
