"""Checks of a layer's input whose verdict all ranks share before rows are exchanged.

Note [All or none]. A rank that raised on its own would leave the others waiting for its rows. Every
rank therefore sends its verdict along with its counts, at no extra cost; all ranks see the same
verdicts and either all go on or all raise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import PeerError, agree

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FAILED = -1


@dataclass(frozen=True, slots=True)
class Header:
    """What ranks must have in common, as one number.

    Attributes:
        code: Width and dtype of the rows, dtype of the routing weights if there are any; negative
            if the input is wrong.
    """

    code: int

    @classmethod
    def of(cls, x: Tensor, weights: Tensor | None) -> "Header":
        """Describe an input that was found right."""
        kinds = len(_DTYPES)
        of_weights = kinds if weights is None else _DTYPES.index(weights.dtype)
        return cls((x.shape[1] * kinds + _DTYPES.index(x.dtype)) * (kinds + 1) + of_weights)

    @classmethod
    def failed(cls) -> "Header":
        """Say that the input is wrong."""
        return cls(_FAILED)

    @property
    def ok(self) -> bool:
        """Whether the input is right."""
        return self.code >= 0

    def __str__(self) -> str:
        """Describe it in words."""
        kinds = len(_DTYPES)
        rest, of_weights = divmod(self.code, kinds + 1)
        width, dtype = divmod(rest, kinds)
        weighted = "no weights" if of_weights == kinds else f"weights {_DTYPES[of_weights]}"
        return f"width {width}, {_DTYPES[dtype]}, {weighted}"


def input_error(x: Tensor, experts: Tensor, weights: Tensor | None) -> Exception | None:
    """Return what is wrong with tokens [T, D], experts [T, K] and weights [T, K], if anything."""
    if x.ndim != 2 or x.dtype not in _DTYPES:
        return ValueError(f"x ({tuple(x.shape)}, {x.dtype}) must be [T, D] and of a floating dtype")
    if experts.ndim != 2 or experts.dtype not in (torch.int64, torch.int32):
        return ValueError(
            f"experts ({tuple(experts.shape)}, {experts.dtype}) must be [T, K] and int64"
        )
    if experts.shape[0] != x.shape[0]:
        return ValueError(
            f"rows of experts ({experts.shape[0]}) must equal rows of x ({x.shape[0]})"
        )
    if weights is not None and (weights.shape != experts.shape or weights.dtype not in _DTYPES):
        return ValueError(
            f"weights ({tuple(weights.shape)}, {weights.dtype}) must have the shape of experts "
            f"({tuple(experts.shape)}) and a floating dtype"
        )
    devices = {t.device for t in (x, experts, weights) if t is not None}
    if len(devices) > 1:
        return ValueError(f"devices of x, experts and weights ({devices}) must be the same")
    return None


def raise_together(
    error: Exception | None,
    mine: Header,
    verdicts: Sequence[Sequence[int]],
    *,
    group: ProcessGroup,
    device: torch.device,
) -> None:
    """Return on all ranks or raise on all of them; see Note [All or none].

    Args:
        error: What is wrong on this rank.
        mine: What this rank told the others.
        verdicts: From each rank: how many of its slots are invalid, code of its header.
        group: The ranks.
        device: Where the exchange took place.
    """
    failed = [rank for rank, (bad, code) in enumerate(verdicts) if bad or code == _FAILED]
    if failed:
        if device.type == "cpu":
            agree(error, group=group, where="the exchange of rows between experts")
        if error is not None:
            raise error
        raise PeerError(f"rank {failed[0]} of the expert group has wrong input", rank=failed[0])
    others = [rank for rank, (_, code) in enumerate(verdicts) if code != mine.code]
    if others:
        theirs = Header(verdicts[others[0]][1])
        raise ValueError(
            f"rank {group.rank()}: x ({mine}) must equal that of rank {others[0]} of the expert "
            f"group ({theirs})"
        )
