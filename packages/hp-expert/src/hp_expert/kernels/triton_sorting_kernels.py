"""The kernels behind `triton_sorting`, in Triton.

Keys are few, so slots are counted instead of compared. Slots are cut into blocks; `count` counts
the keys of each block, `scan` adds up blocks, and so finds the position of the first slot of each
key, of all blocks and in each block, and `place` writes every slot to its position. Slots of one
key stay in order, an output has one writer, and there are no atomics.

E experts have E + 2 keys: key E is of experts that do not exist, key E + 1 of dropped slots. DIV
neighbouring experts may share a key, such as those of a rank.

Shape symbols: S slots, K choices per token, E experts, B blocks, N keys or more.
"""

import triton
import triton.language as tl


@triton.jit
def _key_of(
    experts: tl.tensor,
    slot: tl.tensor,
    num_slots: tl.tensor,
    E: tl.constexpr,
    DIV: tl.constexpr,
) -> tl.tensor:
    """Return the key of each slot; -1 where there is no slot."""
    expert = tl.load(experts + slot, mask=slot < num_slots, other=0).to(tl.int64)
    exists = (expert >= 0) & (expert < E * DIV)
    run = tl.where(exists, expert, 0).to(tl.int32) // DIV
    key = tl.where(exists, run, tl.where(expert == -1, E + 1, E))
    return tl.where(slot < num_slots, key, -1)


@triton.jit(do_not_specialize=["num_slots"])
def count(  # noqa: PLR0917  # Triton's launch passes them by position
    counts: tl.tensor,
    experts: tl.tensor,
    num_slots: tl.tensor,
    E: tl.constexpr,
    DIV: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Count the slots of each key in a block: int32 [B, N]."""
    block = tl.program_id(0).to(tl.int64)
    keys = tl.arange(0, KEYS)
    found = tl.zeros((KEYS,), dtype=tl.int32)
    for start in range(0, BLOCK, PART):
        slot = block * BLOCK + start + tl.arange(0, PART)
        key = _key_of(experts, slot, num_slots, E, DIV)
        found += tl.sum((key[:, None] == keys[None, :]).to(tl.int32), axis=0)
    tl.store(counts + block * KEYS + keys, found)


@triton.jit
def _in_all(starts: tl.tensor, num_blocks: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """Return the address of the positions of the first slots of all keys."""
    return starts + tl.full((1,), KEYS, tl.int64) * num_blocks


@triton.jit(do_not_specialize=["num_blocks"])
def scan(  # noqa: PLR0917
    starts: tl.tensor,
    totals: tl.tensor,
    ends: tl.tensor,
    counts: tl.tensor,
    num_blocks: tl.tensor,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Write the position of the first slot of each key: in each block, and in row B of all blocks.

    `starts` is int32 [B + 1, N]: positions in a block are relative to row B. `totals` is int64
    [E + 2], `ends` has the ends of the experts, int32 [E].
    """
    keys = tl.arange(0, KEYS)
    before = tl.zeros((KEYS,), dtype=tl.int32)
    for start in range(0, num_blocks, ROWS):
        block = start + tl.arange(0, ROWS).to(tl.int64)
        here = (block < num_blocks)[:, None]
        place = block[:, None] * KEYS + keys[None, :]
        number = tl.load(counts + place, mask=here, other=0)
        upto = tl.cumsum(number, axis=0)
        tl.store(starts + place, before[None, :] + upto - number, mask=here)
        before += tl.sum(number, axis=0)
    end = tl.cumsum(before, axis=0)
    tl.store(_in_all(starts, num_blocks, KEYS) + keys, end - before)
    tl.store(totals + keys, before.to(tl.int64), mask=keys < E + 2)
    tl.store(ends + keys, end, mask=keys < E)


@triton.jit
def _slots_of_block(  # noqa: PLR0917
    starts: tl.tensor,
    experts: tl.tensor,
    num_slots: tl.tensor,
    num_blocks: tl.tensor,
    E: tl.constexpr,
    DIV: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    KEYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the slots of this program's block, their keys, and their positions."""
    block = tl.program_id(0).to(tl.int64)
    mine = tl.arange(0, BLOCK)
    slot = block * BLOCK + mine
    key = _key_of(experts, slot, num_slots, E, DIV)
    here = slot < num_slots
    rank = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, BLOCK, PART):
        theirs = start + tl.arange(0, PART)
        other = _key_of(experts, block * BLOCK + theirs, num_slots, E, DIV)
        precedes = (other[None, :] == key[:, None]) & (theirs[None, :] < mine[:, None])
        rank += tl.sum(precedes.to(tl.int32), axis=1)
    first = tl.load(_in_all(starts, num_blocks, KEYS) + key, mask=here, other=0).to(tl.int64)
    first += tl.load(starts + block * KEYS + key, mask=here, other=0)
    return slot, key, first + rank


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def place(  # noqa: PLR0917
    order: tl.tensor,
    token: tl.tensor,
    inverse: tl.tensor,
    starts: tl.tensor,
    experts: tl.tensor,
    num_slots: tl.tensor,
    num_blocks: tl.tensor,
    E: tl.constexpr,
    DIV: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Write the slots of a block to their positions, and the positions to the slots.

    Slots without an expert come last: they get the position -1, and their positions the slot -1.
    """
    slot, key, position = _slots_of_block(
        starts, experts, num_slots, num_blocks, E, DIV, BLOCK, PART, KEYS
    )
    here, exists = slot < num_slots, key < E
    tl.store(order + position, tl.where(exists, slot, -1), mask=here)
    tl.store(token + position, tl.where(exists, slot // K, -1), mask=here)
    tl.store(inverse + slot, tl.where(exists, position, -1), mask=here)


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "room"])
def fill(  # noqa: PLR0917
    order: tl.tensor,
    token: tl.tensor,
    inverse: tl.tensor,
    starts: tl.tensor,
    experts: tl.tensor,
    num_slots: tl.tensor,
    num_blocks: tl.tensor,
    room: tl.tensor,
    E: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """Write the slots of a block into a buffer that has `room` for those of each rank.

    A slot without an expert, or without room, gets the place -1. Places without a slot are left as
    they are.
    """
    slot, key, position = _slots_of_block(
        starts, experts, num_slots, num_blocks, E, 1, BLOCK, PART, KEYS
    )
    here = slot < num_slots
    exists = here & (key < E)
    rank = (key // L).to(tl.int64)
    first = tl.load(_in_all(starts, num_blocks, KEYS) + rank * L, mask=exists, other=0)
    offset = position - first
    fits = exists & (offset < room)
    place = rank * room + offset
    tl.store(order + place, slot, mask=fits)
    tl.store(token + place, slot // K, mask=fits)
    tl.store(inverse + slot, tl.where(fits, place, -1), mask=here)


@triton.jit(do_not_specialize=["num_tokens"])
def find_ranks(  # noqa: PLR0917
    ranks: tl.tensor,
    slots: tl.tensor,
    experts: tl.tensor,
    num_tokens: tl.tensor,
    W: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
) -> None:
    """Write, for each token and rank, the number of the token's experts there; the rank, or -1."""
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    rank = tl.arange(0, BLOCK_W)
    here = token < num_tokens
    found = tl.zeros((BLOCK_T, BLOCK_W), dtype=tl.int32)
    for choice in tl.static_range(K):
        expert = tl.load(experts + token * K + choice, mask=here, other=-1).to(tl.int64)
        exists = (expert >= 0) & (expert < W * L)
        theirs = tl.where(exists, expert // L, -1)
        found += (theirs[:, None] == rank[None, :]).to(tl.int32)
    place = token[:, None] * W + rank[None, :]
    mask = here[:, None] & (rank < W)[None, :]
    tl.store(slots + place, found, mask=mask)
    tl.store(ranks + place, tl.where(found > 0, rank[None, :], -1).to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["num_slots"])
def encode(  # noqa: PLR0917
    codes: tl.tensor,
    order: tl.tensor,
    experts: tl.tensor,
    num_slots: tl.tensor,
    E: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the code of the slot at each position: local expert, and whether it begins a row."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = position < num_slots
    slot = tl.load(order + position, mask=here, other=0).to(tl.int64)
    # A position without a slot has -1.
    expert = tl.load(experts + slot, mask=here & (slot >= 0), other=-1).to(tl.int64)
    rank = expert // L
    begins = tl.full((BLOCK,), 1, dtype=tl.int64)
    token, choice = slot // K, slot % K
    for other in tl.static_range(K):
        place = experts + token * K + other
        theirs = tl.load(place, mask=here & (slot >= 0), other=-1).to(tl.int64)
        precedes = (other < choice) & (theirs >= 0) & (theirs // L == rank)
        begins = tl.where(precedes, 0, begins)
    exists = (expert >= 0) & (expert < E)
    code = tl.where(exists, (expert - rank * L) * 2 + begins, 0)
    tl.store(codes + position, code.to(codes.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["num_codes", "per_row"])
def decode(  # noqa: PLR0917
    slots: tl.tensor,
    experts: tl.tensor,
    codes: tl.tensor,
    num_begun: tl.tensor,
    num_codes: tl.tensor,
    per_row: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write the slot and local expert of each code, from the number of rows begun up to it."""
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = position < num_codes
    code = tl.load(codes + position, mask=here, other=1).to(tl.int64)
    row = tl.load(num_begun + position, mask=here, other=1).to(tl.int64) - 1
    inside = tl.full((BLOCK,), 0, dtype=tl.int64)
    looking = code % 2 == 0
    for back in range(1, per_row):
        before = position - back
        earlier = tl.load(codes + before, mask=here & looking & (before >= 0), other=1)
        inside = tl.where(looking, back, inside)
        looking = looking & (earlier.to(tl.int64) % 2 == 0)
    tl.store(slots + position, row * per_row + inside, mask=here)
    tl.store(experts + position, code // 2, mask=here)
