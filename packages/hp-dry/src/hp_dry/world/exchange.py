"""Operations between the hosts of a dry run, whose values are exchanged between processes.

Every representative writes its input to the hub, under its rank, its communicator and the number of
the operation in the communicator. Another process that needs the input of a member reads the input
of that member's representative for the same operation of the same family.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_dry.world.communicators import Communicator, Families
from hp_dry.world.hub import HubClient
from hp_platform import _internals
from hp_platform.failures.messages import bytes_of

_SECONDS = 600.0
_PARTED = (
    "all_to_all",
    "reduce_scatter",
    "scatter",
)  # each rank gets another part of the input
Finish = Callable[[float], None]
"""Function of a time-out in seconds that waits for the other ranks and writes the outputs."""


@dataclass(slots=True)
class Operation:
    """Operation between ranks, with its arguments.

    Attributes:
        op: Name of the operation, as in `trace.Collective`.
        inputs: Tensors that this rank sends.
        outputs: Tensors that are written.
        reduction: Reduction such as `"sum"`; "" without a reduction.
        root: Position of the rank that sends or receives all; -1 without a root.
        peer: Position of the other side of a message; -1 otherwise.
        tag: Tag of a message.
        input_splits: Rows for each rank of the group; empty: equally many.
        output_splits: Rows from each rank of the group; empty: equally many.
    """

    op: str
    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    reduction: str = ""
    root: int = -1
    peer: int = -1
    tag: int = 0
    input_splits: Sequence[int] = ()
    output_splits: Sequence[int] = ()

    @property
    def detail(self) -> str:
        """Return the facts that ranks must agree on besides shapes."""
        root = f"root {self.root}" if self.root >= 0 else ""
        tag = f"tag {self.tag}" if self.tag else ""
        return ", ".join(filter(None, (self.reduction, root, tag)))


class _Given(msgspec.Struct, frozen=True, array_like=True):
    """Input of a rank to an operation, as the hub keeps it.

    Attributes:
        parts: Bytes for each position in the group; one part if all get the same.
        by: Line that issued the operation.
        words: Words for the operation.
    """

    parts: list[bytes]
    by: str
    words: str


class Exchange:
    """Operations between hosts, carried out through the hub.

    Args:
        client: Connection to the hub.
        families: Groups of all ranks with their representatives.
        rank: Global rank of this process.
    """

    def __init__(self, client: HubClient, families: Families, rank: int) -> None:
        self._client, self._families, self._rank = client, families, rank

    def start(self, communicator: Communicator, asked: Operation, at: str) -> Finish:
        """Write the input of this rank, and return the function that waits for the other ranks."""
        if asked.peer >= 0:
            return self._message(communicator, asked)
        number = next(communicator.operations)
        parts = _parts(asked, len(communicator.ranks))
        words = f"{asked.op} {asked.detail}".strip()
        self._put(f"{communicator.name}/{number}", parts, words=words, at=at)

        def finish(seconds: float) -> None:
            members = _members(asked, communicator)
            what = f"{asked.op} {number} of {communicator.name}"
            given = self._take(communicator, members, number, seconds, what)
            for position, each in given.items():
                if each.words != words:
                    raise RuntimeError(
                        f"operation {number} of {communicator.name} differs between ranks: "
                        f"rank {self._rank} calls {words} at {at}, "
                        f"rank {communicator.ranks[position]} {each.words} at {each.by}"
                    )
            _write(asked, given, communicator.mine)

        return finish

    def give_up(self, communicator: Communicator) -> None:
        """Let ranks fail that wait for this rank in a group."""
        what = f"rank {self._rank} has given up {communicator.name}"
        self._client.ask("break", [f"of/{self._rank}/{communicator.name}/"], what=what)

    def values(self, communicator: Communicator, value: bytes, seconds: float) -> list[bytes]:
        """Gather the bytes of every member, by position."""
        number = next(communicator.operations)
        self._put(f"{communicator.name}/{number}", [value], words="values", at="")
        everybody = range(len(communicator.ranks))
        what = f"values {number} of {communicator.name}"
        given = self._take(communicator, everybody, number, seconds, what)
        return [given[position].parts[0] for position in everybody]

    def _put(self, key: str, parts: Sequence[bytes], *, words: str, at: str) -> None:
        value = msgspec.msgpack.encode(_Given([*parts], at, words))
        self._client.ask("set", [f"of/{self._rank}/{key}"], [value])

    def _take(
        self,
        communicator: Communicator,
        positions: Sequence[int],
        number: int,
        seconds: float,
        what: str,
    ) -> dict[int, _Given]:
        members = [communicator.ranks[position] for position in positions]
        sources = [self._families.representative_in(communicator, member) for member in members]
        keys = [f"of/{source}/{name}/{number}" for source, name in sources]
        unique = list(dict.fromkeys(keys))
        if not unique:
            return {}
        _, found = self._client.ask("get", unique, timeout=seconds, what=what)
        by_key = dict(zip(unique, map(_read, found), strict=True))
        return {place: by_key[key] for place, key in zip(positions, keys, strict=True)}

    def send(self, communicator: Communicator, peer: int, data: bytes, tag: str) -> None:
        """Send bytes to the member at a position, which receives messages of one tag in order."""
        number = communicator.next_message("to", peer, tag)
        steps = (peer - communicator.mine) % len(communicator.ranks)
        self._put(f"{communicator.name}/+{steps}/{tag}/{number}", [data], words="send", at="")

    def receive(self, communicator: Communicator, peer: int, tag: str) -> Callable[[float], bytes]:
        """Return a function that waits some seconds for the next bytes from a member."""
        number = communicator.next_message("from", peer, tag)
        sender = communicator.ranks[peer]
        steps = (communicator.mine - peer) % len(communicator.ranks)
        source, name = self._families.representative_in(communicator, sender)
        key = f"of/{source}/{name}/+{steps}/{tag}/{number}"

        def wait(seconds: float) -> bytes:
            what = f"message {number} of rank {sender}, tag {tag}, in {communicator.name}"
            _, found = self._client.ask("get", [key], timeout=seconds, what=what)
            return _read(found[0]).parts[0]

        return wait

    def _message(self, communicator: Communicator, asked: Operation) -> Finish:
        if asked.op == "send":
            data = b"".join(map(bytes_of, asked.inputs))
            self.send(communicator, asked.peer, data, str(asked.tag))
            return lambda _: None
        wait = self.receive(communicator, asked.peer, str(asked.tag))

        def finish(seconds: float) -> None:
            data = wait(seconds)
            for x in asked.outputs:
                _fill(x, data)

        return finish


def seconds_of(group: ProcessGroup) -> float:
    """Return the time-out of a group in seconds."""
    for kind in ("cpu", "cuda"):
        if (timeout := _internals.group_timeout(group, torch.device(kind))) is not None:
            return timeout.total_seconds()
    return _SECONDS


def _read(value: bytes) -> _Given:
    return msgspec.msgpack.decode(value, type=_Given)


def _parts(asked: Operation, size: int) -> list[bytes]:
    """List the parts of the input for every position; one part if all get the same."""
    parts: Sequence[Tensor] = asked.inputs
    if asked.op == "all_to_all" and len(parts) == 1:
        x = asked.inputs[0]
        parts = x.split(list(asked.input_splits) or [x.shape[0] // size] * size)
    elif asked.op == "reduce_scatter" and len(parts) == 1:
        parts = parts[0].chunk(size)
    found = [bytes_of(part) for part in parts]
    return found if asked.op in _PARTED else [b"".join(found)]


def _members(asked: Operation, communicator: Communicator) -> Sequence[int]:
    """Return the positions of the members for which this rank waits."""
    if asked.op in ("broadcast", "scatter"):
        return [asked.root]
    if asked.op in ("reduce", "gather") and asked.root != communicator.mine:
        return []
    return range(len(communicator.ranks))


def _write(asked: Operation, given: dict[int, _Given], mine: int) -> None:
    """Write the inputs of other members to the outputs: whole, or the part for this rank."""
    others = [given[position] for position in sorted(given)]
    parts = [each.parts[mine if asked.op in _PARTED else 0] for each in others]
    if not parts:  # other ranks get the output
        return
    if asked.reduction:
        _reduce(asked.outputs[0], parts, asked.reduction)
    else:
        parts = parts if len(asked.outputs) > 1 else [b"".join(parts)]
        for x, data in zip(asked.outputs, parts, strict=False):
            _fill(x, data)


def _reduce(out: Tensor, parts: Sequence[bytes], reduction: str) -> None:
    values = [_tensor(part, out) for part in parts]
    total = values[0].clone()
    for value in values[1:]:
        total = _REDUCTIONS[reduction](total, value)
    if reduction == "avg":
        total = total / len(values)
    out.copy_(total)


_REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def _tensor(data: bytes, like: Tensor) -> Tensor:
    if len(data) != like.numel() * like.element_size():
        raise RuntimeError(
            f"bytes of another rank ({len(data)}) must equal those of the {like.dtype} "
            f"{list(like.shape)} that they are for ({like.numel() * like.element_size()})"
        )
    if not data:
        return like.detach().clone()
    return torch.frombuffer(bytearray(data), dtype=like.dtype).view(like.shape)


def _fill(x: Tensor, data: bytes) -> None:
    x.detach().copy_(_tensor(data, x))
