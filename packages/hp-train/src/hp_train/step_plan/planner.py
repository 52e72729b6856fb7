"""The planner of steps.

Note [How a step is planned]
    All ranks of a stage, or teams of them where there are very many, work on one microbatch at a
    time. So no rank waits for another but for what a deal leaves over, and a document of any length
    has as many ranks as its work asks for. What is left are the bubbles of the pipeline. They are
    small where microbatches are many and where the first ones are short, since all stages but the
    first wait for those; but each microbatch takes something however short it is. So some numbers
    and shares of microbatches are tried: documents are put into parts of these shares by cost
    (`partition`), of which the most promising are searched for a schedule with the costs of these
    very microbatches; `hp_schedule.search` includes what every closed form takes. Only numbers go
    in, and every count of attempts is fixed: all ranks that know the lengths make the same plan.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from hp_context import deal_documents
from hp_schedule import Schedule, search, simulate
from hp_train.errors import ConfigError
from hp_train.step_plan.costs import Seconds, StepCosts
from hp_train.step_plan.partition import partition
from hp_train.step_plan.plan import PlannedMicrobatch, StepPlan, Team
from hp_train.step_plan.price import Pipeline, pairs_of, seconds_of, stage_costs
from hp_train.step_plan.templates import template_for

TEAM = 32
"""Ranks of a stage that share microbatches, at most."""

_DENSITIES = (1.0, 1.5, 2.0, 2.5, 3.0)
"""Numbers of microbatches that are tried, by those with which 1F1B fills the memory."""
_FRONT, _BACK = (0.1, 0.25, 0.5, 0.8), (0.8, 0.5)
"""Shares of the first microbatches and of the last ones, by that of the others."""


class Planner:
    """Plans steps, the same on every rank; see Note [How a step is planned].

    Args:
        costs: Costs of a stage.
        pipeline: The ranks and their memory.
        effort: Schedules that a search builds for each partition.
        tries: Partitions for which schedules are searched, the most promising ones.
        prepared: Schedules that are looked at once for all steps that resemble each other, which
            takes seconds the first time; 0: none, see `templates`.
    """

    def __init__(
        self,
        costs: StepCosts,
        pipeline: Pipeline,
        *,
        effort: int = 8,
        tries: int = 2,
        prepared: int = 0,
    ) -> None:
        self.costs, self.pipeline = costs, pipeline
        self.effort, self.tries, self.prepared = effort, tries, prepared
        sizes = [n for n in range(1, min(TEAM, pipeline.ranks) + 1) if pipeline.ranks % n == 0]
        self._ranks = max(sizes)
        self._thread: ThreadPoolExecutor | None = None

    @property
    def num_teams(self) -> int:
        """Teams of ranks of a stage."""
        return self.pipeline.ranks // self._ranks

    def start(self, lengths: Sequence[int]) -> "Future[StepPlan]":
        """Plan in a thread, a step or more ahead of when it is needed; in the order of calls."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="step plan")
        return self._thread.submit(self.plan, tuple(lengths))

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a step.

        Args:
            lengths: Tokens of each document of the global batch.

        Raises:
            ConfigError: When the documents do not fit the memory, whatever the plan.
        """
        best: tuple[float, StepPlan] | None = None
        looked_at = 0
        for parts, shares in self._partitions(lengths):
            plan = self._made(lengths, parts, shares)
            if plan is None:
                continue
            looked_at += 1
            best = plan if best is None or plan[0] < best[0] else best
            if looked_at == self.tries:
                break
        if best is None:
            raise self._too_much(lengths)
        return best[1]

    def team(self, lengths: Sequence[int], number: int) -> Team:
        """Plan what one team does, as `plan` with one try, without what the others do.

        Args:
            lengths: Tokens of each document of the global batch.
            number: Number of the team.

        Raises:
            ConfigError: When its documents do not fit the memory: `plan` may find others then.
        """
        parts, shares = next(self._partitions(lengths), ([], []))
        found = self._made(lengths, [parts[number]], shares) if parts else None
        if found is None:
            raise self._too_much(lengths)
        return found[1].teams[0]

    def _too_much(self, lengths: Sequence[int]) -> ConfigError:
        return ConfigError(
            f"{sum(lengths)} tokens, the longest document of {max(lengths)}, must fit "
            f"{self.pipeline.ranks} ranks with memory for {self.pipeline.tokens} tokens each"
        )

    def _partitions(
        self, lengths: Sequence[int]
    ) -> Iterator[tuple[list[list[list[int]]], list[float]]]:
        """Yield documents of each microbatch of each team, and shares, the most promising first."""
        if not lengths or min(lengths) < 1:
            raise ConfigError(f"documents ({len(lengths)}) must be one or more, and not empty")
        pairs = pairs_of(lengths, self.costs)
        pure = self.costs.pure
        work = [pure(t, p).total for t, p in zip(lengths, pairs, strict=True)]
        for shares in sorted(self._shapes(lengths), key=lambda each: self._about(work, each)):
            parts = self._parted(lengths, work, shares)
            if parts is not None:
                yield parts, shares

    def _shapes(self, lengths: Sequence[int]) -> Iterator[list[float]]:
        """Yield shares of microbatches that are worth a try."""
        pipeline = self.pipeline
        of_rank = sum(lengths) / pipeline.ranks
        fewest = max(pipeline.num_stages, of_rank * pipeline.num_stages / pipeline.tokens)
        most = max(1, len(lengths) // self.num_teams)
        for count in sorted({max(1, min(most, round(fewest * by))) for by in _DENSITIES}):
            yield from _shapes(count)

    def _parted(
        self, lengths: Sequence[int], work: Sequence[float], shares: Sequence[float]
    ) -> list[list[list[int]]] | None:
        teams = self.num_teams
        longest = self.pipeline.tokens * self._ranks
        targets = [share / teams for share in shares for _ in range(teams)]
        parts = partition(work, lengths, targets, longest=longest)
        return None if parts is None else [parts[team::teams] for team in range(teams)]

    def _about(self, work: Sequence[float], shares: Sequence[float]) -> float:
        """Work, what each microbatch takes, and waiting for the first one and for long ones."""
        mean, longest = sum(work) / self.pipeline.ranks, max(work) / self._ranks
        stages = self.pipeline.num_stages
        waits = max(mean * shares[0], longest - 1.5 * mean * max(shares)) * (stages - 1) / 3
        return mean + waits + 2 * self.costs.microbatch * len(shares)

    def _made(
        self,
        lengths: Sequence[int],
        teams_of_parts: list[list[list[int]]],
        shares: Sequence[float],
    ) -> tuple[float, StepPlan] | None:
        """How long a plan of these parts takes, and the plan; None if memory does not suffice."""
        slowest, teams, origin = 0.0, [], ""
        for parts in teams_of_parts:
            microbatches, seconds = zip(*(self._dealt(lengths, p) for p in parts), strict=True)
            found = self._scheduled(microbatches, seconds, shares)
            if found is None:
                return None
            makespan, schedule, origin = found
            slowest = max(slowest, makespan)
            teams.append(Team(microbatches, schedule))
        return slowest, StepPlan(len(lengths), tuple(teams), origin)

    def _dealt(
        self, lengths: Sequence[int], part: Sequence[int]
    ) -> tuple[PlannedMicrobatch, Seconds]:
        """Deal out documents: keys are fetched or, where that takes less, nodes share heads."""
        node = self.costs.node
        if self._ranks <= node or self._ranks % node:
            return self._dealt_by(lengths, part)
        pairs = pairs_of([lengths[i] for i in part], self.costs)
        of_node = sum(pairs) * node / self._ranks
        if max(pairs) > of_node:  # of its keys, many would go from node to node
            return self._dealt_by(lengths, part, heads=node)
        best = self._dealt_by(lengths, part, node=node)
        tokens = max(best[0].deal.sizes)
        waits = best[1].total - self.costs.pure(tokens, sum(pairs) / self._ranks).total
        if waits > self.costs.sharing(tokens, heads=node) + 2 * self.costs.microbatch:
            by_heads = self._dealt_by(lengths, part, heads=node)
            best = min(best, by_heads, key=lambda each: each[1].total)
        return best

    def _dealt_by(
        self,
        lengths: Sequence[int],
        part: Sequence[int],
        *,
        node: int | None = None,
        heads: int = 1,
    ) -> tuple[PlannedMicrobatch, Seconds]:
        padding = -sum(lengths[i] for i in part) % self._ranks
        sizes = [lengths[i] for i in part]
        deal = deal_documents(
            [*sizes, padding] if padding else sizes,
            self._ranks,
            windows=self.costs.windows,
            pairs_per_key=0.0,
            node=node,
            heads=heads,
        )
        microbatch = PlannedMicrobatch(tuple(part), padding, deal, heads)
        return microbatch, seconds_of(microbatch, lengths, self.costs)

    def _scheduled(
        self,
        microbatches: Sequence[PlannedMicrobatch],
        seconds: Sequence[Seconds],
        shares: Sequence[float],
    ) -> tuple[float, Schedule, str] | None:
        stages, memory = self.pipeline.num_stages, self.pipeline.tokens
        tokens = [max(each.deal.sizes) for each in microbatches]
        costs = stage_costs(seconds, tokens, self.costs, num_stages=stages)
        try:
            found = search(
                costs,
                num_ranks=stages,
                num_microbatches=len(microbatches),
                virtual=(1,),
                memory_limit=float(memory),
                num_candidates=self.effort,
            )
            best = found.makespan, found.schedule, found.origin
        except ValueError:  # nothing fits the memory
            return None
        if self.prepared:
            template = template_for(
                seconds,
                shares,
                num_stages=stages,
                latency=self.costs.message * max(tokens),
                room=memory * len(tokens) / sum(tokens),
                effort=self.prepared,
            )
            run = None if template is None else simulate(template, costs)
            fits = run is not None and max(run.peak_activations) <= memory
            if template is not None and run is not None and fits and run.makespan < best[0]:
                best = run.makespan, template, "prepared"
        return best


def _shapes(count: int) -> Iterator[list[float]]:
    """Shares of so many microbatches: equal ones, and such whose first and last ones are small."""
    yield [1 / count] * count
    if count > len(_FRONT) + len(_BACK):
        middle = count - len(_FRONT) - len(_BACK)
        shares = [*_FRONT, *[1.0] * middle, *_BACK]
        yield [share / sum(shares) for share in shares]
