"""What the generators share."""

from collections.abc import Iterable, Sequence

from hp_schedule.packing import BWD, FWD, encode
from hp_schedule.placement import PlacementStyle, generate_stage_to_rank_mapping
from hp_schedule.schedule import Row, Schedule


def forwards(stage: int, microbatches: Iterable[int]) -> list[int]:
    """Return the forward steps of a stage for some microbatches."""
    return [encode(FWD, stage, microbatch) for microbatch in microbatches]


def backwards(stage: int, microbatches: Iterable[int]) -> list[int]:
    """Return the full backward steps of a stage for some microbatches."""
    return [encode(BWD, stage, microbatch) for microbatch in microbatches]


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
    style: PlacementStyle | Sequence[int] = "loop",
) -> Schedule:
    """Return the schedule of packed rows under a placement."""
    steps = tuple(Row(row) for row in rows)
    mapping = generate_stage_to_rank_mapping(len(steps), num_stages, style)
    return Schedule(
        steps=steps,
        stage_to_rank=tuple(mapping[stage] for stage in range(num_stages)),
        num_microbatches=num_microbatches,
    )
