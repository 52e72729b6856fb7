"""GPipe and looped breadth-first: all forwards, then all backwards.

GPipe is figure 2c of Huang et al. 2019; with several stages on a rank it is the breadth-first
schedule of Lamy-Poirier 2023.
"""

from hp_schedule.generators.form import schedule_kind
from hp_schedule.generators.rounds import Rounds


@schedule_kind(
    purpose="few gathers of sharded parameters; holds all microbatches",
    source="Huang et al. 2019, figure 2c",
    order=1,
)
def gpipe(num_ranks: int, *, num_microbatches: int) -> Rounds:
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
    return _all_forwards_first(num_ranks, num_microbatches, 1)


@schedule_kind(
    purpose="GPipe over several stages; messages have a whole round to travel",
    source="Lamy-Poirier 2023",
    order=3,
    with_one_stage="gpipe",
)
def looped_bfs(num_ranks: int, *, num_microbatches: int, num_stages_per_rank: int = 2) -> Rounds:
    """Return the looped breadth-first schedule; stage s lives on rank s modulo num_ranks.

    A rank takes all microbatches through its first stage, then all through its second and so on;
    backwards the same way. Each stage is gathered and reduced once per pass, which suits sharded
    parameters, and messages have a whole round to travel, which suits high latency. It holds the
    activations of all microbatches.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1.
        num_stages_per_rank: Stages on every rank, at least 1; with one it is `gpipe`.

    Raises:
        ValueError: If a count is below 1.
    """
    return _all_forwards_first(num_ranks, num_microbatches, num_stages_per_rank)


def _all_forwards_first(num_ranks: int, num_microbatches: int, num_stages_per_rank: int) -> Rounds:
    return Rounds(
        num_ranks,
        num_microbatches,
        num_stages_per_rank,
        rounds=[range(num_microbatches)],
        warm_ups=[num_microbatches * num_stages_per_rank] * num_ranks,
    )
