"""Schedules over the units of a layout. Needs no torch.

A *unit* is one replica of one stage: to a schedule it is one rank.
"""

from collections.abc import Iterable
from dataclasses import replace

from hp_schedule import MetaStep, Schedule
from hp_vtp.topology import PipelineLayout


def units_of(layout: PipelineLayout) -> tuple[tuple[int, int], ...]:
    """Return the ranks of a schedule over a layout: (physical stage, replica), stage by stage."""
    return tuple(
        (stage, replica)
        for stage, part in enumerate(layout.stages)
        for replica in range(len(part.replicas))
    )


def pipeline_rank(layout: PipelineLayout, rank: int) -> int:
    """Return the row of a schedule that a global rank runs.

    Raises:
        ValueError: If no stage has the rank.
    """
    return units_of(layout).index((layout.stage_of(rank), layout.replica_of(rank)))


def multiplex(schedule: Schedule, layout: PipelineLayout) -> Schedule:
    """Spread the microbatches of a schedule over the domains of a layout, in turn.

    Microbatch i becomes microbatch i // D of domain i % D. A stage with fewer replicas than there
    are domains runs the steps of all of its domains, the others a share of them. As every row
    becomes a part of the row before, a schedule that was free of deadlock stays so.

    Args:
        schedule: Schedule with one chain and a row for each physical stage; with messages or not.
        layout: Layout with the same chain as the schedule.

    Returns:
        A schedule with a chain of stages per domain: logical stage l of domain d is stage
        d * num_stages + l. The same schedule if there is one domain.

    Raises:
        ValueError: If the schedule has another chain, or its microbatches do not divide by the
            domains.
    """
    if schedule.stage_to_rank != layout.chain:
        raise ValueError(
            f"stage_to_rank ({schedule.stage_to_rank}) of the schedule must equal the chain "
            f"({layout.chain})"
        )
    domains, stages = layout.num_domains, layout.num_stages
    if domains == 1:
        return schedule
    if schedule.num_microbatches % domains:
        raise ValueError(
            f"num_domains ({domains}) must divide num_microbatches ({schedule.num_microbatches})"
        )
    units = units_of(layout)
    rows = []
    for stage, replica in units:
        replicas = len(layout.stages[stage].replicas)
        served = set(range(replica, domains, replicas))
        rows.append(_served(schedule.steps[stage], served, domains, stages))
    return Schedule.from_steps(
        rows,
        stage_to_rank=[
            units.index((stage, d % len(layout.stages[stage].replicas)))
            for d in range(domains)
            for stage in layout.chain
        ],
        num_microbatches=schedule.num_microbatches // domains,
        chains=[range(d * stages, (d + 1) * stages) for d in range(domains)],
    )


def _served(
    row: Iterable[MetaStep | None], domains: set[int], num_domains: int, num_stages: int
) -> list[MetaStep]:
    """Return the steps of a row that belong to some domains."""
    kept: list[MetaStep] = []
    for step in row:
        parts = []
        for leaf in step.leaves() if step else ():
            domain = (leaf.microbatch_index or 0) % num_domains
            if domain in domains:
                stage = domain * num_stages + (leaf.stage_index or 0)
                index = (leaf.microbatch_index or 0) // num_domains
                parts.append(replace(leaf, stage_index=stage, microbatch_index=index))
        if step is not None and len(parts) == 2:
            kept.append(replace(step, sub_steps=tuple(parts)))
        else:
            kept += parts
    return kept
