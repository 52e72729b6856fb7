"""Blocks of device memory in the pools of torch's caching allocator. No torch."""

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
        """Tells whether the segment has other blocks as well."""
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
