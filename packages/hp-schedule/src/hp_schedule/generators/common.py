"""What the generators share."""

from collections.abc import Iterable

from hp_schedule.packing import BWD, FWD, MICROBATCH_MASK, encode


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
