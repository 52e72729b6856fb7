"""The forward pass alone: evaluation and inference."""

from hp_schedule.generators.registry import schedule_kind
from hp_schedule.generators.rounds import Rounds, equal_rounds


@schedule_kind(purpose="evaluation", source="here", order=13)
def forward_only(num_ranks: int, *, num_microbatches: int, num_stages_per_rank: int = 1) -> Rounds:
    """Return a schedule without backward steps, in the forward order of `interleaved_1f1b`.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1.
        num_stages_per_rank: Stages on every rank, at least 1; stage s lives on rank s modulo
            num_ranks.

    Raises:
        ValueError: If a count is below 1.
    """
    return Rounds(
        num_ranks,
        num_microbatches,
        num_stages_per_rank,
        rounds=equal_rounds(max(1, num_ranks), num_microbatches),
        warm_ups=None,
    )
