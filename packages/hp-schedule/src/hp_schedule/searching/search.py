"""Search for the shortest schedule under a memory limit."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Literal

from hp_schedule.costs import Costs, Latency, ModelCosts
from hp_schedule.generators import SCHEDULES
from hp_schedule.generators.form import check_counts
from hp_schedule.passes.fitting import check_ways, fit_memory
from hp_schedule.passes.retention import Retention
from hp_schedule.schedule import PlacementStyle, Schedule, generate_stage_to_rank_mapping
from hp_schedule.searching.exact import engine
from hp_schedule.searching.problem import EPSILON, Units, first_orders
from hp_schedule.searching.space import Recipe, Space
from hp_schedule.steps import BWD_WEIGHT

Place = tuple[int, PlacementStyle]
"""Stages per rank, and how they are placed."""

_DEFAULT_BUDGET = 10.0
"""Seconds of processor time."""
_TIGHTENED = 3
"""From how many closed forms and first plans of each space the search starts."""
_WIDE, _NARROW = 0.3, 0.04
"""How far behind a space may lie and still be tried after the first recipe, and with the last."""
_NEW = 0.3
"""How often a pattern with new parameters is tried instead of a variation."""
_WALKING = 2
"""Spaces in which steps are moved after each recipe."""
_REORDERING = 2
"""After how many recipes other orders are tried again."""
_REORDERED = 0.2
"""How often that is done instead of varying a plan."""
_WALKED = 0.6
"""How often a plan's steps are moved instead of a plan built anew."""
_FOCUS = 1.2
"""How much likelier the space with the best schedule is to be varied than the next one."""

_LIMITS = (1.0, 1.25, 1.5, 2.0, 3.0, math.inf)
"""Memory to search with where schedules can be made to fit, as a multiple of what there is."""

_AT_WILL = 1e6
"""A weight delay in periods after which W only fills gaps or makes room."""

# In the order in which each added most to those before it, over 78 points of 4 to 16 ranks.
RECIPES = (
    Recipe(1.1, 0.033, 1.0, 0.33, 0.5),
    Recipe(1.0, 0.0, 1.0, _AT_WILL, 1.0),
    Recipe(1.0, 0.033, 1.15, 0.0, 0.5),
    Recipe(1.0, 0.0, 1.0, 0.33, 0.0),
    Recipe(1.1, 0.0, 1.0, 0.33, 0.5),
    Recipe(1.0, 0.0, 1.15, 0.0, 1.0),
    Recipe(1.2, 0.0, 1.0, _AT_WILL, 0.5),
    Recipe(1.0, 0.083, math.inf, _AT_WILL, 0.5),
    Recipe(1.1, 0.033, 1.0, _AT_WILL, 0.5),
    Recipe(1.1, 0.0, 1.0, 0.0, 1.0),
    Recipe(1.4, 0.0, 1.0, 0.0, 0.5),
    Recipe(1.1, 0.0, 1.15, _AT_WILL, 1.0),
    Recipe(1.1, 0.033, 1.15, _AT_WILL, 0.5),
    Recipe(1.2, 0.083, 1.15, _AT_WILL, 1.0),
    Recipe(1.1, 0.083, math.inf, 0.0, 0.5),
    Recipe(1.2, 0.0, 1.0, 0.0, 0.0),
    Recipe(1.0, 0.0, 1.0, 0.0, 1.0),
    Recipe(1.0, 0.083, 1.35, 0.33, 1.0),
    Recipe(1.2, 0.0, 1.15, 0.0, 1.0),
    Recipe(1.4, 0.083, math.inf, _AT_WILL, 1.0),
    Recipe(1.1, 0.033, 1.35, 0.0, 0.5),
    Recipe(1.2, 0.083, math.inf, 0.0, 1.0),
)


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best schedule found.

    Attributes:
        schedule: No messages; `hp_schedule.add_send_recv` adds the messages, without loss of
            time if it is told the costs.
        costs: Costs of the stages of the schedule.
        makespan: Duration of the schedule in the simulator.
        lower_bound: No schedule of the places, split and memory that were searched is shorter.
        origin: Origin of the schedule, in words, such as the name of a closed form.
        num_stages_per_rank: Number of stages per rank of the schedule.
        placement: Placement of its stages.
        makespans: The best of every number of stages per rank and placement; with retention, of
            those that were best for some limit.
        num_candidates: Plans that were built.
        ended_by: Reason for the end of the search: it met the bound, it had built the candidates
            asked for, or its time was up.
    """

    schedule: Schedule
    costs: Costs
    makespan: float
    lower_bound: float
    origin: str
    num_stages_per_rank: int
    placement: PlacementStyle
    makespans: dict[Place, float]
    num_candidates: int
    ended_by: Literal["bound", "candidates", "time"]

    @property
    def gap(self) -> float:
        """Return how much shorter a schedule could be at most, as a share of the makespan."""
        return max(0.0, 1.0 - self.lower_bound / self.makespan) if self.makespan > 0 else 0.0


def search(
    costs: ModelCosts | Costs,
    *,
    num_ranks: int,
    num_microbatches: int,
    virtual: int | Sequence[int] = (1, 2),
    memory_limit: float = math.inf,
    latency: Latency | None = None,
    placements: PlacementStyle | Sequence[PlacementStyle] = ("loop", "v"),
    split_backward: bool = True,
    keep_order: bool = False,
    blocking: bool = False,
    retention: Retention | Sequence[Retention] = (),
    num_candidates: int | None = None,
    time_budget: float | None = None,
    exact: float = 0.0,
    seed: int = 0,
) -> SearchResult:
    """Find a short schedule.

    It starts from every published closed form that fits the memory, so it is never worse than
    them; goes on with periodic patterns squeezed by list scheduling; then disturbs the best plans
    and rebuilds them until the bound is met or the budget is used. What it does depends on the
    arguments alone; only the moment at which a time budget ends it does not.

    Args:
        costs: Costs of the model, or of the stages if `virtual` is one number.
        num_ranks: Ranks of the pipeline.
        num_microbatches: Any number from 1.
        virtual: Number of stages per rank, or numbers to try.
        memory_limit: What the activations of a rank may take at most, in the unit of the costs.
        latency: Latency of messages, in place of that of the costs.
        placements: Placement or placements to try; with one stage per rank they are the same.
        split_backward: Whether to split backwards into I and W; without, weight gradients are
            computed with the input's.
        keep_order: Whether every stage must take the microbatches in the order of their numbers, so
            that sums over them are those of one process bit for bit. Otherwise the order is
            searched too where their costs differ, and may differ from stage to stage; microbatches
            that cost the same stay in order.
        blocking: Whether a rank stands still until what it sends has arrived; see `simulate`.
        retention: How microbatches may make room where the memory does not suffice: "recompute",
            "offload" or both, see `fit_memory`. Schedules that need more memory are then searched
            too, each limit with an equal part of the budget, and made to fit.
        num_candidates: Plans to build at most; default: until the time is up.
        time_budget: Seconds of processor time of the calling thread, so that a busy machine gets
            the same plans, later; the closed forms and the bounds are worked out however little.
            Default: 10, or as many as `num_candidates` take.
        exact: Effort of an exact engine after that, in its deterministic time (about seconds, the
            same result on every machine): what it finds is proven to be the shortest, or bounded
            from below. Needs `hp-schedule[exact]`.
        seed: Seed of the random numbers by which plans are varied.

    Raises:
        ValueError: If a count is below 1, costs are of stages and `virtual` has several numbers,
            a way of retention is unknown or comes with `blocking`, nothing fits the memory, or
            `exact` is asked for and OR-Tools is not installed.
    """
    virtual = (virtual,) if isinstance(virtual, int) else virtual
    placements = (placements,) if isinstance(placements, str) else placements
    retention = (retention,) if isinstance(retention, str) else retention
    check_ways(retention)
    if not 0 <= exact < math.inf:
        raise ValueError(f"exact ({exact}) must be >= 0 and finite")
    if exact:
        engine()
    if retention and blocking:
        raise ValueError("blocking (True) must be left out with retention")
    if retention and memory_limit < math.inf:
        shares = len(_LIMITS)
        find = partial(
            search,
            costs,
            num_ranks=num_ranks,
            num_microbatches=num_microbatches,
            virtual=virtual,
            latency=latency,
            placements=placements,
            split_backward=split_backward,
            keep_order=keep_order,
            blocking=blocking,
            num_candidates=None if num_candidates is None else num_candidates // shares,
            time_budget=None if time_budget is None else time_budget / shares,
            exact=exact / shares,
            seed=seed,
        )
        return _made_to_fit(find, memory_limit, retention)
    if time_budget is None:
        time_budget = _DEFAULT_BUDGET if num_candidates is None else math.inf
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    _check_limits(memory_limit, num_candidates, time_budget)
    deadline = time.thread_time() + time_budget
    if latency is not None:
        costs = replace(costs, latency=latency)
    virtual = tuple(dict.fromkeys(virtual))
    _check_places(costs, virtual, placements)
    spaces = _Spaces(
        costs,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        places=[(v, style) for v in virtual for style in (placements if v > 1 else ("loop",))],
        memory_limit=memory_limit,
        split_backward=split_backward,
        keep_order=keep_order,
        blocking=blocking,
    )
    random = Random(seed)  # noqa: S311 - nothing is secret
    built = 0
    ended_by: Literal["bound", "candidates", "time"] = "bound"
    for build in spaces.candidates(random):
        if built == num_candidates or time.thread_time() > deadline:
            ended_by = "candidates" if built == num_candidates else "time"
            break
        build()
        built += 1
    if exact and ended_by != "bound" and spaces.solve(exact):
        ended_by = "bound"
    return spaces.result(built, ended_by)


def closed_forms(
    num_ranks: int,
    *,
    num_microbatches: int,
    num_stages_per_rank: int,
    style: PlacementStyle,
    latency: float = 0.0,
    split_backward: bool = True,
) -> Iterator[tuple[str, Schedule]]:
    """Yield name and schedule of every generator of a placement: a search never falls behind them.

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Any number from 1.
        num_stages_per_rank: Stages on every rank.
        style: Where they live; one stage per rank is a loop.
        latency: Latency of a message, in units of one step, for the generators that allow for it.
        split_backward: Whether to yield those that split backwards, too.
    """
    style = "loop" if num_stages_per_rank == 1 else style
    # With one stage per rank, those that take any number are others, or close to them.
    found = [
        (name, kind, options)
        for kind in SCHEDULES.values()
        if kind.trains and kind.style == style
        if num_stages_per_rank == (kind.stages_per_rank or max(2, num_stages_per_rank))
        for name, options in kind.variants(num_ranks, latency=latency).items()
    ]
    # First as they are: of schedules that are equally good, a search goes on from the first.
    for name, kind, options in sorted(found, key=lambda one: bool(one[2])):
        schedule = kind.build(
            num_ranks, num_microbatches, num_stages_per_rank, paired=None, **options
        )
        if split_backward or BWD_WEIGHT not in schedule.kinds:
            yield name, schedule


def _made_to_fit(
    find: Callable[..., SearchResult], memory_limit: float, retention: Sequence[Retention]
) -> SearchResult:
    """Search with more memory than there is, and return the best that can be made to fit."""
    results: list[SearchResult] = []
    for factor in _LIMITS:
        try:
            results.append(find(memory_limit=memory_limit * factor))
        except ValueError:
            # Without any limit there is a schedule, so what is wrong then is the arguments.
            if factor == math.inf:
                raise
    fitted: list[SearchResult] = []
    for result in results:
        fit = fit_memory(result.schedule, result.costs, memory_limit, ways=retention)
        if fit is not None:
            origin = f"{result.origin}, made to fit" if fit.choice else result.origin
            fitted.append(
                replace(result, schedule=fit.schedule, makespan=fit.makespan, origin=origin)
            )
    if not fitted:
        raise ValueError(
            f"memory_limit ({memory_limit:g}) must be >= what the schedules need that "
            f"{' and '.join(retention)} can make fit"
        )
    best = min(fitted, key=lambda result: result.makespan)
    makespans: dict[Place, float] = {}
    for result in fitted:
        place = result.num_stages_per_rank, result.placement
        makespans[place] = min(makespans.get(place, math.inf), result.makespan)
    return replace(
        best,
        lower_bound=results[-1].lower_bound,  # nothing that runs again makes anything shorter
        makespans=makespans,
        num_candidates=sum(result.num_candidates for result in results),
        ended_by=results[-1].ended_by,
    )


class _Spaces:
    """The spaces of a search, by stages per rank and placement."""

    def __init__(
        self,
        costs: ModelCosts | Costs,
        *,
        num_ranks: int,
        num_microbatches: int,
        places: Sequence[Place],
        memory_limit: float,
        split_backward: bool,
        keep_order: bool,
        blocking: bool,
    ) -> None:
        self._units = Units.fitting(costs)
        self._all: list[tuple[Place, Space]] = []
        for number, style in places:
            of_stages = (
                costs.of_stages(num_ranks, num_ranks * number)
                if isinstance(costs, ModelCosts)
                else costs
            )
            mapping = generate_stage_to_rank_mapping(num_ranks, num_ranks * number, style)
            orders = first_orders(of_stages, num_ranks * number, num_microbatches)
            space = Space(
                of_stages,
                stage_to_rank=[mapping[stage] for stage in range(len(mapping))],
                orders=orders,
                memory_limit=memory_limit,
                split_backward=split_backward,
                keep_order=keep_order,
                blocking=blocking,
                units=self._units,
            )
            self._all.append(((number, style), space))
            forms = closed_forms(
                num_ranks,
                num_microbatches=num_microbatches,
                num_stages_per_rank=number,
                style=style,
                latency=space.mean_latency,
                split_backward=split_backward,
            )
            for name, schedule in forms:
                space.adopt(name, schedule)
        self._bound = min(space.bound for _, space in self._all)

    def candidates(self, random: Random) -> Iterator[Callable[[], None]]:
        """Yield one way after another to build a schedule, until none can be shorter."""
        for index, recipe in enumerate(RECIPES):
            field = max(_WIDE / index, _NARROW) if index else math.inf
            for space in self._open(field):
                yield partial(space.follow, recipe, random)
            for space in self._open(_WIDE) if index < _TIGHTENED else ():
                yield space.tighten_next
            for space in self._open(_NARROW)[:_WALKING]:
                yield partial(space.walk, random)
                if space.can_reorder and not index % _REORDERING:
                    yield partial(space.reorder, random)
        while spaces := self._open(math.inf):
            index = min(int(random.expovariate(_FOCUS)), len(spaces) - 1)
            yield self._any_way(spaces[index], random)

    def _any_way(self, space: Space, random: Random) -> Callable[[], None]:
        if random.random() < _NEW:
            return partial(space.follow, _random_recipe(random), random)
        if random.random() < _WALKED:
            return partial(space.walk, random)
        if space.can_reorder and random.random() < _REORDERED:
            return partial(space.reorder, random)
        return partial(space.vary, random)

    def solve(self, effort: float) -> bool:
        """Let an exact engine shorten and bound open spaces; return whether none is left."""
        spaces = self._open(math.inf)
        for space in spaces:
            if space in self._open(math.inf):
                space.solve(effort / len(spaces))
        self._bound = min(space.bound for _, space in self._all)
        return not self._open(math.inf)

    def result(
        self, num_candidates: int, ended_by: Literal["bound", "candidates", "time"]
    ) -> SearchResult:
        """Return the best schedule of all."""
        (number, style), space = min(self._all, key=lambda entry: entry[1].best.makespan)
        unit = self._units.time
        makespans: dict[Place, float] = {}
        for place, other in self._all:
            makespans[place] = min(makespans.get(place, math.inf), other.best.makespan * unit)
        makespans[number, style] = space.makespan(space.best)
        return SearchResult(
            schedule=space.schedule(space.best),
            costs=space.costs,
            makespan=makespans[number, style],
            lower_bound=self._bound * unit,
            origin=space.best.origin,
            num_stages_per_rank=number,
            placement=style,
            makespans=makespans,
            num_candidates=num_candidates,
            ended_by=ended_by,
        )

    def _open(self, field: float) -> list[Space]:
        """Return the spaces that may hold something shorter than the best so far, best first.

        Args:
            field: How much longer than the best of all a space's best may be, as a share.
        """
        spaces = sorted((space for _, space in self._all), key=lambda space: space.best.makespan)
        best = spaces[0].best.makespan
        return [
            space
            for space in spaces
            if space.bound < best - EPSILON and space.best.makespan <= best * (1 + field)
        ]


def _random_recipe(random: Random) -> Recipe:
    return Recipe(
        stretch=random.uniform(1.0, 1.5),
        slack=random.choice((0.0, random.uniform(0.0, 0.1))),
        fill=random.uniform(0.75, 1.4),
        weight_delay=random.choice((0.0, random.uniform(0.0, 1.0), _AT_WILL)),
        patience=random.choice((0.0, 0.5, 1.0)),
    )


def _check_places(
    costs: ModelCosts | Costs, virtual: Sequence[int], placements: Sequence[PlacementStyle]
) -> None:
    if not virtual:
        raise ValueError("virtual must name at least one number of stages per rank")
    for number in virtual:
        check_counts(virtual=number)
    if isinstance(costs, Costs) and len(virtual) > 1:
        raise ValueError(f"virtual ({list(virtual)}) must be one number for costs of stages")
    if not placements or not set(placements) <= {"loop", "v"}:
        raise ValueError(f"placements ({list(placements)}) must be loop, v or both")


def _check_limits(memory_limit: float, num_candidates: int | None, time_budget: float) -> None:
    if not memory_limit > 0:
        raise ValueError(f"memory_limit ({memory_limit}) must be > 0")
    if num_candidates is not None and num_candidates < 0:
        raise ValueError(f"num_candidates ({num_candidates}) must be >= 0")
    if not time_budget >= 0:
        raise ValueError(f"time_budget ({time_budget}) must be >= 0")
