"""The rule of ties: rounding may decide which of two equal scores a top-k takes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

CHOICES, SCORES = "expert choice", "expert score"
"""Quantities that explain other differences: what each token chose `[..., K]`, of the scores
`[..., E]`; their names are those of layers."""


@dataclass(frozen=True, slots=True)
class Flip:
    """Tokens that choose others than in the reference, in the first layer where any do.

    Attributes:
        step: Step of the choice, counted from 1.
        name: Name of the layer.
        tokens: Number of these tokens.
        margin: Largest difference of two scores, one of which was taken here and the other there;
            infinite where scores were not recorded.
    """

    step: int
    name: str
    tokens: int
    margin: float

    def __str__(self) -> str:
        verb = "token chooses" if self.tokens == 1 else "tokens choose"
        return (
            f"step {self.step}, {self.name}: {self.tokens} {verb} other experts, "
            f"scores at most {self.margin:.1e} apart"
        )


def excuses(flip: Flip | None, first_step: int | None, tie: float) -> bool:
    """Tell whether a difference follows from a choice that rounding may decide.

    Args:
        flip: The first top-k that differs; None: none does.
        first_step: Step of the first difference; None: there is none.
        tie: Scores less than this apart are a tie.
    """
    if flip is None or first_step is None:
        return False
    return flip.step <= first_step and flip.margin < tie


def first_flip(
    step: int,
    mine: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    scores: Mapping[str, Tensor],
) -> Flip | None:
    """Look for tokens that choose others, in the first layer that has any.

    Args:
        step: The step, counted from 1.
        mine: Layer -> choices of the run that is judged, int64 `[..., K]`.
        theirs: Layer -> choices of the reference, in the order in which layers are computed.
        scores: Layer -> scores of the reference, `[..., E]`.
    """
    for name in theirs:
        if name not in mine or mine[name].shape != theirs[name].shape:
            continue
        mine_TK, theirs_TK = mine[name].flatten(0, -2), theirs[name].flatten(0, -2)
        differing = (mine_TK.sort(dim=-1).values != theirs_TK.sort(dim=-1).values).any(dim=-1)
        tokens = differing.nonzero().flatten().tolist()
        if tokens:
            margin = math.inf
            if name in scores:
                scores_TE = scores[name].flatten(0, -2)
                margin = max(_margin(scores_TE[t], mine_TK[t], theirs_TK[t]) for t in tokens)
            return Flip(step, name, len(tokens), margin)
    return None


def _margin(scores_E: Tensor, mine_K: Tensor, theirs_K: Tensor) -> float:
    """Return how far the scores of experts that only one run took are apart."""
    ours, others = set(mine_K.tolist()), set(theirs_K.tolist())
    here, there = sorted(ours - others), sorted(others - ours)
    if not here or not there:  # the same expert twice, or a dropped slot
        return math.inf
    values = scores_E.double()
    return float((values[here][:, None] - values[there][None, :]).abs().max())
