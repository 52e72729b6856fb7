"""Sending a token to a rank once, however many of the token's experts are there.

Rows are sorted by (rank, token), and slots by (rank, token, choice), so that the slots of a row
follow each other. Each slot is sent as a code: its local expert, and whether it begins the next
row. The receiver numbers rows and slots by counting those beginnings.

When that pays: with routing that prefers no expert, none of a token's k different experts is among
the L = E / W of a given rank with probability C(E - L, k) / C(E, k). So the token goes to

    r = W * (1 - C(E - L, k) / C(E, k))

ranks. Forward and backward together move each row four times (to the experts and back, twice) and
each routing weight twice:

    plain         k * (4 * row bytes + 2 * weight bytes)
    deduplicated  r * 4 * row bytes + k * (2 * weight bytes + code bytes)

per token, where a code says which of the rank's experts takes the row: one byte for up to 128
experts per rank, four for more. The counts that precede the rows cost the same either way.

Shape symbols: T tokens, K experts per token, S = T * K slots, W ranks, L local experts, N rows
received, P slots received, F slots per received row.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hp_expert.batch import Places
from hp_expert.kernels import fuses, triton_sorting
from hp_expert.permute import Permutation, SlotCounts, narrowed, placed, sort_slots

_LARGEST_BYTE_CODE = 255


class DispatchBytes(NamedTuple):
    """Bytes that one token sends in a layer's forward and backward, on average.

    Attributes:
        plain: Bytes with a row for each expert of the token.
        deduplicated: Bytes with a row for each rank that has any of these experts.
    """

    plain: float
    deduplicated: float


def expected_rows_per_token(num_experts: int, top_k: int, num_ranks: int) -> float:
    """Return the number of ranks that a token goes to on average; at most `top_k`.

    Args:
        num_experts: Number of experts on all ranks, E.
        top_k: Number of different experts of a token, k, at most E.
        num_ranks: Number of ranks, W; divides E.
    """
    num_elsewhere = num_experts - num_experts // num_ranks
    top_k = min(top_k, num_experts)
    missed = math.comb(num_elsewhere, top_k) / math.comb(num_experts, top_k)
    return num_ranks * (1 - missed)


def dispatch_bytes(
    num_experts: int,
    top_k: int,
    num_ranks: int,
    *,
    row_bytes: int,
    weight_bytes: int = 4,
) -> DispatchBytes:
    """Return the bytes of the formula at the top of this file.

    Args:
        num_experts: Number of experts on all ranks, E.
        top_k: Number of experts of a token, k.
        num_ranks: Number of ranks, W; divides E.
        row_bytes: Width of a row times the size of its dtype.
        weight_bytes: Size of a routing weight; 0 without weights.
    """
    rows = expected_rows_per_token(num_experts, top_k, num_ranks)
    weights = top_k * 2 * weight_bytes
    codes = top_k * code_bytes(num_experts // num_ranks)
    return DispatchBytes(
        plain=top_k * 4 * row_bytes + weights, deduplicated=rows * 4 * row_bytes + weights + codes
    )


def deduplication_pays(
    num_experts: int,
    top_k: int,
    num_ranks: int,
    *,
    row_bytes: int,
    weight_bytes: int = 4,
    largest_share: float = 0.75,
) -> bool:
    """Tell whether deduplicated rows need at most `largest_share` of the bytes of plain ones.

    Arguments are those of `dispatch_bytes`. By default a quarter of the bytes must be saved, as the
    receiving rank has to sort slots and take sums, which it has not with plain rows.
    """
    cost = dispatch_bytes(
        num_experts, top_k, num_ranks, row_bytes=row_bytes, weight_bytes=weight_bytes
    )
    return cost.deduplicated <= largest_share * cost.plain


def code_bytes(num_local_experts: int) -> int:
    """Return the bytes of a code: the local expert of a slot, and whether the slot begins a row."""
    return 1 if 2 * num_local_experts - 1 <= _LARGEST_BYTE_CODE else 4


@dataclass(frozen=True, slots=True, eq=False)
class SlotExchange:
    """The exchange of the slots of deduplicated rows.

    Attributes:
        codes: Codes of the slots sent, uint8 or int32; after the launch those of the slots
            received, possibly still on their way.
        input_splits: Number of slots sent to each rank.
        output_splits: Number of slots received from each rank.
        num_slots_per_row: Number of slots per received row, F.
    """

    codes: Tensor
    input_splits: tuple[int, ...]
    output_splits: tuple[int, ...]
    num_slots_per_row: int


class Destinations(NamedTuple):
    """The ranks that each token goes to.

    Attributes:
        rank: Rank of each slot's expert, int64 [T, K]; W or more if there is no such expert. If
            kernels have counted: each rank that a token goes to, or -1, int64 [T, W].
        slots: Number of slots of each token on each rank, int32 [T, W].
        starts: Counts of `rank` if kernels have counted; None: torch computes.
    """

    rank: Tensor
    slots: Tensor
    starts: triton_sorting.Starts | None = None

    def num_rows(self) -> Tensor:
        """Return the number of tokens that go to each rank, int64 [W]."""
        if self.starts is not None:
            return self.starts.counts[: self.slots.shape[1]]
        return (self.slots > 0).sum(0)

    def most_slots(self) -> Tensor:
        """Return the most slots that any token has on each rank, int32 [W]."""
        if self.slots.shape[0] == 0:
            return self.slots.new_zeros(self.slots.shape[1])
        return self.slots.amax(0)


def destinations(experts_TK: Tensor, *, num_local: int, num_ranks: int) -> Destinations:
    """Find the ranks that tokens go to, from `SlotCounts.experts`."""
    if fuses(experts_TK):
        rank_TW, slots = triton_sorting.find_ranks(
            experts_TK, num_local=num_local, num_ranks=num_ranks
        )
        return Destinations(rank_TW, slots, triton_sorting.count(rank_TW, num_ranks))
    rank_TK = experts_TK.div(num_local, rounding_mode="floor")
    # Up to two more columns take the slots of experts that do not exist, and dropped slots.
    slots = torch.zeros(len(rank_TK), num_ranks + 2, dtype=torch.int32, device=rank_TK.device)
    return Destinations(rank_TK, slots.scatter_(1, rank_TK, 1, reduce="add")[:, :num_ranks])


def sort_rows(where: Destinations) -> Permutation:
    """Sort the (token, rank) pairs by rank; pairs without a slot come last. `inverse` is [T, W]."""
    num_ranks = where.slots.shape[1]
    if where.starts is not None:
        return placed(where.rank, where.starts)
    ranks = torch.arange(num_ranks, device=where.slots.device)
    keys_TW = ranks.expand_as(where.slots).masked_fill(where.slots == 0, num_ranks)
    return sort_slots(narrowed(keys_TW, num_ranks + 1))


def sort_codes(
    counted: SlotCounts, where: Destinations, *, num_local: int
) -> tuple[Permutation, Tensor]:
    """Sort the slots by rank and return their codes in that order; slots of no rank come last."""
    num_ranks = where.slots.shape[1]
    dtype = torch.uint8 if code_bytes(num_local) == 1 else torch.int32
    if where.starts is not None:
        starts = triton_sorting.count(counted.experts, num_ranks, run=num_local)
        permutation = placed(counted.experts, starts)._replace(padded=False)
        sizes = {"num_local": num_local, "num_ranks": num_ranks}
        codes = triton_sorting.encode(permutation.order, counted.experts, **sizes, dtype=dtype)
        return permutation, codes
    permutation = sort_slots(narrowed(where.rank, num_ranks + 2))
    rank_S = where.rank.view(-1).index_select(0, permutation.order)
    expert_S = counted.experts.view(-1).index_select(0, permutation.order)
    row_S = torch.add(permutation.token, rank_S, alpha=where.rank.shape[0])
    begins_S = torch.ones_like(row_S)
    torch.ne(row_S[1:], row_S[:-1], out=begins_S[1:])
    code_S = torch.add(begins_S, expert_S.remainder_(num_local), alpha=2)
    return permutation, code_S.to(dtype)


def unpack(codes_P: Tensor, *, num_slots_per_row: int) -> tuple[Tensor, Tensor]:
    """Number the received slots by torch.

    Returns:
        Slot of each code, row * F + choice, and the slot at each position of expert order; both
        int64 [P].
    """
    begins_P, F = codes_P & 1, num_slots_per_row
    place_P = torch.arange(codes_P.numel(), device=codes_P.device)
    begin_P = (place_P * begins_P).cummax(0).values if codes_P.numel() else place_P
    slot_P = torch.add(place_P, begins_P.cumsum(0), alpha=F).sub_(begin_P).sub_(F)
    return slot_P, slot_P.index_select(0, (codes_P >> 1).argsort(stable=True))


def place_codes(
    codes_P: Tensor, *, num_rows: int, num_slots_per_row: int, num_local: int
) -> tuple[Tensor, Places]:
    """Number the received slots by kernels.

    Returns:
        Slot of each code, int64 [P], and the places of the slots.
    """
    num_begun = (codes_P & 1).cumsum(0, dtype=torch.int64)
    slot_P, expert_P = triton_sorting.decode(codes_P, num_begun, per_row=num_slots_per_row)
    expert_P1 = expert_P.unsqueeze(1)
    sort = placed(expert_P1, starts := triton_sorting.count(expert_P1, num_local))
    order_P = slot_P.index_select(0, sort.order)
    row_P = order_P.div(num_slots_per_row, rounding_mode="floor")
    position = order_P.new_full((num_rows * num_slots_per_row,), -1)
    position.scatter_(0, slot_P, sort.inverse.view(-1))
    position_NF = position.view(num_rows, num_slots_per_row)
    return slot_P, Places(order_P, row_P, position_NF, starts.ends, partial=True, padded=False)


def spread(weights_P: Tensor, slot_P: Tensor, *, num_rows: int, num_slots_per_row: int) -> Tensor:
    """Put each received routing weight at its slot, [N, F], zeros elsewhere. Differentiable."""
    nothing = weights_P.new_zeros(num_rows * num_slots_per_row)
    return nothing.scatter(0, slot_P, weights_P).view(num_rows, num_slots_per_row)
