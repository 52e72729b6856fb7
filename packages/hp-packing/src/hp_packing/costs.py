"""Costs of documents in the stages of a pipeline: linear, quadratic, of experts, of exchanges."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hp_context import DealCost

_ATTENTION_BACKWARD = 2.5  # of its forward: scores again, and four products where there were two
_KEYS_BACKWARD = 3.0  # keys travel again, and their gradients in float32


class Seconds(NamedTuple):
    """Of one microbatch in one stage.

    Attributes:
        forward: Forward.
        input_grad: Backward of its input.
        weight_grad: Backward of its weights.
    """

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)

    def __add__(self, other: "Seconds") -> "Seconds":  # type: ignore[override]
        """Both, one after the other."""
        return Seconds(*(mine + more for mine, more in zip(self, other, strict=True)))


_NOTHING = Seconds()


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of one stage.

    Attributes:
        token: For a token, but for attention proper; experts' way there and back is part of it.
        pair: For a query and a key that it sees, in the mean over layers, in all of the stage.
        microbatch: For a microbatch besides, however short it is.
        least: For a microbatch at least, with all of that: what the host takes to launch it.
        key: To fetch a key and its value from another rank of the node, for all layers.
        far_key: The same from a rank of another node.
        heads: For a token's q, k, v and output to come to ranks of a node that share heads, for all
            layers.
        kept: Bytes that a token keeps from forward to backward.
    """

    token: Seconds
    pair: Seconds = _NOTHING
    microbatch: Seconds = _NOTHING
    least: Seconds = _NOTHING
    key: float = 0.0
    far_key: float = 0.0
    heads: float = 0.0
    kept: float = 1.0

    def pure(self, tokens: float, pairs: float) -> Seconds:
        """Of so many tokens and pairs on one rank, without what every microbatch takes besides."""
        return Seconds(
            *(t * tokens + p * pairs for t, p in zip(self.token, self.pair, strict=True))
        )

    def alone(self, tokens: float, pairs: float) -> Seconds:
        """Of a microbatch of so many tokens and pairs on each rank, which fetch nothing."""
        return Seconds(*map(max, self.pure(tokens, pairs) + self.microbatch, self.least))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs of all stages of a pipeline.

    Attributes:
        stages: Costs of each stage, or one for all.
        node: Ranks of a stage that are in one node.
        message: Seconds of a token's activation on its way to the next stage.
        hidden: Share of attention proper behind which keys can be fetched, and of projections
            behind which q, k, v and the output can travel.
        windows: What layers look at, as `hp_context.deal_documents` takes it.
    """

    stages: tuple[StageCosts, ...]
    node: int = 8
    message: float = 0.0
    hidden: float = 0.8
    windows: tuple[int | None, ...] = (None,)

    @classmethod
    def equal(
        cls,
        *,
        token: float,
        pair: float,
        microbatch: float = 0.0,
        key: float = 0.0,
        far_key: float = 0.0,
        heads: float = 0.0,
        node: int = 8,
        message: float = 0.0,
        windows: tuple[int | None, ...] = (None,),
    ) -> "StepCosts":
        """Stages that cost the same, whose backward takes what that of matrices and attention does.

        Args:
            token: Forward seconds of a token, as much as each part of its backward.
            pair: Forward seconds of a pair.
            microbatch: Seconds of a forward and of a backward of inputs, however short they are.
            key: See `StageCosts`, like those that follow.
            far_key: See there.
            heads: See there.
            node: See `StepCosts`.
            message: See there.
            windows: See there.
        """
        stage = StageCosts(
            token=Seconds(token, token, token),
            pair=Seconds(pair, _ATTENTION_BACKWARD * pair),
            microbatch=Seconds(microbatch, microbatch),
            key=key,
            far_key=far_key,
            heads=heads,
        )
        return cls((stage,), node=node, message=message, windows=windows)

    def of_stages(self, num_stages: int) -> tuple[StageCosts, ...]:
        """Costs of each of so many stages.

        Raises:
            ValueError: They are of another number of stages.
        """
        if len(self.stages) not in (1, num_stages):
            raise ValueError(f"costs must be of {num_stages} stages, not of {len(self.stages)}")
        return self.stages if len(self.stages) == num_stages else self.stages * num_stages

    def busiest(self, tokens: float, pairs: float) -> StageCosts:
        """The stage that takes longest for so many tokens and pairs."""
        return max(self.stages, key=lambda stage: stage.pure(tokens, pairs).total)

    def of_parts(
        self, tokens: Sequence[int], cost: DealCost, *, heads: int = 1
    ) -> tuple[Seconds, ...]:
        """Of a microbatch whose ranks have so many tokens each, as long as its slowest takes.

        Args:
            tokens: Tokens of each rank.
            cost: What they compute and fetch.
            heads: So many ranks share heads.

        Returns:
            Seconds in each of `stages`.
        """
        fetched = np.array(cost.fetched)
        far = np.array(cost.far) if cost.far else np.zeros(len(fetched))
        parts = _Parts(np.array(tokens, dtype=np.float64), np.array(cost.pairs), fetched - far, far)
        # Those in the middle are alike.
        found = {stage: self._of_stage(stage, parts, heads) for stage in dict.fromkeys(self.stages)}
        return tuple(found[stage] for stage in self.stages)

    def sharing(self, stage: StageCosts, tokens: float, *, heads: int) -> float:
        """Seconds that so many tokens wait for heads, in forward and backward."""
        return 2 * (1 - self.hidden) * stage.heads * tokens * (heads - 1) / heads

    def _of_stage(self, stage: StageCosts, parts: "_Parts", heads: int) -> Seconds:
        fetching = stage.key * parts.near + stage.far_key * parts.far
        found = []
        shared = self.sharing(stage, float(parts.tokens.max()), heads=heads) / 2
        for kind, times in enumerate((1.0, _KEYS_BACKWARD, 0.0)):
            attention = stage.pair[kind] * parts.pairs
            waits = np.maximum(0.0, times * fetching - self.hidden * attention) if times else 0.0
            longest = float((stage.token[kind] * parts.tokens + attention + waits).max())
            longest += stage.microbatch[kind] + (shared if times else 0.0)
            found.append(max(longest, stage.least[kind]))
        return Seconds(*found)


def slowest(stages: Iterable[Seconds]) -> float:
    """Seconds in the stage that takes longest."""
    return max(each.total for each in stages)


class _Parts(NamedTuple):
    """Tokens, pairs and fetched keys of each rank of a microbatch, float64 [ranks]."""

    tokens: NDArray[np.float64]
    pairs: NDArray[np.float64]
    near: NDArray[np.float64]
    far: NDArray[np.float64]
