"""The published schedules a search starts from, and never falls behind."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from hp_schedule.generators import (
    dualpipe_v,
    gpipe,
    grouped_interleaved,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zbv,
    zero_bubble,
)
from hp_schedule.packing import BWD_WEIGHT
from hp_schedule.placement import PlacementStyle
from hp_schedule.schedule import Schedule

Generators = Mapping[str, Callable[..., Schedule]]

_ONE_STAGE: Generators = {
    "gpipe": gpipe,
    "one_f_one_b": one_f_one_b,
    "zero_bubble 1p": zero_bubble,
    "zero_bubble 1.5p": partial(zero_bubble, max_in_flight="1.5p"),
    "zero_bubble 2p": partial(zero_bubble, max_in_flight="2p"),
}
_LOOP: Generators = {
    "looped_bfs": looped_bfs,
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "grouped_interleaved": grouped_interleaved,
}
_V: Generators = {
    "zbv": zbv,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
}


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
        latency: Of a message, in units of one step, for those that allow for it.
        split_backward: Whether to yield those that split backwards, too.
    """
    counts = {"num_microbatches": num_microbatches}
    if num_stages_per_rank == 1:
        generators = _ONE_STAGE
    elif style == "loop":
        generators = _LOOP
        counts["num_stages_per_rank"] = num_stages_per_rank
    else:
        generators = _V if num_stages_per_rank == 2 else {}
    for name, generator in generators.items():
        schedule = generator(num_ranks, **counts)
        if split_backward or BWD_WEIGHT not in schedule.kinds:
            yield name, schedule
    if split_backward and generators is _LOOP:
        yield (
            "grouped_interleaved, rounds of all ranks",
            grouped_interleaved(num_ranks, **counts, group_size=num_ranks),
        )
    if split_backward and generators is _V and latency > 0:
        yield "zbv for the latency", zbv(num_ranks, **counts, latency=latency)
        yield "v_half for the latency", v_half(num_ranks, **counts, latency=latency)
