"""The kernels behind `triton_buffers`, in Triton.

Every program has the counts of all pairs of a rank and a local expert in registers. They are few,
so that every program computes all sums of them again instead of exchanging sums with others.

Shape symbols: W ranks, L local experts, E experts, C rows per pair of ranks, B numbers in a block.
"""

import triton
import triton.language as tl


@triton.jit
def tell(  # noqa: PLR0917  # Triton's launch passes them by position
    sent: tl.tensor,
    counts: tl.tensor,
    code: tl.tensor,
    W: tl.constexpr,
    L: tl.constexpr,
    B: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_B: tl.constexpr,
    INVALID: tl.constexpr,
    TOKENS: tl.constexpr,
    MOST: tl.constexpr,
    COUNTS: tl.constexpr,
) -> None:
    """Write the block for one rank."""
    receiver = tl.program_id(0).to(tl.int64)
    rank, local = tl.arange(0, BLOCK_W)[:, None], tl.arange(0, BLOCK_L)[None, :]
    table = tl.load(counts + rank * L + local, mask=(rank < W) & (local < L), other=0)
    column = tl.arange(0, BLOCK_B)
    value = tl.zeros((BLOCK_B,), dtype=tl.int64) + code
    value = tl.where(column == INVALID, tl.load(counts + W * L), value)
    value = tl.where(column == TOKENS, 0, value)
    value = tl.where(column == MOST, tl.max(tl.sum(table, axis=1), axis=0), value)
    expert = column - COUNTS
    theirs = (expert >= 0) & (expert < L)
    number = tl.load(counts + receiver * L + expert, mask=theirs, other=0)
    value = tl.where(theirs, number, value)
    tl.store(sent + receiver * B + column, value, mask=column < B)


@triton.jit
def sort_received(  # noqa: PLR0917
    row_at: tl.tensor,
    position_of: tl.tensor,
    ends: tl.tensor,
    totals: tl.tensor,
    poison: tl.tensor,
    found: tl.tensor,
    received: tl.tensor,
    weights: tl.tensor,
    code: tl.tensor,
    room: tl.tensor,
    W: tl.constexpr,
    L: tl.constexpr,
    B: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK: tl.constexpr,
    CODE: tl.constexpr,
    INVALID: tl.constexpr,
    MOST: tl.constexpr,
    COUNTS: tl.constexpr,
) -> None:
    """Place some of the rows that one rank has sent; the first program also records errors.

    Whatever counts were received, rows of a rank never exceed the room. Padding follows all rows.
    """
    source = tl.program_id(0).to(tl.int64)
    rank, local = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK_L)
    there = (rank < W)[:, None] & (local < L)[None, :]
    place = received + rank[:, None] * B + COUNTS + local[None, :]
    number = tl.load(place, mask=there, other=0)
    number = tl.minimum(tl.maximum(number, 0), room)
    upto = tl.cumsum(number, axis=1)
    before, upto = tl.minimum(upto - number, room), tl.minimum(upto, room)
    fits = upto - before
    total = tl.sum(fits, axis=0)
    end = tl.cumsum(total, axis=0)
    theirs = (rank == source)[:, None]
    earlier = tl.sum(tl.where((rank < source)[:, None], fits, 0), axis=0)
    shift = end - total + earlier - tl.sum(tl.where(theirs, before, 0), axis=0)
    last = tl.sum(tl.where(theirs, upto, 0), axis=0)
    num_rows = tl.sum(tl.where(theirs, fits, 0))
    padding = tl.sum(total) + source * room - tl.sum(earlier)
    offset = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    passed = (last[None, :] <= offset[:, None]) & (local < L)[None, :]
    expert = tl.sum(passed.to(tl.int32), axis=1)
    moved = tl.sum(tl.where(local[None, :] == expert[:, None], shift[None, :], 0), axis=1)
    is_row = offset < num_rows
    position = offset + tl.where(is_row, moved, padding - num_rows)
    row = source * room + offset
    here = offset < room
    tl.store(row_at + position, tl.where(is_row, row, -1), mask=here)
    tl.store(position_of + row, tl.where(is_row, position, -1), mask=here)
    if (source == 0) & (tl.program_id(1) == 0):
        tl.store(ends + local, end.to(tl.int32), mask=local < L)
        tl.store(totals + local, total, mask=local < L)
        first = received + rank * B
        most = tl.max(tl.load(first + MOST, mask=rank < W, other=0), axis=0)
        invalid = tl.max(tl.load(first + INVALID, mask=rank < W, other=0), axis=0)
        other = tl.load(first + CODE, mask=rank < W, other=code) != code
        different = tl.sum(other.to(tl.int64), axis=0)
        is_wrong = (most > room) | (invalid > 0) | (different > 0)
        tl.store(poison, tl.where(is_wrong, float("nan"), 1.0).to(poison.dtype.element_ty))
        if weights is not None:
            weight = tl.load(weights)
            is_number = weight == weight  # noqa: PLR0124
            most = tl.where(is_number, most, tl.minimum(most, room + 1))
        if is_wrong:
            tl.atomic_max(found, tl.where(most > room, most, 0))
            tl.atomic_max(found + 1, invalid)
            tl.atomic_max(found + 2, different)
