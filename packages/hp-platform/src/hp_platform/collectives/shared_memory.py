"""Memory that the ranks of a group share if all ranks are processes of one machine.

Between processes of one machine Gloo sends through sockets: the kernel copies all bytes twice, and
threads wake up to receive them. A `Channel` has memory of each rank that the other ranks map, and a
pipe from each rank to each other rank for two messages: bytes are ready to read, and bytes were
read. Neither has a name in a file system; ranks open them through `/proc/PID/fd`. So nothing is
left behind when a process ends in any way, and the other ranks notice at once that a rank has
ended, because its ends of the pipes are closed.
"""

import mmap
import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform.failures.messages import all_gather_json
from hp_platform.groups import global_ranks

_TOKEN_BYTES = 16
_POSTED, _READ = 0, 1
_MESSAGE = struct.Struct("=BQ")
"""Kind of the message, and number of bytes that were posted."""
_MOST = 400
"""Most messages that one read takes."""


class _Offer(NamedTuple):
    """File descriptors by which other ranks open the memories and pipes of a rank.

    Attributes:
        pid: Process ID of the rank.
        token: First bytes of each of its memories, hexadecimal, by which other ranks notice a
            process of another machine.
        memories: File descriptors, one per slot, and a last one, which on rank 0 is the common
            memory of all ranks.
        inlets: Group rank -> file descriptor of the end of a pipe into which that rank writes.
    """

    pid: int
    token: str
    memories: tuple[int, ...]
    inlets: dict[int, int]


@dataclass(slots=True)
class _Memory:
    """Slot of one rank, mapped as far as it was used."""

    file: int
    mapped: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8, device="cpu"))

    @classmethod
    def create(cls, token: bytes) -> Self:
        file = os.memfd_create("hp-platform", os.MFD_CLOEXEC)
        os.write(file, token)
        return cls(file)

    @classmethod
    def open(cls, path: str, token: bytes) -> Self:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.pread(file, _TOKEN_BYTES, 0) != token:
            os.close(file)
            raise OSError(f"{path} is not of this group")
        return cls(file)

    def bytes(self, size: int, *, grow: bool = False) -> Tensor:
        """Return the first bytes, uint8 [size]."""
        if len(self.mapped) < size:
            self.mapped = self.part(0, size, grow=grow)
        return self.mapped[:size]

    def part(self, offset: int, size: int, *, grow: bool) -> Tensor:
        """Map bytes from an offset on, uint8 [size]; the offset is a multiple of a page."""
        if grow and os.fstat(self.file).st_size < offset + size:
            os.posix_fallocate(self.file, 0, offset + size)  # fails here, not at some later write
        return torch.frombuffer(mmap.mmap(self.file, size, offset=offset), dtype=torch.uint8)


class Channel:
    """Ordered exchanges over shared memory; only one thread may use a channel at a time.

    In an exchange all ranks post equally many bytes and read the bytes of the others. As many
    exchanges may run at once as there are slots; before the next is posted, the oldest is finished.

    Ranks can also write to one memory that all of them share (`common`); an exchange without bytes
    then announces that they have written.
    """

    def __init__(
        self,
        rank: int,
        global_ranks: list[int],
        memories: list[list[_Memory]],
        pipes: tuple[dict[int, int], dict[int, int]],
        timeout: timedelta,
    ) -> None:
        self._rank, self._global_ranks, self._timeout = rank, global_ranks, timeout
        self._memories = memories
        self._inlets, self._outlets = pipes
        self._received = {other: (deque[int](), deque[int]()) for other in self._inlets}
        self._common_bytes = 0
        self._num_posted = 0
        self._is_free = True  # whether the slot of the next exchange is free
        self._under_way: deque[Exchange] = deque()

    @classmethod
    def connect(
        cls, group: ProcessGroup, *, num_slots: int, timeout: timedelta
    ) -> "Channel | None":
        """Connect all ranks of a group. All of them call this together.

        Args:
            group: Process group with a backend for CPU tensors.
            num_slots: Number of exchanges that may run at once.
            timeout: Time to wait for another rank.

        Returns:
            A channel; None on all ranks if some cannot open the memory of others.
        """
        rank, token = group.rank(), os.urandom(_TOKEN_BYTES)
        others = [other for other in range(group.size()) if other != rank]
        pipes: dict[int, tuple[int, int]] = {}
        memories: list[list[_Memory]] = [[] for _ in range(group.size())]
        outlets: dict[int, int] = {}
        with suppress(OSError, AttributeError):  # no such system call here
            memories[rank] = [_Memory.create(token) for _ in range(num_slots + 1)]
            pipes = {other: os.pipe2(os.O_CLOEXEC) for other in others}
        files = tuple(memory.file for memory in memories[rank])
        inlets = {other: ends[1] for other, ends in pipes.items()}
        offer = _Offer(os.getpid(), token.hex(), files, inlets)
        offers = all_gather_json(offer, of=_Offer, group=group)
        with suppress(OSError, KeyError):
            for other in others:
                offer = offers[other]
                folder = f"/proc/{offer.pid}/fd"
                for file in offer.memories:
                    memories[other].append(
                        _Memory.open(f"{folder}/{file}", bytes.fromhex(offer.token))
                    )
                outlets[other] = os.open(
                    f"{folder}/{offer.inlets[rank]}", os.O_WRONLY | os.O_CLOEXEC
                )
        done = len(outlets) == len(others) and all(len(m) == num_slots + 1 for m in memories)
        all_done = torch.tensor([done], dtype=torch.int32, device="cpu")
        dist.all_reduce(all_done, dist.ReduceOp.MIN, group=group)
        for _, end in pipes.values():
            os.close(end)  # the other rank has opened its own copy, which its end closes
        reading = {other: ends[0] for other, ends in pipes.items()}
        channel = cls(rank, global_ranks(group), memories, (reading, outlets), timeout)
        return channel if all_done.item() else None

    def __del__(self) -> None:
        files = [memory.file for memories in self._memories for memory in memories]
        for file in (*files, *self._inlets.values(), *self._outlets.values()):
            with suppress(OSError):
                os.close(file)

    def common(self, size: int) -> Tensor:
        """Return memory that all ranks share; all ranks call this together.

        Args:
            size: Number of bytes.

        Returns:
            uint8 [size]: the same bytes on every rank, which no other call returns.
        """
        offset = self._common_bytes
        self._common_bytes += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        return self._memories[0][-1].part(offset, size, grow=True)

    def memory(self, size: int) -> Tensor:
        """Return this rank's memory for the next exchange, after the others have read it.

        Args:
            size: Number of bytes of each rank.
        """
        slots = self._memories[self._rank][:-1]
        if len(self._under_way) == len(slots):
            self._under_way[0].wait()
        if not self._is_free:
            for other in self._inlets:
                self._receive(other, _READ)
            self._is_free = True
        return slots[self._num_posted % len(slots)].bytes(size, grow=True)

    def post(
        self, size: int, *, fill: Callable[[Tensor], object], read: Callable[[list[Tensor]], object]
    ) -> "Exchange":
        """Begin an exchange.

        Args:
            size: Number of bytes of each rank, the same on all ranks.
            fill: Function that fills this rank's memory, uint8 [size].
            read: Function that reads the memories of all ranks, by group rank; called at the latest
                when another exchange needs the slot.
        """
        fill(self.memory(size))
        self._send(_POSTED, size)
        num_slots = len(self._memories[self._rank]) - 1
        exchange = Exchange(self, self._num_posted % num_slots, size, read)
        self._under_way.append(exchange)
        self._num_posted += 1
        self._is_free = self._num_posted < num_slots
        return exchange

    def finish(self, exchange: "Exchange") -> None:
        """Read the bytes of an exchange, and of all exchanges before it."""
        while not exchange.is_done:
            oldest = self._under_way.popleft()
            for other in self._inlets:
                size = self._receive(other, _POSTED)
                if size != oldest.size:  # each would read something else of the other's memory
                    raise RuntimeError(
                        f"bytes here ({oldest.size}) must equal bytes of rank "
                        f"{self._global_ranks[other]} ({size}) in an exchange: ranks must use the "
                        "same parameters in a microbatch, and have gradients of the same"
                    )
            oldest.read([slots[oldest.slot].bytes(oldest.size) for slots in self._memories])
            self._send(_READ)
            oldest.is_done = True

    def _send(self, what: int, size: int = 0) -> None:
        for outlet in self._outlets.values():
            # A rank that has ended needs no message; the next wait notices its end.
            with suppress(BrokenPipeError):
                os.write(outlet, _MESSAGE.pack(what, size))  # few bytes: all of them, or none

    def _receive(self, other: int, what: int) -> int:
        """Wait for the next message of a kind from another rank; return the bytes it names."""
        received, inlet = self._received[other], self._inlets[other]
        deadline = time.monotonic() + self._timeout.total_seconds()
        poll = select.poll()
        poll.register(inlet, select.POLLIN)
        while not received[what]:
            try:
                left = deadline - time.monotonic()
                if left <= 0 or not poll.poll(left * 1000):
                    raise TimeoutError(f"it did not come within {self._timeout}")
                messages = os.read(inlet, _MOST * _MESSAGE.size)
                if not messages:
                    raise BrokenPipeError("it has ended")
            except OSError as error:
                raise RuntimeError(
                    f"an exchange with rank {self._global_ranks[other]} failed: {error}"
                ) from error
            for kind, size in _MESSAGE.iter_unpack(messages):
                received[kind].append(size)
        return received[what].popleft()


class Exchange:
    """Exchange of a channel that this rank has posted."""

    __slots__ = ("_channel", "is_done", "read", "size", "slot")

    def __init__(
        self, channel: Channel, slot: int, size: int, read: Callable[[list[Tensor]], object]
    ) -> None:
        self._channel, self.slot, self.size, self.read = channel, slot, size, read
        self.is_done = False

    def wait(self) -> None:
        """Read the bytes of all ranks.

        Raises:
            RuntimeError: If a rank has ended or did not come in time; the message names it.
        """
        self._channel.finish(self)
