"""Proof that a plan runs: every token once, memory within its limit, no step twice, no deadlock."""

from collections import Counter
from collections.abc import Iterator, Sequence

from hp_packing.costs import Pipeline, StepCosts
from hp_packing.plan import PlannedMicrobatch, StepPlan, Team
from hp_packing.pricing import costs_of, lengths_of
from hp_schedule import ScheduleError, add_send_recv, simulate, validate


def prove(
    plan: StepPlan, lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline
) -> tuple[str, ...]:
    """Return the reasons why a plan would not run, or would compute something else.

    Args:
        plan: Plan of a step.
        lengths: Tokens of each document of the global batch.
        costs: Costs of the stages, which decide when activations are in memory.
        pipeline: Ranks and their memory.

    Returns:
        Problems; empty if the plan is proven.
    """
    return tuple(_problems(plan, lengths, costs, pipeline))


def _problems(
    plan: StepPlan, lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline
) -> Iterator[str]:
    if plan.num_documents != len(lengths):
        yield f"documents ({plan.num_documents}) must be those of the batch ({len(lengths)})"
    counts = Counter(x for each in plan.microbatches for x in each.documents)
    for document in range(len(lengths)):
        if counts[document] != 1:
            yield f"document {document} must be in one microbatch, but it is in {counts[document]}"
    if unknown := sorted(set(counts) - set(range(len(lengths)))):
        yield f"documents {unknown[:5]} must be below the number of them ({len(lengths)})"
        return
    sizes = {len(each.deal.parts) for each in plan.microbatches}
    ranks = len(plan.teams) * max(sizes, default=0)
    if len(sizes) != 1 or ranks != pipeline.ranks:
        yield (
            f"teams ({len(plan.teams)}) times ranks of each ({sorted(sizes)}) must be the ranks of "
            f"a stage ({pipeline.ranks})"
        )
    for number, team in enumerate(plan.teams):
        place = f"team {number}"
        wrong = [*_of_parts(team, lengths)]
        yield from (f"{place}: {problem}" for problem in wrong)
        if not wrong:
            yield from (f"{place}: {each}" for each in _of_team(team, lengths, costs, pipeline))


def _of_parts(team: Team, lengths: Sequence[int]) -> Iterator[str]:
    for index, microbatch in enumerate(team.microbatches):
        yield from (f"microbatch {index}: {each}" for each in _of_microbatch(microbatch, lengths))
    found = team.schedule.num_microbatches
    if found != len(team.microbatches):
        yield f"microbatches of the schedule ({found}) must be those there are"


def _of_microbatch(microbatch: PlannedMicrobatch, lengths: Sequence[int]) -> Iterator[str]:
    if microbatch.padding < 0:
        yield f"padding ({microbatch.padding}) must be >= 0"
    expected, found = sum(lengths_of(microbatch, lengths)), microbatch.deal.seq_len
    if expected != found:  # that runs are disjoint and leave nothing out, a Deal knows itself
        yield f"positions dealt out ({found}) must be its tokens and padding ({expected})"


def _of_team(
    team: Team, lengths: Sequence[int], costs: StepCosts, pipeline: Pipeline
) -> Iterator[str]:
    if team.schedule.num_stages != pipeline.num_stages:
        yield f"stages ({team.schedule.num_stages}) must be {pipeline.num_stages}"
        return
    of_team = costs_of(team, lengths, costs)
    try:
        report = validate(add_send_recv(team.schedule, costs=of_team))
    except ScheduleError as error:
        yield str(error)
        return
    if not report:
        yield str(report)
        return
    held = max(simulate(team.schedule, of_team).peak_activations)
    if held > pipeline.tokens:
        yield f"tokens that a rank holds ({held:.0f}) must be at most {pipeline.tokens}"
