"""Model of torch's `CUDACachingAllocator`: blocks of requests, reserved memory. No torch.

It follows `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h` of torch 2.13, with
their defaults: sizes are rounded up to 512 bytes; up to 1 MiB comes from segments of 2 MiB, up to
10 MiB from segments of 20 MiB, and more from segments rounded up to 2 MiB; every stream has free
blocks of its own; the smallest that fits is taken, and split where at least 512 bytes of a small,
or more than 1 MiB of a large one are left over; free neighbours are merged. If the device has no
more, free segments are given back, and the request is tried again. Expandable segments are ranges
of addresses, one for each stream and pool, in which memory is mapped in pages of 2 MiB or 20 MiB.

Left out: garbage collection of old blocks, rounding to divisions of powers of two, private pools of
CUDA graphs, `cudaMallocAsync`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field

MIB = 2**20
SMALL_SEGMENT_BYTES = 2 * MIB


@dataclass(slots=True, eq=False)
class Block:
    """Range of addresses, in use or free.

    Attributes:
        address: First address of the range. Addresses are simulated and matter within a segment
            only.
        size: Bytes, rounded as the allocator rounds them.
        stream: Stream whose requests it serves.
        pool: Pool of the block while it is free.
        expandable: Whether its segment is expandable.
        is_mapped: Whether the addresses have memory; always true unless `expandable`.
        is_taken: Whether a tensor uses it, or a stream that has borrowed it may still use it.
        before: Neighbour at lower addresses in the same segment.
        after: Neighbour at higher addresses in the same segment.
    """

    address: int
    size: int
    stream: int
    pool: Pool
    expandable: bool = False
    is_mapped: bool = True
    is_taken: bool = False
    before: Block | None = None
    after: Block | None = None

    @property
    def is_split(self) -> bool:
        """Tell whether the segment has other blocks as well."""
        return self.before is not None or self.after is not None

    def cut(self, size: int) -> Block:
        """Cut the block to `size` bytes; return the rest, a free block outside the pool."""
        rest = Block(
            self.address + size,
            self.size - size,
            self.stream,
            self.pool,
            self.expandable,
            self.is_mapped,
            before=self,
            after=self.after,
        )
        if self.after is not None:
            self.after.before = rest
        self.size, self.after = size, rest
        return rest


@dataclass(slots=True)
class Pool:
    """Free blocks of small or of large requests, and the unmapped ranges of their segments.

    Attributes:
        is_small: Whether it serves requests of up to 1 MiB, and not larger requests.
        free: Free blocks of each stream, sorted by size in bytes, then by address.
        unmapped: Unmapped ranges of each stream, sorted by address.
    """

    is_small: bool
    free: dict[int, list[tuple[int, int, Block]]] = field(default_factory=dict)
    unmapped: dict[int, list[tuple[int, Block]]] = field(default_factory=dict)

    def add(self, block: Block) -> None:
        """Add a free block."""
        if block.is_mapped:
            insort(self.free.setdefault(block.stream, []), (block.size, block.address, block))
        else:
            insort(self.unmapped.setdefault(block.stream, []), (block.address, block))

    def remove(self, block: Block) -> None:
        """Remove a block of the pool."""
        if block.is_mapped:
            sizes = self.free[block.stream]
            del sizes[bisect_left(sizes, (block.size, block.address))]
        else:
            addresses = self.unmapped[block.stream]
            del addresses[bisect_left(addresses, (block.address,))]

    def merge(self, block: Block) -> None:
        """Merge the free neighbours of a block into it; the block must be outside the pool."""
        before, after = block.before, block.after
        if before is not None and self._can_merge(block, before):
            self.remove(before)
            block.address, block.size = before.address, before.size + block.size
            block.before = before.before
            if block.before is not None:
                block.before.after = block
        if after is not None and self._can_merge(block, after):
            self.remove(after)
            block.size += after.size
            block.after = after.after
            if block.after is not None:
                block.after.before = block

    def best_fit(self, size: int, stream: int) -> Block | None:
        """Return the smallest free block of at least `size` bytes, at the lowest address."""
        sizes = self.free.get(stream, [])
        place = bisect_left(sizes, (size, 0))
        if place == len(sizes):
            return None
        block = sizes[place][2]
        while block.expandable and place + 1 < len(sizes):
            place += 1
            if _room(sizes[place][2]) >= _room(block):
                break
            block = sizes[place][2]
        return block

    def blocks(self) -> Iterator[Block]:
        """Iterate over a copy of the list of free blocks."""
        return iter([block for sizes in self.free.values() for _, _, block in sizes])

    @staticmethod
    def _can_merge(block: Block, other: Block) -> bool:
        return not other.is_taken and other.is_mapped == block.is_mapped


def _room(block: Block) -> int:
    """Return the size to which an expandable block can grow."""
    after = block.after
    return block.size + (after.size if after is not None and not after.is_mapped else 0)


_UNIT = 512
_SMALL_BYTES = MIB
_LARGE_SEGMENT_BYTES = 20 * MIB
_MIN_LARGE_BYTES = 10 * MIB
_ROUND_LARGE_BYTES = 2 * MIB
_SPARE_OVERSIZE_BYTES = 20 * MIB
_FIRST_ADDRESS = 2**22 * _LARGE_SEGMENT_BYTES
_ENDLESS_BYTES = 2**46


def round_up(num_bytes: int, unit: int = _UNIT) -> int:
    """Round a request up as torch does, by default to a multiple of 512 bytes."""
    return max(unit, -(-num_bytes // unit) * unit)


@dataclass(slots=True)
class CachingAllocator:
    """State of the allocator of one device.

    Attributes:
        capacity: Bytes that it may reserve on the device; None: without limit.
        expandable: Whether new segments are expandable.
        max_split: Bytes from which on a block is neither split nor used for smaller requests; None:
            no limit.
        reserved: Bytes that it has reserved on the device.
        allocated: Bytes of blocks that tensors have, rounded as the allocator rounds them.
        num_segments: Segments from `cudaMalloc` that were not freed, and expandable segments.
        num_retries: Number of times that free memory was returned to the device for a request.
    """

    capacity: int | None
    expandable: bool = False
    max_split: int | None = None
    reserved: int = 0
    allocated: int = 0
    num_segments: int = 0
    num_retries: int = 0
    heads: dict[int, Block] = field(default_factory=dict)
    _small: Pool = field(default_factory=lambda: Pool(is_small=True))
    _large: Pool = field(default_factory=lambda: Pool(is_small=False))
    _next_address: int = _FIRST_ADDRESS

    def take(self, num_bytes: int, stream: int, *, cached: bool = True) -> Block | None:
        """Find memory for a request, without returning free memory to the device.

        Args:
            num_bytes: Size of the request in bytes, before rounding.
            stream: Stream that is current for the request.
            cached: Whether to look for a free block first. As in torch, a repeated request gets no
                free block, not even a block that a wait for its borrower has freed.

        Returns:
            A block, or None if the device has no more.
        """
        size = round_up(num_bytes)
        pool = self._small if size <= _SMALL_BYTES else self._large
        block = self._cached(pool, size, stream) if cached else None
        block = block or self._grow(pool, size, stream)
        if block is None:
            return None
        pool.remove(block)
        if self._is_split_for(block, size):
            pool.add(block.cut(size))
        block.is_taken = True
        self.allocated += block.size
        return block

    def forget(self, block: Block) -> None:
        """Release a block of a tensor, which streams that have borrowed it may still use."""
        self.allocated -= block.size

    def free(self, block: Block) -> None:
        """Make a released block available to requests on its stream."""
        block.is_taken = False
        self._merge(block)
        block.pool.add(block)

    def give_back_oversized(self, num_bytes: int, stream: int) -> bool:
        """Return blocks of `max_split` and more to the device, to make room for a large request."""
        size = round_up(num_bytes)
        if (
            self.max_split is None or self.expandable
        ):  # torch returns only pages of expandable segments
            return False
        pool = self._small if size <= _SMALL_BYTES else self._large
        wanted = max(size, self.max_split)
        if (fitting := pool.best_fit(wanted, stream)) is not None:
            self._give_back(fitting)
            return True
        found = 0
        for block_size, _, block in reversed(pool.free.get(stream, []).copy()):
            if found >= wanted or block_size < self.max_split:
                break
            found += block_size
            self._give_back(block)
        return found >= wanted

    def give_back(self) -> None:
        """Return unused segments, and unused pages of expandable segments, to the device."""
        self.num_retries += 1
        for pool in (self._large, self._small):
            for block in pool.blocks():
                if block.expandable:
                    self._unmap(block)
                elif not block.is_split:
                    self._give_back(block)

    def _cached(self, pool: Pool, size: int, stream: int) -> Block | None:
        block = pool.best_fit(size, stream)
        if block is None or self.max_split is None:
            return block
        limit = self.max_split if size < self.max_split else size + _SPARE_OVERSIZE_BYTES
        return block if block.size < limit else None

    def _is_split_for(self, block: Block, size: int) -> bool:
        left = block.size - size
        if block.pool.is_small or self.expandable:
            return left >= _UNIT
        return left > _SMALL_BYTES and (self.max_split is None or size < self.max_split)

    def _grow(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Reserve memory of the device for a request: a free block of at least `size` bytes."""
        if self.capacity is not None and size > self.capacity:
            return None
        if self.expandable:
            return self._expand(pool, size, stream)
        num_bytes = _segment_bytes(size)
        if not self._has(num_bytes):
            return None
        self.reserved += num_bytes
        return self._segment(pool, num_bytes, stream)

    def _has(self, num_bytes: int) -> bool:
        return self.capacity is None or self.reserved + num_bytes <= self.capacity

    def _segment(
        self, pool: Pool, num_bytes: int, stream: int, *, expandable: bool = False
    ) -> Block:
        """Add a segment at new addresses, with a gap to all others."""
        block = Block(self._next_address, num_bytes, stream, pool, expandable, not expandable)
        self._next_address += round_up(num_bytes, _LARGE_SEGMENT_BYTES) + _LARGE_SEGMENT_BYTES
        self.heads[block.address] = block
        self.num_segments += 1
        pool.add(block)
        return block

    def _give_back(self, block: Block) -> None:
        block.pool.remove(block)
        del self.heads[block.address]
        self.reserved -= block.size
        self.num_segments -= 1

    def _merge(self, block: Block) -> None:
        """Merge a block with its free neighbours, and update the first block of the segment."""
        block.pool.merge(block)
        if block.before is None:
            self.heads[block.address] = block

    def _expand(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Map pages at the lowest addresses with room for `size` bytes, free and unmapped."""
        block = self._expandable(pool, size, stream)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.after
            if after is None or not self._map(after, min(size - block.size, after.size)):
                return None
            block = after
        return block

    def _expandable(self, pool: Pool, size: int, stream: int) -> Block:
        for _, unmapped in pool.unmapped.get(stream, []):
            before = unmapped.before
            first = unmapped if before is None or before.is_taken else before
            room, block = 0, first
            while room < size and not block.is_taken:
                room += block.size
                if block.after is None:
                    break
                block = block.after
            if room >= size:
                return first
        capacity = _ENDLESS_BYTES if self.capacity is None else self.capacity
        space = round_up(capacity + capacity // 8, _page(pool))
        return self._segment(pool, space, stream, expandable=True)

    def _map(self, block: Block, size: int) -> bool:
        """Map whole pages for the first `size` bytes of an unmapped block."""
        num_bytes = round_up(size, _page(block.pool))
        if not self._has(num_bytes):
            return False
        pool = block.pool
        pool.remove(block)
        if num_bytes < block.size:
            pool.add(block.cut(num_bytes))
        block.is_mapped = True
        self._merge(block)
        pool.add(block)
        self.reserved += num_bytes
        return True

    def _unmap(self, block: Block) -> None:
        """Return the whole pages of a free block of an expandable segment to the device."""
        pool, page = block.pool, _page(block.pool)
        begin = -(-block.address // page) * page
        end = (block.address + block.size) // page * page
        if begin >= end:
            return
        pool.remove(block)
        if begin > block.address:
            rest = block.cut(begin - block.address)
            pool.add(block)
            block = rest
        if end < block.address + block.size:
            pool.add(block.cut(end - block.address))
        block.is_mapped = False
        self.reserved -= block.size
        self._merge(block)
        pool.add(block)
        if not block.is_split:
            pool.remove(block)
            del self.heads[block.address]
            self.num_segments -= 1


def _segment_bytes(size: int) -> int:
    if size <= _SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    return _LARGE_SEGMENT_BYTES if size < _MIN_LARGE_BYTES else round_up(size, _ROUND_LARGE_BYTES)


def _page(pool: Pool) -> int:
    return SMALL_SEGMENT_BYTES if pool.is_small else _LARGE_SEGMENT_BYTES
