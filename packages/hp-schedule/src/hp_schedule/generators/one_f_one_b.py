"""Schedules of whole backwards in rounds: GPipe and 1F1B, plain and over several stages per rank.

GPipe is figure 2c of Huang et al. 2019, and with several stages on a rank the breadth-first
schedule of Lamy-Poirier 2023. 1F1B and interleaved 1F1B are figures 3 and 4 of Narayanan et al.
2021.
"""

from hp_schedule.generators.form import ClosedForm, GivenRows, schedule_kind
from hp_schedule.generators.rounds import Rounds, equal_rounds
from hp_schedule.passes.overlap import pair_overlap


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


@schedule_kind(
    purpose="a shorter ramp; `overlap_b_f` pairs backwards with forwards",
    source="Narayanan et al. 2021, figure 4",
    order=4,
    pairs="overlap_b_f",
    with_one_stage="1f1b",
)
def interleaved_1f1b(
    num_ranks: int,
    *,
    num_microbatches: int,
    num_stages_per_rank: int = 2,
    overlap_b_f: bool = False,
) -> ClosedForm:
    """Return the interleaved 1F1B schedule; stage s lives on rank s modulo num_ranks.

    Microbatches go through in rounds: a rank takes a round through its first stage, then through
    its second and so on, before the next round enters. A round shorter than the pipeline would
    leave its first rank waiting for the round's own output to come round, so a remainder makes
    earlier rounds longer instead of adding a short one. With one stage per rank this is
    `one_f_one_b`.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1: fewer than num_ranks and not divisible by it included.
        num_stages_per_rank: Stages on every rank, at least 1.
        overlap_b_f: Whether each backward is paired with the forward after it; see `pair_overlap`.

    Raises:
        ValueError: If a count is below 1.
    """
    rounds = equal_rounds(max(1, num_ranks), num_microbatches)
    # A backward of the last rank reaches rank r after 2 * (num_ranks - 1 - r) more forwards
    # there; with a single stage per rank half of that is enough (see one_f_one_b).
    step = 1 if num_stages_per_rank == 1 else 2
    form = Rounds(
        num_ranks,
        num_microbatches,
        num_stages_per_rank,
        rounds=rounds,
        warm_ups=[
            (num_stages_per_rank - 1) * len(rounds[0]) + step * (num_ranks - 1 - rank)
            for rank in range(num_ranks)
        ],
    )
    if not overlap_b_f:
        return form
    rows = [row.codes() for row in pair_overlap(form.schedule(), order="b_f").steps]
    return GivenRows(num_ranks, num_microbatches, num_stages_per_rank, rows=rows)


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
