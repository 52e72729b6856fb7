"""The published schedules a search starts from, and never falls behind."""

from collections.abc import Callable, Iterator

from hp_schedule.generators import gpipe, interleaved_1f1b, one_f_one_b
from hp_schedule.placement import PlacementStyle
from hp_schedule.schedule import Schedule

_ONE_STAGE: dict[str, Callable[..., Schedule]] = {"gpipe": gpipe, "one_f_one_b": one_f_one_b}
_LOOP: dict[str, Callable[..., Schedule]] = {"interleaved_1f1b": interleaved_1f1b}
_V: dict[str, Callable[..., Schedule]] = {}


def closed_forms(
    num_ranks: int, *, num_microbatches: int, num_stages_per_rank: int, style: PlacementStyle
) -> Iterator[tuple[str, Schedule]]:
    """Yield name and schedule of every generator of a placement."""
    counts = {"num_microbatches": num_microbatches}
    if num_stages_per_rank == 1:
        for name, generator in _ONE_STAGE.items():
            yield name, generator(num_ranks, **counts)
    if style == "loop":
        for name, generator in _LOOP.items():
            yield name, generator(num_ranks, **counts, num_stages_per_rank=num_stages_per_rank)
    elif num_stages_per_rank == 2:
        for name, generator in _V.items():
            yield name, generator(num_ranks, **counts)
