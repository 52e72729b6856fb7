"""U-shaped pipelines: the first rank has the first stage and the last.

The owner of the data keeps inputs, labels and both ends of the model; the ranks between hold the
middle. With one stage more than ranks, the chain 0, 1, .., P - 1, 0 is a ring.
"""

from itertools import chain, zip_longest

from hp_schedule.generators.form import GivenRows, backwards, check_counts, forwards, schedule_kind


@schedule_kind(
    purpose="encoder and head on one rank",
    source="MindSpeed-MM",
    order=12,
)
def u_shape(
    num_ranks: int,
    *,
    num_microbatches: int,
    warm_up: int | None = None,
    turns: int | None = None,
    extra: int = 0,
) -> GivenRows:
    """Return a 1F1B schedule of num_ranks + 1 stages, the first and the last of them on rank 0.

    Rank 0 runs `warm_up` forwards of its first stage; then `turns` times forward and backward of
    its last stage; then, in turn, a forward of the first, forward and backward of the last and a
    backward of the first. The other ranks run 1F1B, rank r with num_ranks - r + extra forwards
    before the first pair of a forward and a backward. The defaults are MindSpeed-MM's; more of each
    hide more latency between rank 0 and its neighbours and hold more activations.

    Args:
        num_ranks: Ranks of the pipeline, at least 1.
        num_microbatches: Any number from 1.
        warm_up: Number of forwards of its first stage that rank 0 runs first, at least 1; default
            num_ranks + 1.
        turns: Number of pairs of a forward and a backward that rank 0 runs in its last stage after
            that, 0 to warm_up; default (4 * num_ranks + 5) // 6, or warm_up if that is less.
        extra: Number of forwards, beyond those of 1F1B, that each other rank runs before its first
            pair of a forward and a backward; at least 0.

    Raises:
        DeadlockError: If the numbers contradict each other: ranks may wait for more microbatches
            than rank 0 has begun.
        ValueError: If a number is out of its range.
    """
    check_counts(num_ranks=num_ranks, num_microbatches=num_microbatches)
    warm_up = num_ranks + 1 if warm_up is None else warm_up
    turns = min(warm_up, (4 * num_ranks + 5) // 6) if turns is None else turns
    check_counts(warm_up=warm_up)
    if not 0 <= turns <= warm_up:
        raise ValueError(f"turns ({turns}) must be >= 0 and <= warm_up ({warm_up})")
    if extra < 0:
        raise ValueError(f"extra ({extra}) must be >= 0")
    first = _first_row(num_ranks, num_microbatches, warm_up, turns)
    others = [
        _row(rank, num_microbatches, num_ranks - rank + extra) for rank in range(1, num_ranks)
    ]
    return GivenRows(num_ranks, num_microbatches, style="u", rows=[first, *others])


def _first_row(num_ranks: int, num_microbatches: int, warm_up: int, turns: int) -> list[int]:
    microbatches = range(num_microbatches)
    starts, ends = forwards(0, microbatches), backwards(0, microbatches)
    both = (forwards(num_ranks, microbatches), backwards(num_ranks, microbatches))
    pairs = list(zip(*both, strict=True))
    row = [*starts[:warm_up], *chain.from_iterable(pairs[:turns])]
    for start, pair, end in zip_longest(starts[warm_up:], pairs[turns:], ends):
        row += [code for code in (start, *(pair or ()), end) if code is not None]
    return row


def _row(rank: int, num_microbatches: int, warm_up: int) -> list[int]:
    microbatches = range(num_microbatches)
    shifted = [-1] * warm_up + backwards(rank, microbatches)
    columns = zip_longest(forwards(rank, microbatches), shifted, fillvalue=-1)
    return [code for code in chain.from_iterable(columns) if code >= 0]
