"""The planner of steps."""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import fsum
from random import Random
from typing import NamedTuple

from hp_base.errors import ConfigError
from hp_context import deal_documents
from hp_packing.costs import Pipeline, Seconds, StepCosts, pairs_of, slowest
from hp_packing.plan import PlannedMicrobatch, StepPlan, Team
from hp_packing.planning.linear_program import Rates, best_shares, program_seconds
from hp_packing.planning.partition import partition
from hp_packing.planning.templates import (
    Kind,
    changed_shares,
    part_looked_at,
    scaled,
    templates_for,
)
from hp_packing.pricing import cost_of_deal, stage_costs
from hp_schedule import Costs, Schedule, from_json, search, shorten, to_json

TEAM = 32
"""Maximum number of ranks of a stage that share microbatches."""

_OF_STEP, _PLANNING = 0.015, 0.002
"""Maximum seconds of planning, as a share of a step; approximate CPU seconds per microbatch."""
_LONG = 3.0
"""Seconds of a step that leave time to find the best shares for its documents, 0.02 CPU seconds."""
_DENSITIES = (1.0, 1.5, 2.0, 2.5, 3.0)
"""Numbers of microbatches to try, divided by the number with which 1F1B fills the memory."""
_FITTED_TO, _SPARE = 3, 0.015
"""Number of typical batches to which templates are adapted; share of memory that stays free, since
parts only come close to their shares."""
_FRONT, _BACK = (0.1, 0.25, 0.5, 0.8), (0.8, 0.5)
"""Shares of the first and the last microbatches, divided by those of the others."""


class _Shape(NamedTuple):
    """Shares of microbatches of the work, and their schedule; None: none was searched yet."""

    shares: tuple[float, ...]
    schedule: Schedule | None = None


class _Work(NamedTuple):
    """The documents of some ranks.

    Attributes:
        documents: Indices of the documents in the global batch.
        lengths: Tokens of each document.
        pairs: Pairs of a query and a key of each document.
        seconds: Seconds of forward and backward of each on one rank of the busiest stage.
    """

    documents: Sequence[int]
    lengths: Sequence[int]
    pairs: Sequence[float]
    seconds: Sequence[float]

    def of(self, places: Sequence[int]) -> "_Work":
        """Return a part of the documents, by their places here."""
        return _Work(
            [self.documents[i] for i in places],
            [self.lengths[i] for i in places],
            [self.pairs[i] for i in places],
            [self.seconds[i] for i in places],
        )


_Dealt = tuple[PlannedMicrobatch, tuple[Seconds, ...]]
"""A microbatch, and its seconds in each of `StepCosts.stages`."""


class Planner:
    """Plans steps, the same on every rank.

    All ranks of a stage, or of a team if there are very many, work on one microbatch at a time. So
    ranks wait for each other only as far as a deal is uneven, and a document of any length has as
    many ranks as its work needs. The rest of the idle time are the bubbles of the pipeline. They
    are small if microbatches are many and if the first ones are short, since all stages but the
    first wait for those; but each microbatch has fixed costs. The number of microbatches, their
    shares of the work and a schedule are searched together, once, for typical steps (`templates`),
    and then adapted to the documents of some of these. In a step, documents are parted into teams
    and then into microbatches of these shares by cost (`partition`). Of some templates the one with
    the shortest schedule is chosen, in long steps with the shares that are best for the seconds and
    the memory of its parts (`linear_program`). The parts are dealt to ranks, and the schedule is
    adapted to their seconds.

    Without templates, numbers and shares are tried in each step, and schedules are searched for the
    most promising. The inputs are numbers alone, and all counts of attempts are fixed: all ranks
    that know the lengths make the same plan.

    Args:
        costs: Costs of the stages.
        pipeline: Ranks and their memory.
        effort: Number of schedules to search for the costs of each step; 0: none if there are
            templates, and else closed forms alone.
        tries: Number of the most promising templates, or shares, to try in each step.
        prepared: Number of schedules and changes of shares to search once, for all steps similar to
            the typical ones, which takes seconds the first time; 0: no templates.
        typical: Lengths of documents of some global batches, the same on every rank. None: each
            step has the templates of its own kind, which are searched if the kind is new.
        team: Number of ranks of a team; None: the largest divisor up to `TEAM`.
        heads: Number of ranks that share heads in every microbatch; None: the faster choice.
        unit: Divisor of the positions of a rank in a microbatch.
        split_backward: Whether weight gradients may be computed later.
        one_order: Whether all teams have one order of microbatches, made for the most expensive
            ones of the teams, as is needed if ranks of several teams exchange inside layers.
    """

    def __init__(
        self,
        costs: StepCosts,
        pipeline: Pipeline,
        *,
        effort: int = 0,
        tries: int = 4,
        prepared: int = 48,
        typical: Sequence[Sequence[int]] | None = None,
        team: int | None = None,
        heads: int | None = None,
        unit: int = 1,
        split_backward: bool = True,
        one_order: bool = False,
    ) -> None:
        self.costs, self.pipeline = costs, pipeline
        self._heads, self._unit, self._one_order = heads, unit, one_order
        self.split_backward = split_backward
        self.effort, self.tries, self.prepared = effort, tries, prepared
        sizes = [n for n in range(1, min(TEAM, pipeline.ranks) + 1) if pipeline.ranks % n == 0]
        self._ranks = max(sizes) if team is None else team
        self._stages = costs.of_stages(pipeline.num_stages)
        self._typical = [*map(self._work, typical or ())]

    @property
    def num_teams(self) -> int:
        """Return the number of teams of ranks of a stage."""
        return self.pipeline.ranks // self._ranks

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a step.

        Args:
            lengths: Tokens of each document of the global batch.

        Raises:
            ConfigError: When the documents fit into memory by no plan.
        """
        work = self._work(lengths)
        teams = self._teams(work)
        best: tuple[float, StepPlan] | None = None
        looked_at = 0
        for shape in self._shapes(work, teams):
            plan = self._made(teams, shape, num_documents=len(lengths))
            if plan is None:
                continue
            looked_at += 1
            best = plan if best is None or plan[0] < best[0] else best
            if looked_at == self.tries or shape.schedule is not None:
                break
        if best is None:
            raise self._too_much(lengths)
        return best[1]

    def team(self, lengths: Sequence[int], number: int) -> Team:
        """Plan the step of one team alone, as `plan` with one try.

        Args:
            lengths: Tokens of each document of the global batch.
            number: Index of the team.

        Raises:
            ConfigError: When its documents do not fit into memory; `plan` may part them otherwise.
        """
        work = self._work(lengths)
        teams = self._teams(work)
        shape = next(self._shapes(work, teams), None)
        wanted = teams if self._one_order else teams[number : number + 1]
        found = shape and self._made(wanted, shape, num_documents=len(lengths))
        if not found:
            raise self._too_much(lengths)
        return found[1].teams[number if self._one_order else 0]

    def of_parts(
        self, lengths: Sequence[int], parts: Sequence[Sequence[Sequence[int]]]
    ) -> StepPlan | None:
        """Plan a step with given microbatches; None if they do not fit into memory.

        Args:
            lengths: Tokens of each document of the global batch.
            parts: Documents of each microbatch of each team.
        """
        work = self._work(lengths)
        teams = [[work.of(part) for part in team] for team in parts]
        found = self._dealt_out(teams, _Shape(()), num_documents=len(lengths))
        return None if found is None else found[1]

    def searched_templates(self) -> list[tuple[list[float], str]]:
        """Search templates for typical steps; return shares, and the schedule as JSON, of each."""
        found = [(list(each.shares), each.schedule) for each in self._fitted]
        return [(shares, to_json(schedule)) for shares, schedule in found if schedule is not None]

    def use_templates(self, templates: Sequence[tuple[Sequence[float], str]]) -> None:
        """Use the templates that `searched_templates` returned on another rank."""
        self._fitted = [_Shape(tuple(shares), from_json(text)) for shares, text in templates]

    def _too_much(self, lengths: Sequence[int]) -> ConfigError:
        return ConfigError(
            f"{sum(lengths)} tokens, the longest document of {max(lengths)}, must fit "
            f"{self.pipeline.ranks} ranks with memory for {self.pipeline.tokens} tokens each"
        )

    def _work(self, lengths: Sequence[int]) -> _Work:
        if not lengths or min(lengths) < 1:
            raise ConfigError(f"documents ({len(lengths)}) must be one or more, and not empty")
        pairs = pairs_of(lengths, self.costs)
        stage = self.costs.busiest(sum(lengths), fsum(pairs))
        token, pair = stage.token.total, stage.pair.total
        seconds = [token * t + pair * p for t, p in zip(lengths, pairs, strict=True)]
        return _Work(range(len(lengths)), lengths, pairs, seconds)

    def _teams(self, work: _Work) -> list[_Work]:
        """Part documents into teams, as evenly as possible; none if documents are too few."""
        if self.num_teams == 1:
            return [work]
        targets = [1 / self.num_teams] * self.num_teams
        parts = partition(work.seconds, work.lengths, targets, longest=sum(work.lengths))
        return [work.of(part) for part in parts or ()]

    def _shapes(self, work: _Work, teams: Sequence[_Work]) -> Iterator[_Shape]:
        """Yield plausible shapes, the most promising first."""
        if teams and self.prepared:
            shapes = self._fitted if self._typical else self._templates([work])
            found = [(self._expected(teams[0], shape), shape) for shape in shapes]
            fitting = [(seconds, shape) for seconds, shape in found if seconds is not None]
            of_step = fsum(work.seconds) / self.pipeline.ranks
            for _, shape in sorted(fitting, key=lambda each: each[0]):
                program = program_seconds(self.pipeline.num_stages, len(shape.shares))
                is_long = of_step >= max(_LONG, program / _OF_STEP)
                yield self._adapted(shape, teams[0]) if is_long else shape
        if teams:
            yield from sorted(self._plain_shapes(work), key=lambda each: self._about(work, each))

    def _kind(self, works: Sequence[_Work]) -> Kind:
        """Return the kind of steps that are similar to the mean of some steps."""
        ranks = self.pipeline.ranks * len(works)
        tokens, pairs, unit = (
            fsum(fsum(each) for each in parts) / ranks
            for parts in zip(*((w.lengths, w.pairs, w.seconds) for w in works), strict=True)
        )
        documents = sum(len(work.lengths) for work in works) // len(works)
        stages = self._stages

        def shares(seconds: Iterable[Seconds]) -> tuple[Seconds, ...]:
            return tuple(Seconds(*(part / unit for part in each)) for each in seconds)

        return Kind(
            most=self._most(documents, unit),
            stages=shares(stage.pure(tokens, pairs) for stage in stages),
            each=shares(stage.microbatch for stage in stages),
            least=shares(stage.least for stage in stages),
            message=self.costs.message * tokens / unit,
            memory=self.pipeline.tokens / tokens,
            split_backward=self.split_backward,
        ).rounded()

    def _most(self, num_documents: int, seconds: float) -> int:
        """Return the most microbatches for which there are documents, and time to plan."""
        stages = self.pipeline.num_stages
        in_time = int(seconds * _OF_STEP / _PLANNING / stages) * stages
        return min(max(1, num_documents // self.num_teams // 2), max(2 * stages, in_time))

    def _templates(self, works: Sequence[_Work]) -> list[_Shape]:
        """Return the best templates for steps that are similar to some."""
        found = templates_for(self._kind(works), self.prepared)[: self.tries]
        return [_Shape(each.shares, each.schedule) for each in found]

    @cached_property
    def _fitted(self) -> list[_Shape]:
        """Adapt the best templates for typical steps to the documents of some of these.

        A small microbatch of short documents has more tokens than its share of the work.
        """
        teams = [teams[0] for teams in map(self._teams, self._typical[:_FITTED_TO]) if teams]
        return [self._fit(shape, teams) for shape in self._templates(self._typical)]

    def _fit(self, shape: _Shape, teams: Sequence[_Work]) -> _Shape:
        """Improve shares for some teams by random changes, beginning with the best for one team."""

        def seconds(shape: _Shape) -> float:
            runs = (self._expected(work, shape) for work in teams)
            return fsum(math.inf if run is None else run for run in runs)

        shape = min([shape, *(self._adapted(shape, work) for work in teams)], key=seconds)
        random = Random(0)  # noqa: S311 - nothing is secret
        best = seconds(shape)
        part = part_looked_at(self.pipeline.num_stages, len(shape.shares))
        for _ in range(int(2 * self.prepared * part) if teams else 0):
            changed = shape._replace(shares=changed_shares(shape.shares, random))
            if (found := seconds(changed)) < best:
                best, shape = found, changed
        return shape

    def _adapted(self, shape: _Shape, work: _Work) -> _Shape:
        """Return the shape with the best shares for the parts of a team, if that is faster."""
        parts = self._parts(work, shape)
        if parts is None or shape.schedule is None:
            return shape
        total = fsum(work.seconds)
        shares = [fsum(part.seconds) / total for part in parts]
        amounts = [(fsum(p.lengths) / self._ranks, fsum(p.pairs) / self._ranks) for p in parts]
        of_share = [
            (tokens / share, pairs / share)
            for (tokens, pairs), share in zip(amounts, shares, strict=True)
        ]
        rates = Rates(
            work=[[stage.pure(*each) for each in of_share] for stage in self._stages],
            each=[stage.microbatch for stage in self._stages],
            least=[stage.least for stage in self._stages],
            tokens=[tokens for tokens, _ in of_share],
            message=[self.costs.message * tokens for tokens, _ in of_share],
            memory=self.pipeline.tokens * (1 - _SPARE),
        )
        best = best_shares(shape.schedule, rates)
        if best is None:
            return shape
        ways = [shape, shape._replace(shares=best)]
        return min(ways, key=lambda way: self._expected(work, way) or math.inf)

    def _expected(self, work: _Work, shape: _Shape) -> float | None:
        """Return the seconds of a template with the parts of a team; None if they do not fit."""
        parts = self._parts(work, shape)
        if parts is None or shape.schedule is None:
            return None
        seconds, tokens = [], []
        for part in parts:
            of_rank, pairs = (fsum(each) / self._ranks for each in (part.lengths, part.pairs))
            seconds.append([stage.alone(of_rank, pairs) for stage in self.costs.stages])
            tokens.append(-int(-of_rank // 1))
        costs = self._costs_of(seconds, tokens)
        found = shorten(shape.schedule, costs, memory_limit=self.pipeline.tokens)
        return None if found is None else found[1].makespan

    def _plain_shapes(self, work: _Work) -> Iterator[_Shape]:
        """Yield shapes without a schedule."""
        pipeline = self.pipeline
        of_rank = sum(work.lengths) / pipeline.ranks
        fewest = max(pipeline.num_stages, of_rank * pipeline.num_stages / pipeline.tokens)
        most = max(1, len(work.lengths) // self.num_teams)
        for count in sorted({max(1, min(most, round(fewest * by))) for by in _DENSITIES}):
            yield from map(_Shape, _shares(count))

    def _about(self, work: _Work, shape: _Shape) -> float:
        """Estimate seconds: work, fixed costs, waits for the first and for long microbatches."""
        mean, longest = fsum(work.seconds) / self.pipeline.ranks, max(work.seconds) / self._ranks
        stages, shares = self.pipeline.num_stages, shape.shares
        waits = max(mean * shares[0], longest - 1.5 * mean * max(shares)) * (stages - 1) / 3
        return mean + waits + max(s.microbatch.total for s in self._stages) * len(shares)

    def _parts(self, work: _Work, shape: _Shape) -> list[_Work] | None:
        """Part the documents of a team into microbatches; None if they do not fit."""
        longest = self.pipeline.tokens * self._ranks
        parts = partition(work.seconds, work.lengths, shape.shares, longest=longest)
        return None if parts is None else [work.of(part) for part in parts]

    def _made(
        self, teams: Sequence[_Work], shape: _Shape, *, num_documents: int
    ) -> tuple[float, StepPlan] | None:
        """Return a plan of a shape and its seconds; None if it does not fit into memory."""
        parts = [self._parts(work, shape) for work in teams]
        every = [each for each in parts if each is not None]
        if len(every) < len(teams):
            return None
        return self._dealt_out(every, shape, num_documents=num_documents)

    def _dealt_out(
        self, teams: Sequence[Sequence[_Work]], shape: _Shape, *, num_documents: int
    ) -> tuple[float, StepPlan] | None:
        """Return a plan of given microbatches and its seconds; None if it does not fit."""
        every = [[self._dealt(part) for part in parts] for parts in teams]
        slowest, found, origin = 0.0, [], ""
        for alike in [every] if self._one_order else [[dealt] for dealt in every]:
            scheduled = self._scheduled(self._most_expensive(alike), len(alike[0]), shape)
            if scheduled is None:
                return None
            makespan, schedule, origin = scheduled
            slowest = max(slowest, makespan)
            found += [Team(tuple(each for each, _ in dealt), schedule) for dealt in alike]
        return slowest, StepPlan(num_documents, tuple(found), origin)

    def _most_expensive(self, teams: Sequence[Sequence[_Dealt]]) -> Costs:
        """Return the costs of the most expensive microbatch of any team at each place."""
        seconds, tokens = [], []
        for place in zip(*teams, strict=True):
            of_stages = zip(*(of_team for _, of_team in place), strict=True)
            seconds.append([Seconds(*map(max, zip(*stage, strict=True))) for stage in of_stages])
            tokens.append(max(max(each.deal.sizes) for each, _ in place))
        return self._costs_of(seconds, tokens)

    def _costs_of(self, seconds: Sequence[Sequence[Seconds]], tokens: Sequence[int]) -> Costs:
        return stage_costs(
            seconds, tokens, message=self.costs.message, num_stages=self.pipeline.num_stages
        )

    def _dealt(self, part: _Work) -> _Dealt:
        """Deal documents to ranks, which fetch keys, or share heads in a node if that is faster."""
        node = self.costs.node
        if self._heads is not None:
            return self._dealt_by(part, heads=self._heads)
        if self._ranks <= node or self._ranks % node:
            return self._dealt_by(part)
        pairs = fsum(part.pairs)
        if max(part.pairs) > pairs * node / self._ranks:  # many keys would go from node to node
            return self._dealt_by(part, heads=node)
        best = self._dealt_by(part, node=node)
        tokens, of_rank = max(best[0].deal.sizes), pairs / self._ranks
        waits = sharing = 0.0
        for stage, seconds in zip(self.costs.stages, best[1], strict=True):
            waits += seconds.total - stage.alone(tokens, of_rank).total
            sharing += self.costs.sharing(stage, tokens, heads=node)
        if waits > sharing:
            return min(best, self._dealt_by(part, heads=node), key=lambda dealt: slowest(dealt[1]))
        return best

    def _dealt_by(self, part: _Work, *, node: int | None = None, heads: int = 1) -> _Dealt:
        padding = -sum(part.lengths) % (self._ranks * self._unit)
        lengths = [*part.lengths, padding] if padding else part.lengths
        deal = deal_documents(
            lengths,
            self._ranks,
            windows=self.costs.windows,
            pairs_per_key=0.0,
            node=node,
            heads=heads,
        )
        microbatch = PlannedMicrobatch(tuple(part.documents), padding, deal, heads)
        cost = cost_of_deal(deal, lengths, self.costs, heads=heads)
        return microbatch, self.costs.of_parts(deal.sizes, cost, heads=heads)

    def _scheduled(
        self, costs: Costs, num_microbatches: int, shape: _Shape
    ) -> tuple[float, Schedule, str] | None:
        """Return the seconds, the schedule and its origin; None if no schedule fits."""
        memory = float(self.pipeline.tokens)
        best: tuple[float, Schedule, str] | None = None
        if shape.schedule is not None:
            short = shorten(shape.schedule, costs, memory_limit=memory)
            best = short and (short[1].makespan, short[0], "prepared")
            if not self.effort:
                return best
        try:
            found = search(
                costs,
                num_ranks=self.pipeline.num_stages,
                num_microbatches=num_microbatches,
                virtual=(1,),
                memory_limit=memory,
                split_backward=self.split_backward,
                num_candidates=self.effort,
            )
        except ValueError:  # nothing fits into memory
            return best
        if best is None or found.makespan < best[0]:
            best = found.makespan, found.schedule, found.origin
        return best


def _shares(count: int) -> Iterator[tuple[float, ...]]:
    """Yield shares of a number of microbatches: equal ones, and small first and last ones."""
    yield (1 / count,) * count
    if count > len(_FRONT) + len(_BACK):
        middle = count - len(_FRONT) - len(_BACK)
        yield scaled([*_FRONT, *[1.0] * middle, *_BACK])
