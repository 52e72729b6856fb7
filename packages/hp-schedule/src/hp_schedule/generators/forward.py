"""The forward pass alone: evaluation and inference."""

from hp_schedule.generators.common import build, check_counts, forwards
from hp_schedule.generators.interleaved import microbatch_rounds
from hp_schedule.schedule import Schedule


def forward_only(
    num_ranks: int, *, num_microbatches: int, num_stages_per_rank: int = 1
) -> Schedule:
    """Return a schedule without backward steps, in the forward order of `interleaved_1f1b`.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1.
        num_stages_per_rank: Stages on every rank, at least 1; stage s lives on rank s modulo
            num_ranks.

    Raises:
        ValueError: If a count is below 1.
    """
    check_counts(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_stages_per_rank=num_stages_per_rank,
    )
    num_stages = num_ranks * num_stages_per_rank
    rows = [
        [
            step
            for part in microbatch_rounds(num_ranks, num_microbatches)
            for stage in range(rank, num_stages, num_ranks)
            for step in forwards(stage, part)
        ]
        for rank in range(num_ranks)
    ]
    return build(rows, num_stages=num_stages, num_microbatches=num_microbatches)
