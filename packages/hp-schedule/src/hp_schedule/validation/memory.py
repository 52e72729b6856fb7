"""The rule that activations fit."""

from collections.abc import Iterator

from hp_schedule.costs import Costs
from hp_schedule.schedule import Schedule
from hp_schedule.simulation.recurrence import peak_memory
from hp_schedule.validation.report import Finding, FindingKind, finding_at

_ROUNDING = 1e-9


def memory_findings(schedule: Schedule, costs: Costs, limit: float) -> Iterator[Finding]:
    """Yield, for each rank that holds too much at once, the first cell at which it does.

    What OFFLOAD moves counts as gone from then on: a rank short of memory waits for the copy.
    """
    num = schedule.num_microbatches
    table = costs.held(schedule.num_stages, num)
    for rank, row in enumerate(schedule.steps):
        codes = row.codes()
        if peak_memory(codes, table, num) <= limit * (1 + _ROUNDING):
            continue
        below, above = 0, len(codes)
        while above - below > 1:
            middle = (below + above) // 2
            fits = peak_memory(codes[:middle], table, num) <= limit * (1 + _ROUNDING)
            below, above = (middle, above) if fits else (below, middle)
        peak = peak_memory(codes[:above], table, num)
        text = f"activations ({peak:g}) must be <= memory_limit ({limit:g})"
        yield finding_at(FindingKind.MEMORY, text, rank, above - 1)
