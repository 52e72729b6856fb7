"""Checks of a layer's input whose verdict all ranks share before rows are exchanged.

Note [All or none]. A rank that raised on its own would leave the others waiting for its rows. Every
rank therefore sends its verdict along with its counts, at no extra cost; all ranks see the same
verdicts and either all go on or all raise.

Note [Blocks of one size]. Ranks that were given different numbers of experts, or of anything else,
must find out, not wait for each other: so every rank tells every other a block of numbers that
begins with its header and has the same size for up to about 500 counts (and for up to 1000, ...).

Shape symbols: T tokens, K experts per token, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_expert.batch import FLOATS, wrong_input
from hp_expert.dispatch.refusal import refused_input
from hp_platform import PeerError, agree

_NO_WEIGHTS = len(FLOATS)
_FAILED = -1
_GRAIN = 512

# How many values each of them may have: dtype of the rows, that of the weights, K, number of
# experts, whether rows are deduplicated, and whether rows and weights want gradients.
_RANGES = (len(FLOATS), len(FLOATS) + 1, 1 << 12, 1 << 20, 2, 2, 2)


@dataclass(frozen=True, slots=True)
class Header:
    """What ranks must have in common, as one number.

    Ranks that disagree would wait for different exchanges, in forward or in backward.

    Attributes:
        code: Width and dtype of the rows, dtype of the routing weights if there are any, number of
            experts per token and of all, how rows travel, and what wants gradients; negative if
            the input is wrong.
    """

    code: int

    @classmethod
    def of(
        cls,
        x: Tensor,
        experts: Tensor,
        weights: Tensor | None,
        *,
        num_experts: int,
        deduplicated: bool = False,
    ) -> "Header":
        """Describe an input that was found right."""
        training = torch.is_grad_enabled()
        values = (
            FLOATS.index(x.dtype),
            _NO_WEIGHTS if weights is None else FLOATS.index(weights.dtype),
            experts.shape[1],
            num_experts,
            int(deduplicated),
            int(training and x.requires_grad),
            int(training and weights is not None and weights.requires_grad),
        )
        code = x.shape[1]
        for value, limit in zip(values, _RANGES, strict=True):
            code = code * limit + value % limit
        return cls(code)

    @classmethod
    def failed(cls) -> "Header":
        """Say that the input is wrong."""
        return cls(_FAILED)

    def __str__(self) -> str:
        """Describe it in words."""
        values, width = [], self.code
        for limit in reversed(_RANGES):
            width, value = divmod(width, limit)
            values.append(value)
        weights_grad, x_grad, deduplicated, num_experts, top_k, weights, dtype = values
        words = [
            f"width {width}",
            f"{FLOATS[dtype]}{', with gradient' if x_grad else ''}",
            "no weights" if weights == _NO_WEIGHTS else f"weights {FLOATS[weights]}",
            *(["with gradient"] if weights_grad else []),
            f"{top_k} of {num_experts} experts",
            *(["deduplicated"] if deduplicated else []),
        ]
        return ", ".join(words)


def input_error(x: Tensor, experts: Tensor, weights: Tensor | None) -> Exception | None:
    """Return what is wrong with tokens [T, D], experts [T, K] and weights [T, K], if anything."""
    return refused_input() or wrong_input(x, experts, weights)


def block_size(num_numbers: int) -> int:
    """How long a block with so many numbers is; see Note [Blocks of one size]."""
    return -(-num_numbers // _GRAIN) * _GRAIN


def raise_together(
    error: Exception | None,
    mine: Header,
    verdicts: Sequence[Sequence[int]],
    *,
    groups: Sequence[ProcessGroup],
    device: torch.device,
) -> None:
    """Return on all ranks or raise on all of them; see Note [All or none].

    Args:
        error: What is wrong on this rank.
        mine: What this rank told the others.
        verdicts: Verdict of each rank: code of its header, how many of its slots are invalid.
        groups: The ranks: those of one group; or, of two, all in the second group with a rank of
            the first, which follow each other.
        device: Where the exchange took place.
    """
    failed = [rank for rank, (code, bad) in enumerate(verdicts) if bad or code == _FAILED]
    if failed:
        if device.type == "cpu":
            error = _heard_error(error, groups)
        raise error or _unheard_error(failed[0] * groups[0].size() // len(verdicts), groups)
    place = 0
    for group in groups:
        place = place * group.size() + group.rank()
    raise_if_different(mine, [code for code, _ in verdicts], rank=place)


def _heard_error(error: Exception | None, groups: Sequence[ProcessGroup]) -> Exception | None:
    """What is wrong on this rank, or else what others say is on theirs, one group after another."""
    for group in groups:
        try:
            agree(error, group=group, where="the exchange of rows between experts")
        except Exception as heard:  # noqa: BLE001 - this rank's own, of whatever kind
            error = heard
    return error


def _unheard_error(place: int, groups: Sequence[ProcessGroup]) -> PeerError:
    """What is known of an error on a rank of the first group where no message can be sent."""
    rank = dist.get_process_group_ranks(groups[0])[place]
    where = f"rank {rank}" + (" or another one of its tp group" if len(groups) > 1 else "")
    return PeerError(f"{where} has wrong input for its experts", rank=rank)


def raise_if_different(mine: Header, codes: Sequence[int], *, rank: int) -> None:
    """Raise if a rank has another header; every rank then finds one that differs from its own."""
    others = [other for other, code in enumerate(codes) if code != mine.code]
    if others:
        raise ValueError(
            f"rank {rank}: x ({mine}) must equal that of rank {others[0]} of the expert "
            f"group ({Header(codes[others[0]])})"
        )
