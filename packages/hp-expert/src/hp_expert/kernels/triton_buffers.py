"""What ranks tell each other of buffers of a fixed size, and where received rows go.

Two launches, of some numbers for each expert and each place of a buffer. What
`hp_expert.dispatch.bounded` computes by torch is the reference.

Shape symbols: W ranks, L local experts, E = W * L experts, C rows per pair of ranks, N = W * C rows
of a buffer, B numbers in a block.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hp_expert.kernels.launching import launch_kernel, power_from

_launch = partial(launch_kernel, "triton_buffers_kernels")
_TILE = 2048  # comparisons of a program at once
_MOST_PLACES = 256
_MOST_ROWS = 2**31 - 2  # one more than there is room for is a number as well


class Columns(NamedTuple):
    """Where the numbers of a block are: see `hp_expert.dispatch.exchange_plan`.

    Attributes:
        code: Code of the header.
        invalid: Slots with experts that do not exist.
        tokens: Tokens before they were cut into slices.
        most: Most slots for any rank.
        counts: First of the slots of each of the receiver's experts.
    """

    code: int
    invalid: int
    tokens: int
    most: int
    counts: int

    def constants(self) -> dict[str, int]:
        """Return what the kernels call them."""
        return {name.upper(): column for name, column in self._asdict().items()}


class Received(NamedTuple):
    """Where received rows go.

    Attributes:
        row: Row at each position of expert order, int64 [N]; -1 where there is padding.
        position: Position of each row, int64 [N]; -1 for padding.
        ends: Where the positions of each expert end, int32 [L].
        num_tokens_per_expert: Positions of each expert, int64 [L].
        poison: 1, or NaN if what some rank sends is not all or not right.
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
        columns: Where numbers go; all others are the code.
        code: Code of the header.
        num_ranks: W.
        size: B.
    """
    sent, num_experts = counts.new_empty(num_ranks, size), counts.shape[0] - 2
    sizes = {**_sizes(num_ranks, num_experts // num_ranks), **columns.constants()}
    sizes |= {"B": size, "BLOCK_B": power_from(size)}
    del sizes["CODE"]
    _launch("tell", (num_ranks,), made=(sent,), given=(counts, code), **sizes)
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
    """Find out where received rows go, and whether all is right.

    Args:
        received: Block from each rank, int64 [W, B].
        columns: Where the numbers are.
        code: Code that all headers must have.
        room: C.
        num_local: L.
        weights: Routing weights of this rank, of which the first is looked at; or None.
        found: Most rows that did not fit, most slots without an expert, and most headers that
            differ, so far, int64 [3]; is updated.
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
        **sizes,
        BLOCK=block,
    )
    return made


def _sizes(num_ranks: int, num_local: int) -> dict[str, Any]:
    blocks = {"BLOCK_W": power_from(num_ranks), "BLOCK_L": power_from(num_local)}
    return {"W": num_ranks, "L": num_local, **blocks, "num_warps": 8, "enable_fp_fusion": False}
