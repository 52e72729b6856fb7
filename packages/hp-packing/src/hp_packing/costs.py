"""Costs of documents in the stages of a pipeline, by tokens, pairs and exchanges; from a file."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import fsum
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hp_base.errors import ConfigError
from hp_base.folder import read_named, why_not
from hp_context import DealCost
from hp_context.batch.deal_cost import Work

_ATTENTION_BACKWARD = 2.5  # of its forward: scores again, and four products where there were two
_KEYS_BACKWARD = 3.0  # keys travel again, and their gradients in float32
_NAMES = ("token", "pair", "microbatch", "key", "far_key", "heads", "message")


class Seconds(NamedTuple):
    """Seconds of one microbatch in one stage.

    Attributes:
        forward: Seconds of forward.
        input_grad: Seconds of the backward of the input.
        weight_grad: Seconds of the backward of weights.
    """

    forward: float = 0.0
    input_grad: float = 0.0
    weight_grad: float = 0.0

    @property
    def total(self) -> float:
        """Return the sum of all seconds."""
        return sum(self)

    def __add__(self, other: "Seconds") -> "Seconds":  # type: ignore[override]
        """Return the seconds of both, one after the other."""
        return Seconds(*(mine + more for mine, more in zip(self, other, strict=True)))


_NOTHING = Seconds()


@dataclass(frozen=True, slots=True)
class StageCosts:
    """The costs of one stage, in seconds.

    Attributes:
        token: Seconds of a token without attention proper, with the exchanges of experts.
        pair: Seconds of a pair of a query and a key, in all layers, for the mean pairs of a layer.
        microbatch: Further seconds of a microbatch, whatever its size.
        least: Minimum seconds of a microbatch: those of the host to launch its kernels.
        key: Seconds to fetch a key and its value from another rank of the node, for all layers.
        far_key: Seconds to fetch a key and its value from another node, for all layers.
        heads: Seconds to send q, k, v and output of a token to ranks of a node that share heads,
            for all layers.
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
        """Return the seconds of tokens and pairs on one rank, without those of each microbatch."""
        return Seconds(
            *(t * tokens + p * pairs for t, p in zip(self.token, self.pair, strict=True))
        )

    def alone(self, tokens: float, pairs: float) -> Seconds:
        """Return the seconds of a microbatch by tokens and pairs of a rank, without fetches."""
        return Seconds(*map(max, self.pure(tokens, pairs) + self.microbatch, self.least))


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs of all stages of a pipeline.

    Attributes:
        stages: Costs of each stage, or one for all of them.
        node: Number of ranks of a stage in one node.
        message: Seconds to send a token's activation to the next stage.
        hidden: Share of attention proper that hides fetches of keys, and share of projections that
            hides exchanges of heads.
        windows: Attention windows of layers, as `hp_context.deal_documents` takes them.
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
        """Return the costs of equal stages, with the usual ratios of backward to forward.

        Args:
            token: Seconds of a token in forward, and in each part of its backward.
            pair: Seconds of a pair in forward.
            microbatch: Further seconds of a microbatch in forward, and in the backward of inputs.
            key: `StageCosts.key`.
            far_key: `StageCosts.far_key`.
            heads: `StageCosts.heads`.
            node: `StepCosts.node`.
            message: `StepCosts.message`.
            windows: `StepCosts.windows`.
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
        """Return the costs of each of a number of stages.

        Raises:
            ValueError: When there are costs of another number of stages.
        """
        if len(self.stages) not in (1, num_stages):
            raise ValueError(f"costs must be of {num_stages} stages, not of {len(self.stages)}")
        return self.stages if len(self.stages) == num_stages else self.stages * num_stages

    def busiest(self, tokens: float, pairs: float) -> StageCosts:
        """Return the stage that takes longest for some tokens and pairs."""
        return max(self.stages, key=lambda stage: stage.pure(tokens, pairs).total)

    def of_parts(
        self, tokens: Sequence[int], cost: DealCost, *, heads: int = 1
    ) -> tuple[Seconds, ...]:
        """Return the seconds of a microbatch in each of `stages`, by its slowest rank.

        Args:
            tokens: Tokens of each rank.
            cost: Pairs and fetched keys of each rank.
            heads: Number of ranks that share heads.
        """
        fetched = np.array(cost.fetched)
        far = np.array(cost.far) if cost.far else np.zeros(len(fetched))
        parts = _Parts(np.array(tokens, dtype=np.float64), np.array(cost.pairs), fetched - far, far)
        # Stages in the middle are equal.
        found = {stage: self._of_stage(stage, parts, heads) for stage in dict.fromkeys(self.stages)}
        return tuple(found[stage] for stage in self.stages)

    def sharing(self, stage: StageCosts, tokens: float, *, heads: int) -> float:
        """Return the seconds that tokens wait for exchanges of heads, in forward and backward."""
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
    """Return the seconds of the slowest stage."""
    return max(each.total for each in stages)


class _Parts(NamedTuple):
    """Tokens, pairs and fetched keys of each rank of a microbatch, float64 [ranks]."""

    tokens: NDArray[np.float64]
    pairs: NDArray[np.float64]
    near: NDArray[np.float64]
    far: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The ranks that a step is planned for.

    Attributes:
        num_stages: Number of stages of the pipeline, one on each rank.
        ranks: Number of ranks of a stage that share documents: data and context parallel.
        tokens: Memory of a rank, in tokens whose activations fit at once.
    """

    num_stages: int
    ranks: int
    tokens: int

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be >= 1")


def pairs_of(lengths: Sequence[int], costs: StepCosts) -> list[float]:
    """Return the pairs of a query and a key of each document, the mean over layers."""
    return list(map(cache(Work(costs.windows).before), lengths))


def pure_work(lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline) -> Seconds:
    """Return the seconds of a rank of the busiest stage if work were spread evenly."""
    tokens, pairs = mean_work(lengths, costs, pipeline)
    return costs.busiest(tokens, pairs).pure(tokens, pairs)


def mean_work(lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline) -> tuple[float, float]:
    """Return the tokens and pairs of a rank if documents were spread evenly."""
    return sum(lengths) / pipeline.ranks, fsum(pairs_of(lengths, costs)) / pipeline.ranks


def read_costs(path: Path, *, windows: tuple[int | None, ...]) -> StepCosts:
    """Read measured costs of equal stages.

    Args:
        path: TOML file of numbers, arguments of `StepCosts.equal`: "token" and "pair" at least.
        windows: Attention windows of layers.

    Raises:
        ConfigError: When the file cannot be read, lacks a number, or has something else.
    """
    try:
        values = tomllib.loads(read_named(path).decode())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"data.plan_costs ({path}) must be a TOML file: {why_not(error)}"
        ) from None
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in _NAMES or not is_number or not 0 <= value < float("inf"):
            raise ConfigError(
                f"data.plan_costs ({path}): {name} = {value!r} must be a number >= 0 of one of "
                f"{', '.join(_NAMES)}"
            )
    if missing := [name for name in _NAMES[:2] if name not in values]:
        raise ConfigError(f"data.plan_costs ({path}) must have {missing[0]}")
    given = {name: float(values.get(name, 0.0)) for name in _NAMES}
    return StepCosts.equal(
        token=given["token"],
        pair=given["pair"],
        microbatch=given["microbatch"],
        key=given["key"],
        far_key=given["far_key"],
        heads=given["heads"],
        message=given["message"],
        windows=windows,
    )
