"""What the generators share."""

from collections.abc import Iterable, Sequence
from itertools import chain

from hp_schedule.packing import BWD, FWD, encode
from hp_schedule.placement import PlacementStyle, generate_stage_to_rank_mapping
from hp_schedule.schedule import Row, Schedule


def forwards(stage: int, microbatches: Iterable[int]) -> list[int]:
    """Return the forward steps of a stage for some microbatches."""
    return [encode(FWD, stage, microbatch) for microbatch in microbatches]


def backwards(stage: int, microbatches: Iterable[int]) -> list[int]:
    """Return the full backward steps of a stage for some microbatches."""
    return [encode(BWD, stage, microbatch) for microbatch in microbatches]


def warm_up_steady_cool_down(fwd: Sequence[int], bwd: Sequence[int], *, warm_up: int) -> list[int]:
    """Return one rank's 1F1B order.

    Args:
        fwd: Forward steps in their order.
        bwd: Backward steps in their order, as many.
        warm_up: Forwards ahead of the first forward-backward pair; all of them if there are fewer.
    """
    warm_up = min(warm_up, len(fwd))
    steady = len(fwd) - warm_up
    pairs = zip(fwd[warm_up:], bwd[:steady], strict=True)
    return [*fwd[:warm_up], *chain.from_iterable(pairs), *bwd[steady:]]


def check_counts(*, num_ranks: int, num_microbatches: int, num_stages_per_rank: int = 1) -> None:
    """Raise ValueError unless every count is at least 1."""
    counts = {
        "num_ranks": num_ranks,
        "num_microbatches": num_microbatches,
        "num_stages_per_rank": num_stages_per_rank,
    }
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} ({value}) must be >= 1")


def build(
    rows: Iterable[Iterable[int]],
    *,
    num_stages: int,
    num_microbatches: int,
    style: PlacementStyle = "loop",
) -> Schedule:
    """Return the schedule of packed rows under a standard placement."""
    steps = tuple(Row(row) for row in rows)
    mapping = generate_stage_to_rank_mapping(len(steps), num_stages, style)
    return Schedule(
        steps=steps,
        stage_to_rank=tuple(mapping[stage] for stage in range(num_stages)),
        num_microbatches=num_microbatches,
    )
