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

from dataclasses import dataclass, field

from hp_dry.memory.pools import MIB, SMALL_SEGMENT_BYTES, Block, Pool

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
