"""The rule of ties: rounding may decide which of two equal scores a top-k takes."""

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hp_verify.recording.events import Choice

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


Choices = Mapping[tuple[str, int], Choice]
"""Choices of a layer by sample and first token."""


def first_flip(
    step: int, mine: Mapping[str, Choices], theirs: Mapping[str, Choices]
) -> Flip | None:
    """Look for tokens that choose others, in the first layer that has any.

    Args:
        step: The step, counted from 1.
        mine: Layer -> choices of the job.
        theirs: Layer -> choices of the reference, in the order in which layers are computed.
    """
    for name, expected in theirs.items():
        ours = mine.get(name, {})
        if all(key in expected and expected[key].chosen == ours[key].chosen for key in ours):
            continue
        there = {token: known for key in expected for token, known in _tokens(key, expected[key])}
        margins = [
            _margin(set(chosen), there[token])
            for key in ours
            for token, (chosen, _) in _tokens(key, ours[key])
            if token in there and chosen != there[token][0]
        ]
        if margins:
            return Flip(step, name, len(margins), max(margins))
    return None


_Known = tuple[list[int], dict[int, float]]
"""Experts that a token chose, sorted; scores of these and of the next best, by expert."""


def _tokens(key: tuple[str, int], choice: Choice) -> Iterator[tuple[tuple[str, int], _Known]]:
    """Yield the tokens of a choice: sample and place, and what is known of each."""
    row, first = key
    chosen, scored = array("i", choice.chosen), array("i", choice.scored)
    scores, k, n = array("d", choice.scores), choice.width, choice.num_scored
    for at in range(len(chosen) // k):
        span = slice(at * n, (at + 1) * n)
        known = dict(zip(scored[span], scores[span], strict=True))
        yield (row, first + at), (list(chosen[at * k : (at + 1) * k]), known)


def _margin(ours: set[int], theirs: _Known) -> float:
    """Return how far the scores of experts that only one run took are apart."""
    chosen, scores = theirs
    here, there = ours - {*chosen}, {*chosen} - ours
    if not here or not there or not (here | there) <= scores.keys():
        return math.inf  # the same expert twice, a dropped slot, or none of the next best
    apart = [abs(scores[a] - scores[b]) for a in here for b in there]
    return math.inf if any(map(math.isnan, apart)) else max(apart)
