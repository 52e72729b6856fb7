"""Slots sorted by expert in three launches; see `hp_expert.kernels.triton_sorting_kernels`.

It reads 8 bytes of each slot in each of two passes, and writes 24. The reference is the computation
by torch in `hp_expert.permute`.

Shape symbols: T tokens, K choices per token, S = T * K slots, E experts, B blocks, N keys or more.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hp_expert.kernels.launching import launch_kernel, power_from

_launch = partial(launch_kernel, "triton_sorting_kernels")
_BLOCK = 256
_PART = 32
_TILE = 8192  # numbers that `scan` has in registers
_MOST_SLOTS = 2**31 - _BLOCK


class Starts(NamedTuple):
    """The counts of slots, and the positions that follow from them.

    Attributes:
        starts: Position of the first slot of each key in each block, for `place`: int32 [B + 1, N].
        counts: Slots of each expert, of experts that do not exist, and of none, int64 [E + 2].
        ends: End of the positions of each expert, int32 [E].
        run: Number of neighbouring experts that were counted as one.
    """

    starts: Tensor
    counts: Tensor
    ends: Tensor
    run: int = 1


def count(experts_TK: Tensor, num_experts: int, *, run: int = 1) -> Starts:
    """Count the slots of each expert, those of experts that do not exist, and dropped ones.

    Args:
        experts_TK: Experts, contiguous; int64 or int32.
        num_experts: Number of experts, or of runs of them, E.
        run: Number of neighbouring experts to count as one, such as those of a rank.

    Raises:
        ValueError: If there are 2 ** 31 slots or more.
    """
    num_slots = experts_TK.numel()
    if num_slots >= _MOST_SLOTS:
        raise ValueError(f"slots ({num_slots}) must be fewer than {_MOST_SLOTS}")
    sizes, num_blocks = _sizes(num_experts), -(-num_slots // _BLOCK)
    keys = sizes["KEYS"]
    found = experts_TK.new_empty(num_blocks, keys, dtype=torch.int32)
    starts = experts_TK.new_empty(num_blocks + 1, keys, dtype=torch.int32)
    totals = experts_TK.new_empty(num_experts + 2, dtype=torch.int64)
    ends = experts_TK.new_empty(num_experts, dtype=torch.int32)
    _launch(
        "count",
        (num_blocks,),
        made=(found,),
        given=(experts_TK,),
        varying=(num_slots,),
        constants={**sizes, "DIV": run, "BLOCK": _BLOCK, "PART": _PART},
    )
    _launch(
        "scan",
        (1,),
        made=(starts, totals, ends),
        given=(found,),
        varying=(num_blocks,),
        constants={**sizes, "ROWS": max(1, _TILE // keys)},
    )
    return Starts(starts, totals, ends, run)


def place(experts_TK: Tensor, counted: Starts) -> tuple[Tensor, Tensor, Tensor]:
    """Sort counted slots, stably.

    Returns:
        Slot at each position [S], its token [S], and position of each slot [T, K]; all int64. -1
        for slots without an expert, and for the last positions, which have no slot.
    """
    num_slots, (_, num_choices) = experts_TK.numel(), experts_TK.shape
    made = (
        experts_TK.new_empty(num_slots, dtype=torch.int64),
        experts_TK.new_empty(num_slots, dtype=torch.int64),
        experts_TK.new_empty(experts_TK.shape, dtype=torch.int64),
    )
    num_blocks = -(-num_slots // _BLOCK)
    _launch(
        "place",
        (num_blocks,),
        made=made,
        given=(counted.starts, experts_TK),
        varying=(num_slots, num_blocks),
        constants={
            **_sizes(counted.ends.numel()),
            "DIV": counted.run,
            "K": num_choices,
            "BLOCK": _BLOCK,
            "PART": _PART,
        },
    )
    return made


def fill(
    experts_TK: Tensor, counted: Starts, *, num_local: int, num_ranks: int, room: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort counted slots into a buffer with `room` places for the slots of each rank.

    Returns:
        Slot at each place of the buffer [W * room], its token, and place of each slot [T, K]; all
        int64, -1 for a place without a slot and a slot without a place.
    """
    num_slots, (_, num_choices) = experts_TK.numel(), experts_TK.shape
    order, token = experts_TK.new_full((2, num_ranks * room), -1, dtype=torch.int64)
    inverse = experts_TK.new_empty(experts_TK.shape, dtype=torch.int64)
    num_blocks = -(-num_slots // _BLOCK)
    _launch(
        "fill",
        (num_blocks,),
        made=(order, token, inverse),
        given=(counted.starts, experts_TK),
        varying=(num_slots, num_blocks, room),
        constants={
            **_sizes(counted.ends.numel()),
            "L": num_local,
            "K": num_choices,
            "BLOCK": _BLOCK,
            "PART": _PART,
        },
    )
    return order, token, inverse


def find_ranks(experts_TK: Tensor, *, num_local: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Find the ranks that have experts of each token.

    Returns:
        Each rank, or -1 if it has none of a token's experts, int64 [T, W]; and the number of the
        token's experts on it, int32 [T, W].
    """
    num_tokens, num_choices = experts_TK.shape
    ranks = experts_TK.new_empty(num_tokens, num_ranks, dtype=torch.int64)
    slots = experts_TK.new_empty(num_tokens, num_ranks, dtype=torch.int32)
    width = power_from(num_ranks)
    tokens = max(1, _TILE // 32 // width)
    _launch(
        "find_ranks",
        (-(-num_tokens // tokens),),
        made=(ranks, slots),
        given=(experts_TK,),
        varying=(num_tokens,),
        constants={
            "W": num_ranks,
            "L": num_local,
            "K": num_choices,
            "BLOCK_T": tokens,
            "BLOCK_W": width,
            "enable_fp_fusion": False,
        },
    )
    return ranks, slots


def encode(
    order_S: Tensor, experts_TK: Tensor, *, num_local: int, num_ranks: int, dtype: torch.dtype
) -> Tensor:
    """Return the code of the slot at each position [S]; see `hp_expert.dispatch.deduplicated`."""
    num_slots, (_, num_choices) = order_S.numel(), experts_TK.shape
    codes = order_S.new_empty(num_slots, dtype=dtype)
    _launch(
        "encode",
        (-(-num_slots // _BLOCK),),
        made=(codes,),
        given=(order_S, experts_TK),
        varying=(num_slots,),
        constants={
            "E": num_local * num_ranks,
            "L": num_local,
            "K": num_choices,
            "BLOCK": _BLOCK,
            "enable_fp_fusion": False,
        },
    )
    return codes


def decode(codes_P: Tensor, num_begun_P: Tensor, *, per_row: int) -> tuple[Tensor, Tensor]:
    """Return the slot and the local expert of each code, int64 [P].

    Args:
        codes_P: Received codes.
        num_begun_P: Number of rows that have begun up to each code, int64.
        per_row: Number of slots of a row.
    """
    num_codes = codes_P.numel()
    slots, experts = torch.empty_like(num_begun_P), torch.empty_like(num_begun_P)
    _launch(
        "decode",
        (-(-num_codes // _BLOCK),),
        made=(slots, experts),
        given=(codes_P, num_begun_P),
        varying=(num_codes, per_row),
        # Eight warps, one number per thread: with two per thread some registers would spill.
        constants={"BLOCK": _BLOCK, "num_warps": 8, "enable_fp_fusion": False},
    )
    return slots, experts


def _sizes(num_experts: int) -> dict[str, int]:
    keys = power_from(num_experts + 2)
    return {"E": num_experts, "KEYS": keys, "num_warps": 8, "enable_fp_fusion": False}
