"""The generators against what torch 2.13, sail-sg zero-bubble and DualPipe publish.

Steps take 1 for a rank's share of the model, messages 0, 0.05 or 0.2; peaks are in activations of
that share. The numbers are those of their schedules under the same simulator.
"""

from collections.abc import Callable
from functools import partial

import pytest

from hp_schedule import (
    Costs,
    Schedule,
    dualpipe_v,
    grouped_interleaved,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    simulate,
    v_half,
    v_min,
    zbv,
    zero_bubble,
)

_LATENCIES = (0.0, 0.05, 0.2)
_Known = tuple[Callable[..., Schedule], int, float, tuple[float, ...]]

_OF_16: list[_Known] = [
    (partial(zero_bubble, max_in_flight="1p"), 16, 8, (55.0, 56.4, 60.6)),
    (partial(zero_bubble, max_in_flight="1.5p"), 16, 12, (55.0, 55.35, 56.4)),
    (partial(zero_bubble, max_in_flight="2p"), 16, 16, (55.0, 55.35, 56.4)),
    (interleaved_1f1b, 16, 11.5, (58.5, 60.0, 64.5)),
    (partial(interleaved_1f1b, num_stages_per_rank=4), 16, 9.75, (53.25, 56.35, 65.65)),
    (looped_bfs, 16, 16, (58.5, 59.2, 61.3)),
    (partial(looped_bfs, num_stages_per_rank=4), 16, 16, (53.25, 53.95, 56.05)),
    (interleaved_zero_bubble, 16, 8, (51.5, 53.3, 58.7)),
    (partial(interleaved_zero_bubble, num_stages_per_rank=4), 16, 8, (49.75, 52.35, 64.2)),
    (partial(grouped_interleaved, group_size=8), 16, 8, (55.0, 56.1, 59.4)),
    (zbv, 16, 8, (51.5, 53.15, 58.1)),
    (v_half, 16, 5, (56.5,)),
    (v_min, 16, 4, (61.5, 66.8, 82.7)),
    (dualpipe_v, 16, 8.5, (55.0,)),
    (partial(dualpipe_v, overlap_f_b=False), 16, 8.5, (51.5, 53.1, 59.4)),
]
_OF_13: list[_Known] = [
    (partial(zero_bubble, max_in_flight="1p"), 13, 8, (46.0, 47.4, 51.6)),
    (partial(zero_bubble, max_in_flight="1.5p"), 13, 12, (46.0, 46.35, 47.4)),
    (partial(zero_bubble, max_in_flight="2p"), 13, 13, (46.0, 46.35, 47.4)),
    (interleaved_1f1b, 13, 13, (49.5, 50.2, 52.3)),
    (partial(interleaved_1f1b, num_stages_per_rank=4), 13, 13, (44.25, 44.95, 48.1)),
    (partial(grouped_interleaved, group_size=8), 13, 10.5, (42.5, 43.9, 48.1)),
    (zbv, 13, 8, (42.5, 44.05, 48.7)),
    (v_half, 13, 5, (47.5,)),
    (v_min, 13, 4, (52.5, 57.0, 70.5)),
]
_OF_4: list[_Known] = [
    (partial(zero_bubble, max_in_flight="1p"), 4, 4, (23.0, 23.7, 25.8)),
    (interleaved_1f1b, 4, 4, (28.5, 30.0, 34.5)),
    (interleaved_zero_bubble, 4, 4, (19.5, 21.2, 26.3)),
    (partial(interleaved_zero_bubble, num_stages_per_rank=4), 4, 4, (17.75, 21.05, 30.95)),
    (zbv, 4, 4, (19.5, 21.1, 25.9)),
    (v_half, 4, 4, (24.0, 25.6, 30.4)),
    (v_min, 4, 4, (25.5, 27.6, 33.9)),
]


def _measure(schedule: Schedule, latency: float) -> tuple[float, float]:
    share = schedule.num_ranks / schedule.num_stages
    costs = Costs(share, share, share, share, latency)
    found = simulate(schedule, costs)
    return found.makespan, max(found.peak_activations)


@pytest.mark.parametrize("known", [*_OF_16, *_OF_13, *_OF_4])
def test_eight_ranks_are_never_slower_and_hold_no_more(known: _Known) -> None:
    generate, num_microbatches, peak, makespans = known
    schedule = generate(8, num_microbatches=num_microbatches)
    for latency, makespan in zip(_LATENCIES, makespans, strict=False):
        found = _measure(schedule, latency)
        assert found[0] <= makespan + 0.006
        assert found[1] <= peak + 1e-9


@pytest.mark.parametrize(
    ("generate", "num_microbatches", "published"),
    [(zbv, 8, 33.8), (zbv, 13, 48.7), (zbv, 16, 58.1), (v_half, 13, 57.1), (v_half, 16, 66.1)],
)
def test_told_the_latency_v_shapes_beat_what_is_published_for_it(
    generate: Callable[..., Schedule], num_microbatches: int, published: float
) -> None:
    # A step of one of a rank's two stages takes 0.5: a latency of 0.2 is 0.4 of it.
    schedule = generate(8, num_microbatches=num_microbatches, latency=0.4)
    assert _measure(schedule, 0.2)[0] < published


@pytest.mark.parametrize(
    ("num_ranks", "peak", "makespan"), [(4, 2, 17.5), (8, 4, 37.5), (16, 6, 77.5), (32, 12, 157.5)]
)
def test_v_min_takes_a_third_of_the_memory_at_every_size(
    num_ranks: int, peak: float, makespan: float
) -> None:
    assert _measure(v_min(num_ranks, num_microbatches=num_ranks), 0.0) == (makespan, peak)


def test_a_remainder_costs_neither_time_nor_memory() -> None:
    """P = 8, M = 13 at 1F1B memory: published are 42.50; with more memory 40.75."""
    schedule = interleaved_zero_bubble(8, num_microbatches=13, num_stages_per_rank=4)
    assert _measure(schedule, 0.0) == (40.75, 8.0)
