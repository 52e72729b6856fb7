"""What a host is told that cannot ask the device how many rows go where.

A dry run computes nothing, so the numbers come from a model of the routing. All ranks of an expert
group are taken to spread their tokens alike: what one sends to another is then what that one hears.

Shape symbols: K experts per token, E experts, W ranks, Z slices, L = E / W experts of a rank, C
numbers of a block that are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hp_expert.dispatch.agreement import Header


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRead:
    """The one host read of a layer: the `purpose` of `hp_platform.host_reads.arrived`.

    Attributes:
        header: Header that every rank tells.
        num_tokens: Number of tokens of this rank, or of its slice.
        told_tokens: What the blocks say of them.
        top_k: Number of experts per token, K.
        num_experts: Number of experts, E.
        rank: Rank in the group that exchanges rows.
        num_ranks: Number of ranks, W; 1 where every rank has all experts.
        tells_rows: Whether blocks say how many rows there are, and the most slots of one.
    """

    header: Header
    num_tokens: int
    told_tokens: int
    top_k: int
    num_experts: int
    rank: int = 0
    num_ranks: int = 1
    tells_rows: bool = True

    def __str__(self) -> str:
        """Say it in words."""
        return f"slots of {self.num_tokens} tokens x {self.top_k} of {self.num_experts} experts"

    def numbers(self, slots: Sequence[int], rows: Sequence[int], *, like: Tensor) -> Tensor:
        """What was told and what was heard, as the host would read it.

        Args:
            slots: How many slots of a rank's tokens each expert gets: E numbers.
            rows: How many of these tokens go to each rank, however often: W numbers.
            like: The copy, int64 [2, W or more, (Z,) C].
        """
        L = self.num_experts // self.num_ranks

        def block(rank: int) -> Tensor:
            about = [self.header.code, 0, self.told_tokens]
            if self.tells_rows:
                about += [rows[rank], min(self.top_k, L) if rows[rank] else 0]
            return torch.tensor([*about, *slots[rank * L : (rank + 1) * L]], device="cpu")

        if self.num_ranks == 1:
            return block(0).expand(like.shape)
        told = torch.stack([block(rank) for rank in range(self.num_ranks)])
        both = torch.stack([told, block(self.rank).expand_as(told)])
        return (both.unsqueeze(2) if like.ndim > both.ndim else both).expand(like.shape)
