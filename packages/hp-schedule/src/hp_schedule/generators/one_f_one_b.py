"""1F1B (PipeDream-Flush; Narayanan et al. 2021, figure 3)."""

from hp_schedule.generators.common import (
    backwards,
    build,
    check_counts,
    forwards,
    warm_up_steady_cool_down,
)
from hp_schedule.schedule import Schedule


def one_f_one_b(num_ranks: int, *, num_microbatches: int) -> Schedule:
    """Return the 1F1B schedule, one stage per rank.

    Each rank runs as many forwards as there are ranks after it, then one forward and one backward
    in turn, then the backwards that are left; rank r holds at most num_ranks - r activations.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1, fewer than num_ranks included.

    Raises:
        ValueError: If a count is below 1.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    microbatches = range(num_microbatches)
    rows = [
        warm_up_steady_cool_down(
            forwards(rank, microbatches),
            backwards(rank, microbatches),
            warm_up=num_ranks - 1 - rank,
        )
        for rank in range(num_ranks)
    ]
    return build(rows, num_stages=num_ranks, num_microbatches=num_microbatches)
