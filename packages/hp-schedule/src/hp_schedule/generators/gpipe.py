"""GPipe: all forwards, then all backwards (Huang et al. 2019, figure 2c)."""

from hp_schedule.generators.common import backwards, build, check_counts, forwards
from hp_schedule.schedule import Schedule


def gpipe(num_ranks: int, *, num_microbatches: int) -> Schedule:
    """Return the GPipe schedule, one stage per rank.

    Backwards run in ascending microbatch order, as the forwards do, so that weight gradients
    accumulate in the order one process would use. Every rank holds the activations of all
    microbatches at once; `one_f_one_b` takes the same time with fewer.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1.

    Raises:
        ValueError: If a count is below 1.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    microbatches = range(num_microbatches)
    rows = [
        [*forwards(rank, microbatches), *backwards(rank, microbatches)] for rank in range(num_ranks)
    ]
    return build(rows, num_stages=num_ranks, num_microbatches=num_microbatches)
