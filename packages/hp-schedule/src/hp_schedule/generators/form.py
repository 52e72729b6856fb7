"""Closed forms, the schedules whose rows can be made one by one, and the registry of all of them.

A closed form says for every step in which order it runs on its rank and at which logical time it
ends. Logical time is no duration, it is a proof: it grows along every row, and from the step that
makes a value to the step that reads it. `add_send_recv` needs no more than that, so a rank that
knows the logical times of its own steps and of its neighbours' lays out its own sends and receives
exactly as it would in a pass over all ranks.

A generator is a function of this package that returns a `ClosedForm`, with `schedule_kind` above
it. Nothing else is needed for a schedule: the command's choices and options, the plans a search
starts from, the named classes, hp-train's `pipeline.schedule` and the table of the documentation
are read from the registry.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Final, ParamSpec

from hp_schedule.costs import Costs
from hp_schedule.passes.communication import add_send_recv, lay_out
from hp_schedule.schedule import PlacementStyle, Row, Schedule, generate_stage_to_rank_mapping
from hp_schedule.simulation.recurrence import compute_clock
from hp_schedule.steps import BWD, BWD_WEIGHT, FWD, MICROBATCH_MASK, encode


def forwards(stage: int, microbatches: Iterable[int]) -> list[int]:
    """Return the forward steps of a stage for some microbatches."""
    return [encode(FWD, stage, microbatch) for microbatch in microbatches]


def backwards(stage: int, microbatches: Iterable[int]) -> list[int]:
    """Return the full backward steps of a stage for some microbatches."""
    return [encode(BWD, stage, microbatch) for microbatch in microbatches]


def check_counts(**counts: int) -> None:
    """Raise ValueError unless every count is at least 1, and no more than steps can name."""
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} ({value}) must be >= 1")
        if value > MICROBATCH_MASK + 1:
            raise ValueError(f"{name} ({value}) must be <= {MICROBATCH_MASK + 1}")


TimedRow = list[tuple[float, int]]
"""One rank's steps in order: the logical time at which each ends, and its code."""


@dataclass(frozen=True)
class ClosedForm(ABC):
    """A rule for the row of any rank.

    Attributes:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Microbatches of a step.
        num_stages_per_rank: Stages on every rank.
        style: Placement of the stages.
    """

    num_ranks: int
    num_microbatches: int
    num_stages_per_rank: int = 1
    style: PlacementStyle = "loop"

    @abstractmethod
    def timed_row(self, rank: int) -> TimedRow:
        """Return the compute steps of a rank with their logical times."""

    @property
    def num_stages(self) -> int:
        """Return the number of stages of all ranks, one more in a U."""
        return self.num_ranks * self.num_stages_per_rank + (self.style == "u")

    def row(self, rank: int, *, communication: bool = True) -> Row:
        """Return the row of one rank, made from the rules of its own row and its neighbours'.

        Args:
            rank: Rank of the pipeline.
            communication: Whether to insert sends and receives.

        Raises:
            ValueError: If the rank does not exist.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank ({rank}) must be >= 0 and < num_ranks ({self.num_ranks})")
        if not communication:
            return Row(code for _, code in self.timed_row(rank))
        neighbours = {source for source, target in self._empty.edges if target == rank}
        schedule, times = self._timed({rank, *neighbours})
        return Row(next(lay_out(schedule, times, [rank])))

    def schedule(self, *, communication: bool = False) -> Schedule:
        """Return all rows.

        Args:
            communication: Whether to insert sends and receives, laid out along logical time, so
                that every row equals `row`'s.
        """
        schedule, times = self._timed(range(self.num_ranks))
        return add_send_recv(schedule, times=times) if communication else schedule

    def _timed(self, ranks: Iterable[int]) -> tuple[Schedule, list[list[float]]]:
        """Return the schedule with the rows of some ranks, the others empty, and their times."""
        rows = [Row()] * self.num_ranks
        times: list[list[float]] = [[] for _ in rows]
        for rank in ranks:
            timed = self.timed_row(rank)
            rows[rank] = Row(code for _, code in timed)
            times[rank] = [time for time, _ in timed]
        return replace(self._empty, steps=tuple(rows)), times

    @cached_property
    def _empty(self) -> Schedule:
        places = generate_stage_to_rank_mapping(self.num_ranks, self.num_stages, self.style)
        return Schedule(
            steps=(Row(),) * self.num_ranks,
            stage_to_rank=tuple(places.values()),
            num_microbatches=self.num_microbatches,
        )


@dataclass(frozen=True)
class Vee(ClosedForm):
    """A rule for two stages on each rank, the second ones in reverse order."""

    num_stages_per_rank: int = 2
    style: PlacementStyle = "v"

    def arms(self, rank: int) -> tuple[int, int]:
        """Return a rank's stage on the way to the last rank and its stage on the way back."""
        return rank, self.num_stages - 1 - rank


@dataclass(frozen=True)
class GivenRows(ClosedForm):
    """Rows that are known without their times; a simulated run of all rows finds the times.

    Attributes:
        rows: The packed compute steps of each rank, in order.

    Raises:
        DeadlockError: From the first row or schedule on, if the order contradicts itself.
    """

    rows: Sequence[Sequence[int]] = field(kw_only=True)

    def timed_row(self, rank: int) -> TimedRow:
        """Return the compute steps of a rank with the times at which they end."""
        return list(zip(self._finish[rank], self.rows[rank], strict=True))

    @cached_property
    def _finish(self) -> list[list[float]]:
        _, finish = compute_clock(self._empty.with_rows(self.rows), Costs())
        return finish


P = ParamSpec("P")
Variants = Mapping[str, Mapping[str, object]]
"""Keyword arguments of a generator, by a name for the schedule that they make."""

LAST: Final = 100
"""Default `order`: behind all schedules that give one."""

REGISTERED: Final[list["ScheduleKind"]] = []
"""All schedules, in the order in which their modules were imported."""


@dataclass(frozen=True, kw_only=True)
class ScheduleKind:
    """One way to order forwards and backwards; properties that its rows show are not declared.

    Attributes:
        name: Name of the schedule in configs and on command lines.
        generate: Called with the number of ranks, `num_microbatches` and `options` returns the
            compute steps.
        form: Takes the same arguments and returns the rule that makes the rows.
        purpose: Purpose of the schedule, in half a sentence.
        source: Authors and place of publication.
        order: Sort key in lists; schedules with the same key are sorted by name.
        pairs: The option that makes a forward and a backward one step wherever both are side by
            side; empty: it has no such places.
        with_one_stage: Name of the schedule with the same steps when there is one stage per rank.
        more_variants: Called with the number of ranks returns further options worth a try, by a
            name for each.
    """

    name: str
    generate: Callable[..., Schedule]
    form: Callable[..., ClosedForm]
    purpose: str
    source: str
    order: int = LAST
    pairs: str = ""
    with_one_stage: str = ""
    more_variants: Callable[[int], Variants] | None = None

    @cached_property
    def options(self) -> dict[str, object]:
        """Return the keywords of `generate` but `num_microbatches`, each with its annotation."""
        parameters = [*inspect.signature(self.form, eval_str=True).parameters.values()]
        return {parameter.name: parameter.annotation for parameter in parameters[2:]}

    @cached_property
    def stages_per_rank(self) -> int:
        """Return the only number of stages per rank that it takes; 0: any."""
        return 0 if "num_stages_per_rank" in self.options else self._small.num_stages_per_rank

    @cached_property
    def style(self) -> PlacementStyle:
        """Return the placement; in a ``u`` the first rank has the first stage and the last."""
        return self._small.style

    @property
    def returns(self) -> bool:
        """Tell whether the chain of stages comes back to the first rank for one more."""
        return self.style == "u"

    @cached_property
    def trains(self) -> bool:
        """Tell whether it has backwards."""
        return not self._small.schedule().is_forward_only

    @cached_property
    def splits_backward(self) -> bool:
        """Tell whether some weight gradients are computed later than the gradients of inputs."""
        return BWD_WEIGHT in self._small.schedule().kinds

    @cached_property
    def _small(self) -> ClosedForm:
        return self.form(2, num_microbatches=1)

    def build(
        self,
        num_ranks: int,
        num_microbatches: int,
        num_stages_per_rank: int,
        *,
        paired: bool | None = False,
        **options: object,
    ) -> Schedule:
        """Return the compute steps.

        Args:
            num_ranks: Ranks of the pipeline.
            num_microbatches: Any number from 1.
            num_stages_per_rank: Stages per rank; ignored where only one number is possible.
            paired: Whether to make pairs of a forward and a backward, where there are any; None:
                the generator's default.
            **options: Keyword arguments of the generator.

        Raises:
            ValueError: If a count or an option is out of its range.
        """
        if self.stages_per_rank == 0:
            options["num_stages_per_rank"] = num_stages_per_rank
        if self.pairs and paired is not None:
            options[self.pairs] = paired
        return self.generate(num_ranks, num_microbatches=num_microbatches, **options)

    def variants(self, num_ranks: int, *, latency: float = 0.0) -> Variants:
        """Return sets of options worth a try, the empty set first, by a name for each schedule.

        Args:
            num_ranks: Ranks of the pipeline.
            latency: Time of a message, in units of one step, for those that allow for it.
        """
        name = self.generate.__name__
        found: dict[str, Mapping[str, object]] = {name: {}}
        if self.more_variants:
            more = self.more_variants(num_ranks)
            found |= {f"{name}{suffix}": options for suffix, options in more.items()}
        if latency > 0 and "latency" in self.options:
            found[f"{name} for the latency"] = {"latency": latency}
        return found


def schedule_kind(
    *,
    purpose: str,
    source: str,
    order: int = LAST,
    name: str = "",
    pairs: str = "",
    with_one_stage: str = "",
    more_variants: Callable[[int], Variants] | None = None,
) -> Callable[[Callable[P, ClosedForm]], Callable[P, Schedule]]:
    """Enter a function into the registry and replace it by one that returns all the rows.

    Arguments are those of `ScheduleKind`; the name is the function's where there is no other.

    Raises:
        ValueError: If the name is taken, or there is no option that is called as `pairs` says.
    """

    def register(form: Callable[P, ClosedForm]) -> Callable[P, Schedule]:
        @wraps(form)
        def generate(*args: P.args, **kwargs: P.kwargs) -> Schedule:
            return form(*args, **kwargs).schedule()

        # For readers of signatures, who would follow `wraps` to the function and its form.
        signature = inspect.signature(form).replace(return_annotation=Schedule)
        generate.__annotations__ = {**form.__annotations__, "return": Schedule}
        vars(generate)["__signature__"] = signature
        kind = ScheduleKind(
            name=name or form.__name__,
            generate=generate,
            form=form,
            purpose=purpose,
            source=source,
            order=order,
            pairs=pairs,
            with_one_stage=with_one_stage,
            more_variants=more_variants,
        )
        if any(kind.name == other.name for other in REGISTERED):
            raise ValueError(f"name ({kind.name}) must not be that of another schedule")
        if pairs and pairs not in signature.parameters:
            raise ValueError(f"pairs ({pairs}) must be an option of {kind.name}")
        REGISTERED.append(kind)
        return generate

    return register


def closed_form(
    generator: Callable[..., Schedule], num_ranks: int, **options: object
) -> ClosedForm:
    """Return the rule by which a generator makes its rows, to make the row of one rank alone.

    >>> from hp_schedule import closed_form, one_f_one_b
    >>> row = closed_form(one_f_one_b, 256, num_microbatches=1024).row(255)
    >>> [str(step) for step in row[:3]]
    ['255RECV_F0', '255F0', '255B0']

    A row is made in milliseconds whatever the number of ranks, except by `v_half`, by `u_shape`, by
    `zbv` for few microbatches or with a latency, and by `interleaved_1f1b` with pairs: their rows
    are found together, by the first call of `ClosedForm.row`.

    Args:
        generator: One of `hp_schedule.generators`.
        num_ranks: Number of ranks of the pipeline.
        **options: Keyword arguments of the generator.

    Raises:
        ValueError: If it is no generator of this package, or one of the options does not fit.
    """
    for kind in REGISTERED:
        if kind.generate is generator:
            return kind.form(num_ranks, **options)
    names = ", ".join(sorted(kind.generate.__name__ for kind in REGISTERED))
    raise ValueError(f"generator ({generator}) must be one of {names}")
