"""1F1B (PipeDream-Flush; Narayanan et al. 2021, figure 3)."""

from hp_schedule.generators.registry import schedule_kind
from hp_schedule.generators.rounds import Rounds


@schedule_kind(
    name="1f1b",
    purpose="the least messages",
    source="Narayanan et al. 2021, figure 3 (PipeDream-Flush)",
    order=2,
)
def one_f_one_b(num_ranks: int, *, num_microbatches: int) -> Rounds:
    """Return the 1F1B schedule, one stage per rank.

    Each rank runs as many forwards as there are ranks after it, then one forward and one backward
    in turn, then the backwards that are left; rank r holds at most num_ranks - r activations.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1, fewer than num_ranks included.

    Raises:
        ValueError: If a count is below 1.
    """
    return Rounds(
        num_ranks,
        num_microbatches,
        rounds=[range(num_microbatches)],
        warm_ups=range(num_ranks - 1, -1, -1),
    )
