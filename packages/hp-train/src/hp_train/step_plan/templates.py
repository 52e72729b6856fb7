"""Schedules that are searched long once, for steps that resemble each other.

The microbatches of every step have about the same shares of its work, and so a schedule that is
good for these shares is good for each step. It is searched with rounded numbers, which all ranks
come to alike, and remembered.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from hp_schedule import Costs, Schedule, search
from hp_train.step_plan.costs import Seconds


def template_for(
    seconds: Sequence[Seconds],
    shares: Sequence[float],
    *,
    num_stages: int,
    latency: float,
    room: float,
    effort: int,
) -> Schedule | None:
    """A schedule for steps like one; None if nothing fits the memory.

    Args:
        seconds: Seconds of each microbatch in a stage.
        shares: Share of the work that each was to have.
        num_stages: Number of stages.
        latency: Seconds of a message.
        room: Memory, by what a microbatch holds on the mean.
        effort: Number of schedules to try the first time.
    """
    forward, input_grad, weight_grad = (sum(each) for each in zip(*seconds, strict=True))
    ratios = round(input_grad / forward, 1), round(weight_grad / forward, 1)
    late = round(latency * len(shares) / forward, 2)
    return _searched(
        tuple(round(share * len(shares), 3) for share in shares),
        num_stages,
        (*ratios, late, math.floor(room * 2 - 0.25) / 2),  # a bit less, since lengths vary
        effort,
    )


@lru_cache(maxsize=64)
def _searched(
    shares: tuple[float, ...],
    num_stages: int,
    rounded: tuple[float, float, float, float],
    effort: int,
) -> Schedule | None:
    input_grad, weight_grad, latency, room = rounded
    costs = Costs(
        forward=[shares] * num_stages,
        input_grad=[[share * input_grad for share in shares]] * num_stages,
        weight_grad=[[share * weight_grad for share in shares]] * num_stages,
        activation=[shares] * num_stages,
        latency=latency,
    )
    try:
        found = search(
            costs,
            num_ranks=num_stages,
            num_microbatches=len(shares),
            virtual=(1,),
            memory_limit=room,
            num_candidates=effort,
        )
    except ValueError:
        return None
    return found.schedule
