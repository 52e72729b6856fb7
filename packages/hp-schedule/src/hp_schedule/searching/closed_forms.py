"""The published schedules a search starts from, and never falls behind."""

from collections.abc import Iterator

from hp_schedule.generators import SCHEDULES
from hp_schedule.packing import BWD_WEIGHT
from hp_schedule.placement import PlacementStyle
from hp_schedule.schedule import Schedule


def closed_forms(
    num_ranks: int,
    *,
    num_microbatches: int,
    num_stages_per_rank: int,
    style: PlacementStyle,
    latency: float = 0.0,
    split_backward: bool = True,
) -> Iterator[tuple[str, Schedule]]:
    """Yield name and schedule of every generator of a placement.

    Args:
        num_ranks: Ranks of the pipeline.
        num_microbatches: Any number from 1.
        num_stages_per_rank: Stages on every rank.
        style: Where they live; one stage per rank is a loop.
        latency: Latency of a message, in units of one step, for the generators that allow for it.
        split_backward: Whether to yield those that split backwards, too.
    """
    style = "loop" if num_stages_per_rank == 1 else style
    # With one stage per rank, those that take any number are others, or close to them.
    found = [
        (name, kind, options)
        for kind in SCHEDULES.values()
        if kind.trains and kind.style == style
        if num_stages_per_rank == (kind.stages_per_rank or max(2, num_stages_per_rank))
        for name, options in kind.variants(num_ranks, latency=latency).items()
    ]
    # First as they are: of schedules that are equally good, a search goes on from the first.
    for name, kind, options in sorted(found, key=lambda one: bool(one[2])):
        schedule = kind.build(
            num_ranks, num_microbatches, num_stages_per_rank, paired=None, **options
        )
        if split_backward or BWD_WEIGHT not in schedule.kinds:
            yield name, schedule
