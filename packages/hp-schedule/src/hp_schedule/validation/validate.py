"""The entry point of the checks."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from hp_schedule.costs import Costs
from hp_schedule.schedule import Schedule
from hp_schedule.simulation.channels import ChannelModel, check_model
from hp_schedule.validation.deadlocks import (
    message_mismatch,
    order_deadlock,
    queue_deadlock,
    rendezvous,
    rendezvous_deadlock,
)
from hp_schedule.validation.report import MAX_FINDINGS, Finding, Lacking, ValidationReport
from hp_schedule.validation.rows import (
    RowCheck,
    ShardingCheck,
    gathered_stages,
    memory_findings,
    reduced_stages,
)


def validate(
    schedule: Schedule,
    *,
    forward_only: bool | None = None,
    communication: bool | None = None,
    channels: ChannelModel | None = None,
    max_active_stages: int | None = None,
    memory_limit: float | None = None,
    costs: Costs | None = None,
) -> ValidationReport:
    """Prove that a schedule can run and does every step once, or find why not.

    Checked are: each step on the rank of its stage; each forward and each backward (whole, or
    split in two) exactly once; no step before what it needs on its own rank, both halves of an
    overlap at its start; every value that another rank needs sent once and received once, in the
    same order on each directed edge; parameters gathered before and freed after the compute steps
    they serve, gradients reduced once and last; each RECOMPUTE once, between the forward that it
    repeats and the backward; each OFFLOAD once, with a RELOAD between it and the backward;
    activations within memory; and that the rows run to their end. Linear in the number of steps.

    Which stages are sharded the schedule says itself (`Schedule.gathered_stages`,
    `reduced_stages`). Where it does not, a stage without UNSHARD or REDUCE_GRAD is an error if
    another one has such steps. What is absent altogether is reported as lacking, unless an
    argument asks for it.

    Args:
        schedule: Schedule to validate.
        forward_only: Whether there must be no backward at all; default: whether there is none, and
            then backwards are lacking.
        communication: Whether messages must be there; default: whether there are any, and if not
            they are lacking. Without, the order of the compute steps is checked as if values were
            everywhere at once.
        channels: The machine on which messages must not deadlock: one that has a communicator for
            each directed edge, for each pair of ranks, or one for all, and on which sends and
            receives hold up nobody. Default: every machine, even one on which each send and each
            receive holds up its rank until the other side is there. Then the order in which
            a rank launches messages, collectives of sharded parameters and collectives inside
            compute steps has no cycle over the ranks either.
        max_active_stages: Most stages whose parameters a rank may hold gathered; default: any.
        memory_limit: Most memory that the activations of a rank may take; default: any.
        costs: Costs, of which `activation`, `kept_input` and `offloaded` are read; default: a
            microbatch takes 1 on a rank, shared by its stages.

    Raises:
        TypeError: If it is no `Schedule`.
        ValueError: If `channels` is unknown, or the costs do not fit the schedule.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"schedule ({type(schedule).__name__}) must be a Schedule; of lists of steps: "
            "Schedule.from_steps(lists, stage_to_rank=..., num_microbatches=...)"
        )
    if channels is not None:
        check_model(channels)
    lacking = tuple(_lacking(schedule, forward_only, communication))
    forward_only = schedule.is_forward_only if forward_only is None else forward_only
    communication = schedule.has_communication if communication is None else communication
    found: Iterator[Finding] = chain(
        RowCheck(schedule, forward_only=forward_only, communication=communication).findings(),
        ShardingCheck(
            schedule, forward_only=forward_only, max_active_stages=max_active_stages
        ).findings(),
    )
    if memory_limit is not None:
        costs = costs or Costs(activation=schedule.num_ranks / schedule.num_stages)
        found = chain(found, memory_findings(schedule, costs, memory_limit))
    findings = tuple(islice(found, MAX_FINDINGS))
    if not findings:
        finding = _deadlock(schedule, channels) if communication else order_deadlock(schedule)
        findings = () if finding is None else (finding,)
    return ValidationReport(schedule, findings, lacking)


def validate_pipeline_execution(
    schedule: Schedule, *upstream: object, **options: Any
) -> ValidationReport:
    """Validate a schedule under the name that this has upstream; see `validate`.

    Args:
        schedule: Schedule to validate.
        upstream: No arguments; a schedule knows its number of chunks and its placement.
        options: See `validate`.

    Raises:
        TypeError: If upstream's further arguments are given, or it is no `Schedule`.
        ValueError: See `validate`.
    """
    if upstream:
        raise TypeError(
            f"validate_pipeline_execution (1 + {len(upstream)} arguments) must have 1, a Schedule, "
            "which has chunk_num and com_type in stage_to_rank: "
            "generate_stage_to_rank_mapping(num_ranks, num_stages, style)"
        )
    return validate(schedule, **options)


def _lacking(
    schedule: Schedule, forward_only: bool | None, communication: bool | None
) -> Iterator[Lacking]:
    """Yield the parts that are absent altogether and that the caller has not asked about."""
    if forward_only is None and schedule.is_forward_only:
        yield Lacking.BACKWARD
    if communication is None and schedule.edges and not schedule.has_communication:
        yield Lacking.COMMUNICATION
    trains = not (schedule.is_forward_only if forward_only is None else forward_only)
    if trains and gathered_stages(schedule) - reduced_stages(schedule):
        yield Lacking.REDUCE_GRAD


def _deadlock(schedule: Schedule, channels: ChannelModel | None) -> Finding | None:
    waiting = rendezvous(schedule)
    if not waiting:
        return None
    mismatch = message_mismatch(schedule)
    if mismatch is not None or channels is None:
        return mismatch or rendezvous_deadlock(schedule, waiting)
    return queue_deadlock(schedule, channels)
