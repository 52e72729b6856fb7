"""Blocks of numbers for buffers of a fixed size, and places of the rows received in them.

There are two launches, for some numbers per expert and per place of a buffer. The reference is the
computation by torch in `hp_expert.dispatch.bounded`.

Shape symbols: W ranks, L local experts, E = W * L experts, C rows per pair of ranks, N = W * C rows
of a buffer, B numbers in a block.
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from hp_expert.kernels.launching import launch_kernel, power_from

_launch = partial(launch_kernel, "triton_buffers_kernels")
_TILE = 2048  # comparisons of a program at once
_MOST_PLACES = 256
_MOST_ROWS = 2**31 - 2  # one more, which reports an overflow, still fits in int32


class Columns(NamedTuple):
    """The columns of a block: see `hp_expert.dispatch.exchange_plan`.

    Attributes:
        code: Column of the code of the header.
        invalid: Column of the number of slots with experts that do not exist.
        tokens: Column of the number of tokens before they were cut into slices.
        most: Column of the most slots for any rank.
        counts: First column of the numbers of slots of the receiver's experts.
    """

    code: int
    invalid: int
    tokens: int
    most: int
    counts: int

    def constants(self) -> dict[str, int]:
        """Return the constants of the kernels."""
        return {name.upper(): column for name, column in self._asdict().items()}


class Received(NamedTuple):
    """The places of received rows.

    Attributes:
        row: Row at each position of expert order, int64 [N]; -1 where there is padding.
        position: Position of each row, int64 [N]; -1 for padding.
        ends: End of the positions of each expert, int32 [L].
        num_tokens_per_expert: Positions of each expert, int64 [L].
        poison: 1, or NaN if rows of some rank are missing or wrong.
    """

    row: Tensor
    position: Tensor
    ends: Tensor
    num_tokens_per_expert: Tensor
    poison: Tensor


def tell(counts: Tensor, columns: Columns, *, code: int, num_ranks: int, size: int) -> Tensor:
    """Return the block for each rank, int64 [W, B].

    Args:
        counts: Slots of each expert, of experts that do not exist, and of none, int64 [E + 2].
        columns: Columns of the numbers; all others get the code.
        code: Code of the header.
        num_ranks: Number of ranks, W.
        size: Numbers in a block, B.
    """
    sent, num_experts = counts.new_empty(num_ranks, size), counts.shape[0] - 2
    sizes = {**_sizes(num_ranks, num_experts // num_ranks), **columns.constants()}
    sizes |= {"B": size, "BLOCK_B": power_from(size)}
    del sizes["CODE"]
    _launch("tell", (num_ranks,), made=(sent,), given=(counts, code), constants=sizes)
    return sent


def sort_received(
    received: Tensor,
    columns: Columns,
    *,
    code: int,
    room: int,
    num_local: int,
    weights: Tensor | None,
    found: Tensor,
    dtype: torch.dtype,
) -> Received:
    """Find the places of received rows, and errors of any rank.

    Args:
        received: Block from each rank, int64 [W, B].
        columns: Columns of the numbers.
        code: Code that all headers must have.
        room: Rows per pair of ranks, C.
        num_local: Number of local experts, L.
        weights: Routing weights of this rank, of which the first is read; or None.
        found: Most rows for a buffer that was too small, most slots without an expert, and most
            headers that differ, so far, int64 [3]; is updated.
        dtype: Dtype of the poison.

    Raises:
        ValueError: If there is room for 2 ** 31 - 1 rows or more.
    """
    num_ranks, width = received.shape
    if room > (most := _MOST_ROWS // max(num_ranks, num_local)):
        raise ValueError(f"rows_per_pair ({room}) must be at most {most}")
    row, position = received.new_empty(2, num_ranks * room)
    made = Received(
        row,
        position,
        received.new_empty(num_local, dtype=torch.int32),
        received.new_empty(num_local),
        received.new_empty((), dtype=dtype),
    )
    if weights is not None and weights.numel() == 0:
        weights = None
    sizes = {**_sizes(num_ranks, num_local), **columns.constants(), "B": width}
    del sizes["TOKENS"]
    block = max(16, min(_MOST_PLACES, _TILE // sizes["BLOCK_L"]))
    _launch(
        "sort_received",
        (num_ranks, -(-room // block)),
        made=(*made, found),
        given=(received, weights, code, room),
        updated=(found,),
        constants={**sizes, "BLOCK": block},
    )
    return made


def _sizes(num_ranks: int, num_local: int) -> dict[str, int]:
    blocks = {"BLOCK_W": power_from(num_ranks), "BLOCK_L": power_from(num_local)}
    return {"W": num_ranks, "L": num_local, **blocks, "num_warps": 8, "enable_fp_fusion": False}
