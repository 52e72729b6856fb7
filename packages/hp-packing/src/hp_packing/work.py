"""The work of a step: the ranks that it is planned for, and the costs of its documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import fsum

from hp_context.batch.deal_cost import Work
from hp_packing.costs import Seconds, StepCosts


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The ranks that a step is planned for.

    Attributes:
        num_stages: Stages of the pipeline, one on each rank.
        ranks: Ranks of each stage, over which documents are spread: data and context parallel.
        tokens: Memory: most tokens whose activations a rank holds at once.
    """

    num_stages: int
    ranks: int
    tokens: int

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be >= 1")


def pairs_of(lengths: Sequence[int], costs: StepCosts) -> list[float]:
    """Pairs of a query and a key of each document, in the mean over layers."""
    return list(map(cache(Work(costs.windows).before), lengths))


def pure_work(lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline) -> Seconds:
    """Return what a rank of the busiest stage would compute if work could be spread evenly."""
    tokens, pairs = mean_work(lengths, costs, pipeline)
    return costs.busiest(tokens, pairs).pure(tokens, pairs)


def mean_work(lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline) -> tuple[float, float]:
    """Tokens and pairs of a rank if documents could be spread evenly."""
    return sum(lengths) / pipeline.ranks, fsum(pairs_of(lengths, costs)) / pipeline.ranks
