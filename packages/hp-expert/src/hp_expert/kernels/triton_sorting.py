"""Slots sorted by expert in three launches; see Note [A sort by counting].

Reads 8 bytes of each slot in each of two passes, and writes 24. What `permute` computes by torch is
the reference.

Shape symbols: T tokens, K choices per token, S = T * K slots, E experts, B blocks, N keys or more.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hp_expert.kernels.launching import launch_kernel, power_from

_launch = partial(launch_kernel, "triton_sorting_kernels")
_BLOCK = 256
_PART = 32
_TILE = 8192  # numbers that `scan` has in registers
_MOST_SLOTS = 2**31 - _BLOCK


class Starts(NamedTuple):
    """What is known of slots that were counted.

    Attributes:
        starts: Where slots go, as `place` wants it, int32 [B + 1, N].
        counts: Slots of each expert, of experts that do not exist, and of none, int64 [E + 2].
        ends: Where the positions of each expert end, int32 [E].
        run: How many experts were counted as one.
    """

    starts: Tensor
    counts: Tensor
    ends: Tensor
    run: int = 1


def count(experts_TK: Tensor, num_experts: int, *, run: int = 1) -> Starts:
    """Count the slots of each expert, those of none, and those of experts that do not exist.

    Args:
        experts_TK: Contiguous; int64 or int32.
        num_experts: E.
        run: How many experts count as one, such as those of a rank; E is the number of such runs.

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
        **sizes,
        DIV=run,
        BLOCK=_BLOCK,
        PART=_PART,
    )
    _launch(
        "scan",
        (1,),
        made=(starts, totals, ends),
        given=(found,),
        varying=(num_blocks,),
        **sizes,
        ROWS=max(1, _TILE // keys),
    )
    return Starts(starts, totals, ends, run)


def place(experts_TK: Tensor, counted: Starts) -> tuple[Tensor, Tensor, Tensor]:
    """Sort what was counted, stably.

    Returns:
        Slot at each position [S], its token [S], and position of each slot [T, K]; all int64. Slots
        of no expert have -1, and so have the positions after those of all others.
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
        **_sizes(counted.ends.numel()),
        DIV=counted.run,
        K=num_choices,
        BLOCK=_BLOCK,
        PART=_PART,
    )
    return made


def fill(
    experts_TK: Tensor, counted: Starts, *, num_local: int, num_ranks: int, room: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort what was counted into a buffer that has so much room for the slots of each rank.

    Returns:
        Slot at each place of the buffer [W * room], its token, and place of each slot [T, K]; all
        int64, -1 where there is none.
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
        **_sizes(counted.ends.numel()),
        L=num_local,
        K=num_choices,
        BLOCK=_BLOCK,
        PART=_PART,
    )
    return order, token, inverse


def find_ranks(experts_TK: Tensor, *, num_local: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """Find out which ranks have a token's experts.

    Returns:
        For each rank itself, or -1 if it has none of the experts, int64 [T, W]; and how many it
        has, int32 [T, W].
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
        W=num_ranks,
        L=num_local,
        K=num_choices,
        BLOCK_T=tokens,
        BLOCK_W=width,
        enable_fp_fusion=False,
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
        E=num_local * num_ranks,
        L=num_local,
        K=num_choices,
        BLOCK=_BLOCK,
        enable_fp_fusion=False,
    )
    return codes


def decode(codes_P: Tensor, num_begun_P: Tensor, *, per_row: int) -> tuple[Tensor, Tensor]:
    """Return the slot and the local expert of each code, int64 [P].

    Args:
        codes_P: Codes as they arrived.
        num_begun_P: How many rows have begun up to each of them, int64.
        per_row: Slots of a row.
    """
    num_codes = codes_P.numel()
    slots, experts = torch.empty_like(num_begun_P), torch.empty_like(num_begun_P)
    _launch(
        "decode",
        (-(-num_codes // _BLOCK),),
        made=(slots, experts),
        given=(codes_P, num_begun_P),
        varying=(num_codes, per_row),
        BLOCK=_BLOCK,
        num_warps=8,  # a number for each thread: of two, some lie on a stack
        enable_fp_fusion=False,
    )
    return slots, experts


def _sizes(num_experts: int) -> dict[str, Any]:
    keys = power_from(num_experts + 2)
    return {"E": num_experts, "KEYS": keys, "num_warps": 8, "enable_fp_fusion": False}
