"""Interleaved 1F1B (Narayanan et al. 2021, figure 4) for any number of microbatches."""

from itertools import accumulate, pairwise

from hp_schedule.generators.common import (
    backwards,
    build,
    check_counts,
    forwards,
    warm_up_steady_cool_down,
)
from hp_schedule.schedule import Schedule


def interleaved_1f1b(
    num_ranks: int, *, num_microbatches: int, num_stages_per_rank: int = 2
) -> Schedule:
    """Return the interleaved 1F1B schedule; stage s lives on rank s modulo num_ranks.

    Microbatches go through in rounds: a rank takes a round through its first stage, then through
    its second and so on, before the next round enters. With one stage per rank this is
    `one_f_one_b`.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1: fewer than num_ranks and not divisible by it included.
        num_stages_per_rank: Stages on every rank, at least 1.

    Raises:
        ValueError: If a count is below 1.
    """
    check_counts(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        num_stages_per_rank=num_stages_per_rank,
    )
    rounds = microbatch_rounds(num_ranks, num_microbatches)
    # A backward of the last rank reaches rank r after 2 * (num_ranks - 1 - r) more forwards
    # there; with a single stage per rank half of that is enough (see one_f_one_b).
    stagger = 1 if num_stages_per_rank == 1 else 2
    rows = []
    for rank in range(num_ranks):
        local_stages = range(rank, num_ranks * num_stages_per_rank, num_ranks)
        fwd = [f for part in rounds for stage in local_stages for f in forwards(stage, part)]
        bwd = [
            b for part in rounds for stage in reversed(local_stages) for b in backwards(stage, part)
        ]
        warm_up = (num_stages_per_rank - 1) * len(rounds[0]) + stagger * (num_ranks - 1 - rank)
        rows.append(warm_up_steady_cool_down(fwd, bwd, warm_up=warm_up))
    return build(
        rows,
        num_stages=num_ranks * num_stages_per_rank,
        num_microbatches=num_microbatches,
    )


def microbatch_rounds(num_ranks: int, num_microbatches: int) -> list[range]:
    """Split the microbatches into rounds of at least num_ranks, as equal as possible.

    A round shorter than num_ranks would leave its first rank waiting for the round's own output
    to come round, so a remainder makes earlier rounds longer instead of adding a short one. Fewer
    microbatches than ranks are one round.
    """
    num_rounds = max(1, num_microbatches // num_ranks)
    size, longer = divmod(num_microbatches, num_rounds)
    sizes = [size + (index < longer) for index in range(num_rounds)]
    return [range(start, end) for start, end in pairwise(accumulate(sizes, initial=0))]
