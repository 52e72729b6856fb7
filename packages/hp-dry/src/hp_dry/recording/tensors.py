"""Tensors of a dry run: found among values, with their shapes and their storages."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch
from torch import Tensor

from hp_dry._internals import storage_key
from hp_dry.trace import Allocate, Event, Release, Shapes

_ADDRESSES = 1 << 40
"""Bytes between the simulated addresses of two blocks."""


def tensors_in(*values: object) -> list[Tensor]:
    """List the tensors among values, and in lists and tuples among them, in order."""
    found: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += tensors_in(*x)
    return found


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Return the shapes and dtypes of tensors in the format of a trace."""
    return tuple((tuple(x.shape), str(x.dtype)[6:]) for x in tensors)


class Block(weakref.ref[torch.UntypedStorage]):
    """Storage that is memory of the device.

    Attributes:
        key: Identity of the storage while it lives.
        number: Number of the block in the trace; it changes when the storage is resized.
        num_bytes: Current size of the storage in bytes.
    """

    __slots__ = ("key", "num_bytes", "number")

    key: int
    number: int
    num_bytes: int


class Storages:
    """All meta storages of a dry run, which are memory of the device or deferred.

    Attributes:
        live_bytes: Bytes of device memory that are allocated now.
        peak_bytes: Most bytes that were allocated at once since `reset_peak`.
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        """Pass events to `emit`."""
        self.live_bytes = self.peak_bytes = 0
        self.num_allocations = 0
        self._emit = emit
        self._blocks: dict[int, Block] = {}
        self._deferred: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._blocks_so_far = count(1)

    def find(self, x: Tensor) -> Block | None:
        """Return the block of a meta tensor; None if it is deferred or unknown."""
        return self._blocks.get(storage_key(x.untyped_storage()))

    def has(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether a storage is memory of the device."""
        return storage_key(storage) in self._blocks

    def is_deferred(self, x: Tensor) -> bool:
        """Tell whether a tensor was made on `meta` at the request of the program."""
        return bool(self._deferred) and storage_key(x.untyped_storage()) in self._deferred

    def see(self, x: Tensor, what: str, stream: int) -> int:
        """Return the number of the block of a meta tensor, allocated now if it is unknown."""
        storage = x.untyped_storage()
        key = storage_key(storage)
        block = self._blocks.get(key)
        if block is None:
            if key in self._deferred:
                return -1
            block = Block(storage, self._gone)
            block.key, block.num_bytes, block.number = key, 0, -1
            self._blocks[key] = block
            self._allocate(block, storage.nbytes(), what, stream, x)
        return block.number

    def defer(self, x: Tensor) -> None:
        """Record that a tensor has no memory, unless it is known."""
        storage = x.untyped_storage()
        key = storage_key(storage)
        if key not in self._blocks and key not in self._deferred:
            self._deferred[key] = weakref.ref(storage, lambda _: self._deferred.pop(key, None))

    def resized(self, storage: torch.UntypedStorage, what: str, stream: int) -> None:
        """Record a new size of a storage, if it has changed."""
        block = self._blocks.get(storage_key(storage))
        if block is None or block.num_bytes == storage.nbytes():
            return
        self._release(block, resized=True)
        self._allocate(block, storage.nbytes(), what, stream, None)

    def address(self, x: Tensor) -> int:
        """Return an address for `data_ptr`, without overlaps of blocks; 0 without memory."""
        block = self.find(x)
        if block is None or not block.num_bytes:
            return 0
        return block.number * _ADDRESSES + int(x.storage_offset()) * x.element_size()

    def reset_peak(self) -> None:
        """Set the peak to the bytes that are alive now."""
        self.peak_bytes = self.live_bytes

    def forget(self) -> None:
        """Drop all storages, so that their ends are no longer recorded."""
        self._blocks.clear()
        self._deferred.clear()

    def _allocate(
        self, block: Block, num_bytes: int, what: str, stream: int, x: Tensor | None
    ) -> None:
        block.number, block.num_bytes = next(self._blocks_so_far), num_bytes
        if num_bytes == 0:
            return
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.num_allocations += 1
        self._emit(
            Allocate(
                block=block.number,
                num_bytes=num_bytes,
                stream=stream,
                what=what,
                shape=() if x is None else tuple(x.shape),
                dtype="" if x is None else str(x.dtype)[6:],
            )
        )

    def _release(self, block: Block, *, resized: bool = False) -> None:
        if block.num_bytes:
            self.live_bytes -= block.num_bytes
            self._emit(Release(block=block.number, resized=resized))

    def _gone(self, block: weakref.ref[torch.UntypedStorage]) -> None:
        if isinstance(block, Block) and self._blocks.pop(block.key, None) is not None:
            self._release(block)


class Buffers:
    """Storages on the host that asynchronous copies use, with their numbers in the trace."""

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = (
            weakref.WeakKeyDictionary()
        )
        self._named_so_far = count()

    def number(self, host: Tensor) -> int:
        """Return the number of a tensor's storage, a new number for a new storage."""
        storage = host.untyped_storage()
        if storage not in self._numbers:
            self._numbers[storage] = next(self._named_so_far)
        return self._numbers[storage]

    def among(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Yield the tensors whose storage has a number, with that number."""
        if not self._numbers:
            return
        for x in tensors:
            if (number := self._numbers.get(x.untyped_storage())) is not None:
                yield number, x
