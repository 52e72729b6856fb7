"""Zero bubble on a loop: the backward is split, and weight gradients fill the gaps.

Qi et al. 2023 (ZB-H1 and ZB-H2, figures 2 and 3) for one stage per rank; with several it is what
torch calls InterleavedZeroBubble, with rounds that keep to the memory of 1F1B for any number of
microbatches. Smaller rounds give the generalized interleaving of Wan et al. 2025 (PipeOffload).
"""

from typing import Literal

from hp_schedule.generators.form import check_counts, schedule_kind
from hp_schedule.generators.rounds import Rounds, equal_rounds, short_rounds

MaxInFlight = Literal["1p", "1.5p", "2p"]
_SHARES = {"1p": 2, "1.5p": 3, "2p": 4}


@schedule_kind(
    purpose="weight gradients in the gaps; `max_in_flight` buys tolerance of latency",
    source="Qi et al. 2023, figures 2 and 3 (ZB-H1 and ZB-H2)",
    order=5,
    more_variants=lambda _: {
        " 1.5p": {"max_in_flight": "1.5p"},
        " 2p": {"max_in_flight": "2p"},
    },
)
def zero_bubble(
    num_ranks: int, *, num_microbatches: int, max_in_flight: MaxInFlight | int = "1p"
) -> Rounds:
    """Return the zero-bubble 1F1B schedule, one stage per rank.

    Rank r runs up to 2 * (num_ranks - r) - 1 forwards before its first backward, as many as a
    message needs to go to the last rank and back, if they fit its memory. Weight gradients are put
    off as long as the memory lasts.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1.
        max_in_flight: Activations a rank may hold: ``1p`` are num_ranks, as 1F1B holds; more do
            not help without latency, but make the schedule tolerant of it. At least num_ranks.

    Raises:
        ValueError: If a count is below 1, or max_in_flight is too small or unknown.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    limit = _limit(num_ranks, max_in_flight)
    # Where all microbatches fit, memory restricts nothing.
    room = limit if num_microbatches > limit else max(limit, 2 * num_ranks)
    # The last rank ends first, so r weight gradients left on rank r keep nobody waiting. More are
    # put off, for messages to hide behind, as far as there are microbatches to fill the time.
    put_off = max(num_ranks, min(num_microbatches, limit))
    warm_ups, delays = [], []
    for rank in range(num_ranks):
        there_and_back = 2 * (num_ranks - 1 - rank)
        warm_ups.append(min(there_and_back, room - 1 - rank))
        delays.append(min(max(rank, put_off - 1 - there_and_back), room - 1 - warm_ups[-1]))
    return Rounds(
        num_ranks,
        num_microbatches,
        rounds=[range(num_microbatches)],
        warm_ups=warm_ups,
        delays=delays,
    )


def _limit(num_ranks: int, max_in_flight: MaxInFlight | int) -> int:
    if isinstance(max_in_flight, int):
        if max_in_flight < num_ranks:
            raise ValueError(f"max_in_flight ({max_in_flight}) must be >= num_ranks ({num_ranks})")
        return max_in_flight
    if max_in_flight not in _SHARES:
        names = ", ".join(_SHARES)
        raise ValueError(f"max_in_flight ({max_in_flight}) must be a number or one of {names}")
    return max(1, num_ranks * _SHARES[max_in_flight] // 2)


@schedule_kind(
    purpose="a shorter ramp and weight gradients in the gaps",
    source="Qi et al. 2023; torch's InterleavedZeroBubble",
    order=6,
)
def interleaved_zero_bubble(
    num_ranks: int, *, num_microbatches: int, num_stages_per_rank: int = 2
) -> Rounds:
    """Return the interleaved zero-bubble schedule; stage s lives on rank s modulo num_ranks.

    It holds no more activations than 1F1B. A remainder of microbatches is a short round at the end,
    of at least half of num_ranks, whose gaps the weight gradients of the rounds before fill. Longer
    rounds instead, as `grouped_interleaved` has with groups of num_ranks, can be quicker but hold
    more.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1.
        num_stages_per_rank: Stages on every rank, at least 1; with one it is `zero_bubble`, but
            that few microbatches may run in another order.

    Raises:
        ValueError: If a count is below 1.
    """
    rounds = short_rounds(max(1, num_ranks), num_microbatches)
    return _split_form(num_ranks, num_microbatches, num_stages_per_rank, rounds)


@schedule_kind(
    purpose="that in less memory; `group_size` buys time for messages",
    source="Wan et al. 2025 (PipeOffload)",
    order=7,
    more_variants=lambda num_ranks: {", rounds of all ranks": {"group_size": num_ranks}},
)
def grouped_interleaved(
    num_ranks: int,
    *,
    num_microbatches: int,
    num_stages_per_rank: int = 2,
    group_size: int | None = None,
) -> Rounds:
    """Return the interleaved zero-bubble schedule with rounds of another size.

    A round of g microbatches on P ranks with V stages each holds at most
    g + (P + P - g) / V activations in units of a rank's share of the model. Small groups save
    memory down to half of 1F1B's for many stages, large ones leave messages more time.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1.
        num_stages_per_rank: Stages on every rank, at least 1.
        group_size: Microbatches of a round, at least half of num_ranks. A remainder makes earlier
            rounds longer. Default: half of num_ranks, rounded up.

    Raises:
        ValueError: If a count is below 1, or the group is too small.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    half = (num_ranks + 1) // 2
    size = half if group_size is None else group_size
    if size < half:
        raise ValueError(
            f"group_size ({size}) must be >= half of num_ranks ({num_ranks}), so that a round is "
            "under way until its first microbatch comes back"
        )
    rounds = equal_rounds(size, num_microbatches)
    return _split_form(num_ranks, num_microbatches, num_stages_per_rank, rounds)


def _split_form(
    num_ranks: int, num_microbatches: int, num_stages_per_rank: int, rounds: list[range]
) -> Rounds:
    first = len(rounds[0]) if rounds else 0
    return Rounds(
        num_ranks,
        num_microbatches,
        num_stages_per_rank,
        rounds=rounds,
        warm_ups=[
            (num_stages_per_rank - 1) * first + num_ranks - 1 - rank for rank in range(num_ranks)
        ],
        delays=range(num_ranks),
    )
