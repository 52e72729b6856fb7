"""The stages of a pipeline and the schedules that a config can name, proven before use; no torch.

Schedules with two stages per rank lay them out there and back: rank 0 has the first stage and the
last. So it has in a U-shape, where the other ranks have one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Final

from hp_schedule import (
    SCHEDULES,
    Costs,
    MetaStepType,
    Schedule,
    ScheduleError,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_send_recv,
    fit_memory,
    validate,
)
from hp_trainer.layout.ranks import Layout

if TYPE_CHECKING:
    from hp_trainer.config import Config, PipelineConfig

KINDS: Final = {
    kind.name: kind
    for kind in SCHEDULES.values()
    if kind.trains and "group_size" not in kind.options
}
"""By the name that `pipeline.schedule` gives: of those that train, all but what is chosen for a
size that configs have no key for."""


def count_stages(config: Config) -> int:
    """Return the number of stages of the whole pipeline."""
    pipeline = config.pipeline
    return config.mesh.pp * pipeline.stages_per_rank + KINDS[pipeline.schedule].returns


def has_even_edges(config: Config) -> bool:
    """Say if each rank sends to one rank of the next stage, without hp-vtp's plans and threads."""
    return Layout.of(config.mesh).is_even and not KINDS[config.pipeline.schedule].returns


def splits_backward(config: Config) -> bool:
    """Say if some schedule of a run may compute weight gradients later than input gradients."""
    if config.data.packing == "planned":
        # One rank waits for nobody; by block, parameters are gone by then.
        return config.mesh.pp > 1 and config.mesh.gather != "block"
    return KINDS[config.pipeline.schedule].splits_backward or config.pipeline.overlap


def planned_tokens(config: Config) -> int:
    """Return the number of tokens whose activations a rank may hold at once in a planned step.

    As many as under 1F1B, unless the config says how many; a multiple of what a microbatch's are.
    """
    mesh, data = config.mesh, config.data
    usual = mesh.pp * config.train.microbatch_size * data.seq_len // mesh.cp
    return (data.plan_tokens or usual) // mesh.tp * mesh.tp


def count_microbatches(config: Config) -> int:
    """Return the number of microbatches of a step on each rank."""
    return config.train.global_batch_size // config.batch_unit


@cache
def placement(config: PipelineConfig, *, num_ranks: int) -> tuple[int, ...]:
    """Return the pipeline rank of each stage, the same for any number of microbatches."""
    return KINDS[config.schedule].build(num_ranks, 1, config.stages_per_rank).stage_to_rank


def layers_of_stages(config: Config, num_stages: int | None = None) -> list[range]:
    """Return the layers of each stage of a config's pipeline, or of another number of stages."""
    num_stages = count_stages(config) if num_stages is None else num_stages
    return split_layers(config.model.num_layers, num_stages, config.pipeline.stage_layers)


def split_layers(num_layers: int, num_stages: int, sizes: Sequence[int] = ()) -> list[range]:
    """Return the layers of each stage: as even as can be, the longer runs first.

    Args:
        num_layers: Layers of the model.
        num_stages: Number of stages.
        sizes: Layers of each stage in place of even ones; empty: even ones.

    Raises:
        ValueError: When there are fewer layers than stages, or sizes are not so many or do not sum
            to the layers.
    """
    if num_layers < num_stages:
        raise ValueError(f"num_layers ({num_layers}) must be at least num_stages ({num_stages})")
    if sizes and (len(sizes) != num_stages or sum(sizes) != num_layers):
        raise ValueError(
            f"sizes ({tuple(sizes)}) must be one for each of num_stages ({num_stages}), which sum "
            f"to num_layers ({num_layers})"
        )
    short, longer = divmod(num_layers, num_stages)
    even = [short + (stage < longer) for stage in range(num_stages)]
    bounds = itertools.accumulate(sizes or even, initial=0)
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


@lru_cache(maxsize=256)  # rules, plans and runs ask for the same
def compute_schedule(
    config: PipelineConfig, *, num_ranks: int, num_microbatches: int, paired: bool | None = None
) -> Schedule | None:
    """Return the compute steps of the configured schedule, and what microbatches keep meanwhile.

    Args:
        config: Configuration of the pipeline.
        num_ranks: Number of pipeline ranks.
        num_microbatches: Number of microbatches in a step.
        paired: Whether backwards and forwards are pairs; None: as configured.

    Returns:
        None if a rank cannot keep as few microbatches as configured.
    """
    schedule = KINDS[config.schedule].build(
        num_ranks,
        num_microbatches,
        config.stages_per_rank,
        paired=config.overlap if paired is None else paired,
    )
    if config.retention == "keep":
        return schedule
    # By the rows alone: a rank that is short of memory waits for its copies.
    costs = Costs(activation=1 / config.stages_per_rank)
    fit = fit_memory(schedule, costs, config.keep_microbatches, ways=(config.retention,))
    return None if fit is None else fit.schedule


def training_schedule(
    config: PipelineConfig,
    *,
    num_ranks: int,
    num_microbatches: int,
    sharded: bool = False,
    compute: Schedule | None = None,
    is_split: bool | None = None,
) -> Schedule:
    """Return the configured schedule, or another one for the same stages, with its communication.

    Args:
        config: Configuration of the pipeline.
        num_ranks: Number of pipeline ranks.
        num_microbatches: Number of microbatches in a step.
        sharded: Whether parameters are gathered before they are used, and gradients reduced.
        compute: Compute steps to take in place of the configured schedule's, in any order of the
            microbatches; a search finds such.
        is_split: Whether these may split backwards; None: as the configured schedule does.

    Raises:
        ValueError: When those steps are of other stages or another number of microbatches, or
            split backwards where they may not.
        hp_schedule.ScheduleError: When the schedule would not complete.
    """
    if compute is not None:
        configured = KINDS[config.schedule].splits_backward or config.overlap
        _check_stages(compute, config, num_ranks=num_ranks, num_microbatches=num_microbatches)
        if not (configured if is_split is None else is_split):
            _require_whole(compute, config)
    else:
        compute = compute_schedule(config, num_ranks=num_ranks, num_microbatches=num_microbatches)
    if compute is None:
        raise ScheduleError(
            f"pipeline.keep_microbatches ({config.keep_microbatches}) is too small for "
            f"pipeline.retention ({config.retention})"
        )
    schedule = add_send_recv(compute)
    if sharded:
        schedule = add_fsdp_unshard_reshard(add_fsdp_reduce_grad(schedule))
    validate(schedule).raise_if_failed()
    return schedule


def _check_stages(
    compute: Schedule, config: PipelineConfig, *, num_ranks: int, num_microbatches: int
) -> None:
    """Refuse steps that the stages of a configured schedule cannot take."""
    configured = placement(config, num_ranks=num_ranks)
    if compute.stage_to_rank != configured:
        raise ValueError(
            f"stage_to_rank ({compute.stage_to_rank}) must be that of pipeline.schedule "
            f"({config.schedule}), {configured}"
        )
    if compute.num_microbatches != num_microbatches:
        raise ValueError(
            f"num_microbatches ({compute.num_microbatches}) must equal those of a step "
            f"({num_microbatches})"
        )


def _require_whole(compute: Schedule, config: PipelineConfig) -> None:
    """Refuse steps that split backwards."""
    kinds = (step.type for row in compute.steps for step in row if step is not None)
    if MetaStepType.BWD_WEIGHT in kinds:
        raise ValueError(
            f"pipeline.schedule ({config.schedule}) must compute weight gradients apart, as the "
            "steps do"
        )
