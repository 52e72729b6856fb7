"""One batch of documents by all rules: how long a step takes, what it holds and exchanges."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hp_packing.planner import Planner
from hp_packing.pricing import price, simulated
from hp_packing.proof import prove
from hp_packing.rivals import Rivals
from hp_schedule import Timeline

PLANNED = "planned"
_EFFORT = 4
"""Schedules searched for static packs."""


@dataclass(frozen=True, slots=True)
class Row:
    """A batch by one rule.

    Attributes:
        name: Name of the rule.
        seconds: Seconds of a step.
        factor: These by what would be pure work, spread evenly.
        tokens: Most tokens whose activations a rank holds at once.
        fetched: Keys that ranks of a stage fetch from others in forward, in one layer.
    """

    name: str
    seconds: float
    factor: float
    tokens: float
    fetched: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """A batch by all rules.

    Attributes:
        rows: By each rule; the plan is the last.
        pure: Seconds of pure work.
        bound: Seconds below which no plan is.
        searched_bound: Seconds below which no schedule of static packs is.
        imbalance: Imbalance of attention in the plan, see `StepPrice`.
        cpu_seconds: What planning took.
        problems: Why the plan would not run; none.
        timeline: Timeline of the slowest team.
    """

    rows: tuple[Row, ...]
    pure: float
    bound: float
    searched_bound: float
    imbalance: float
    cpu_seconds: float
    problems: tuple[str, ...]
    timeline: Timeline

    @property
    def by_name(self) -> Mapping[str, Row]:
        """Rows by the names of their rules."""
        return {row.name: row for row in self.rows}


def compare(lengths: Sequence[int], planner: Planner, *, pack: int, degree: int) -> Comparison:
    """Price a batch by all rules.

    Args:
        lengths: Tokens of its documents.
        planner: Plans it.
        pack: Tokens of the packs of others.
        degree: Ranks that share such a pack.
    """
    costs, pipeline = planner.costs, planner.pipeline
    rivals = Rivals(costs, pipeline, pack=pack, degree=degree)
    searched = rivals.searched(lengths, effort=_EFFORT)
    others = [
        rivals.static(lengths),
        searched,
        rivals.megatron(lengths),
        rivals.greedy(lengths),
    ]
    if planner.prepared:  # which a run does once
        planner.plan([length + 1 for length in lengths])
    began = time.thread_time()
    plan = planner.plan(lengths)
    cpu_seconds = time.thread_time() - began
    found = price(plan, lengths, costs, pipeline)
    rows = [
        Row(each.name, each.seconds, each.seconds / found.pure, each.tokens, each.fetched)
        for each in others
        if each is not None
    ]
    rows.append(Row(PLANNED, found.seconds, found.factor, found.tokens, found.fetched))
    return Comparison(
        rows=tuple(rows),
        pure=found.pure,
        bound=found.bound,
        searched_bound=searched.bound,
        imbalance=found.imbalance,
        cpu_seconds=cpu_seconds,
        problems=prove(plan, lengths, costs, pipeline),
        timeline=max(simulated(plan, lengths, costs), key=lambda run: run.makespan).timeline,
    )
