"""The stages of a pipeline and the schedules that a config can name, proven before use; no torch.

Schedules with two stages per rank lay them out there and back: rank 0 has the first stage and the
last. So it has in a U-shape, where the other ranks have one.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from hp_schedule import (
    MetaStepType,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    add_send_recv,
    dualpipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    u_shape,
    v_half,
    v_min,
    validate,
    zbv,
    zero_bubble,
)
from hp_train.config import Config, PipelineConfig


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to order forwards and backwards.

    Attributes:
        build: From pipeline ranks, microbatches and stages per rank to compute steps.
        stages_per_rank: The only number that it takes; 0: any.
        returns: Whether the chain of stages comes back to the first rank for one more.
        pairs: As `build`, with a forward and a backward as one step wherever both are side by side;
            None: it has no such places.
    """

    build: Callable[[int, int, int], Schedule]
    stages_per_rank: int = 0
    returns: bool = False
    pairs: Callable[[int, int, int], Schedule] | None = None


KINDS: dict[str, Kind] = {
    "gpipe": Kind(lambda ranks, m, _: gpipe(ranks, num_microbatches=m), 1),
    "1f1b": Kind(lambda ranks, m, _: one_f_one_b(ranks, num_microbatches=m), 1),
    "looped_bfs": Kind(
        lambda ranks, m, v: looped_bfs(ranks, num_microbatches=m, num_stages_per_rank=v)
    ),
    "interleaved_1f1b": Kind(
        lambda ranks, m, v: interleaved_1f1b(ranks, num_microbatches=m, num_stages_per_rank=v),
        pairs=lambda ranks, m, v: interleaved_1f1b(
            ranks, num_microbatches=m, num_stages_per_rank=v, overlap_b_f=True
        ),
    ),
    "zero_bubble": Kind(lambda ranks, m, _: zero_bubble(ranks, num_microbatches=m), 1),
    "interleaved_zero_bubble": Kind(
        lambda ranks, m, v: interleaved_zero_bubble(
            ranks, num_microbatches=m, num_stages_per_rank=v
        )
    ),
    "zbv": Kind(lambda ranks, m, _: zbv(ranks, num_microbatches=m), 2),
    "v_half": Kind(lambda ranks, m, _: v_half(ranks, num_microbatches=m), 2),
    "v_min": Kind(lambda ranks, m, _: v_min(ranks, num_microbatches=m), 2),
    "dualpipe_v": Kind(
        lambda ranks, m, _: dualpipe_v(ranks, num_microbatches=m, overlap_f_b=False),
        2,
        pairs=lambda ranks, m, _: dualpipe_v(ranks, num_microbatches=m, overlap_f_b=True),
    ),
    "u_shape": Kind(lambda ranks, m, _: u_shape(ranks, num_microbatches=m), 1, returns=True),
}
"""By the name that `pipeline.schedule` gives."""


def count_stages(config: Config) -> int:
    """Stages of the whole pipeline."""
    pipeline = config.pipeline
    return config.mesh.pp * pipeline.stages_per_rank + KINDS[pipeline.schedule].returns


def count_microbatches(config: Config) -> int:
    """Microbatches of a step on each rank."""
    mesh, train = config.mesh, config.train
    return train.global_batch_size // (mesh.dp_replicate * mesh.dp_shard * train.microbatch_size)


@cache
def placement(config: PipelineConfig, *, num_ranks: int) -> tuple[int, ...]:
    """The pipeline rank of each stage, which does not depend on the number of microbatches."""
    return KINDS[config.schedule].build(num_ranks, 1, config.stages_per_rank).stage_to_rank


def split_layers(num_layers: int, num_stages: int) -> list[range]:
    """Layers of each stage: as even as can be, the longer runs first.

    Raises:
        ValueError: When there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ValueError(f"num_layers ({num_layers}) must be at least num_stages ({num_stages})")
    short, longer = divmod(num_layers, num_stages)
    bounds = [stage * short + min(stage, longer) for stage in range(num_stages + 1)]
    return [range(low, high) for low, high in itertools.pairwise(bounds)]


def training_schedule(
    config: PipelineConfig, *, num_ranks: int, num_microbatches: int, sharded: bool = False
) -> Schedule:
    """The configured schedule with its communication.

    Args:
        config: Of the pipeline.
        num_ranks: Pipeline ranks.
        num_microbatches: Of a step.
        sharded: Whether parameters are gathered before they are used, and gradients reduced.

    Raises:
        hp_schedule.ScheduleError: When the schedule would not complete.
    """
    kind = KINDS[config.schedule]
    build = kind.pairs if config.overlap and kind.pairs else kind.build
    schedule = add_send_recv(build(num_ranks, num_microbatches, config.stages_per_rank))
    if sharded:
        schedule = add_fsdp_unshard_reshard(add_fsdp_reduce_grad(schedule))
    validate(schedule).raise_if_failed()
    return schedule


def splits_backward(schedule: Schedule) -> bool:
    """Whether some weight gradients are computed later than the gradients of inputs."""
    steps = (step for row in schedule.steps for step in row)
    return any(step is not None and step.type is MetaStepType.BWD_WEIGHT for step in steps)
