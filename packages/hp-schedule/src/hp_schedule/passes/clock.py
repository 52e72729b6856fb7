"""Times at which the compute steps of a schedule end when nothing holds them up."""

import math

from hp_schedule.costs import Costs
from hp_schedule.errors import DeadlockError
from hp_schedule.packing import FIRST_COMMUNICATION, FIRST_OVERLAP, KIND_MASK, TYPES, unpack
from hp_schedule.schedule import Schedule
from hp_schedule.simulation.recurrence import Walk


def compute_clock(
    schedule: Schedule, costs: Costs | None
) -> tuple[list[list[int]], list[list[float]]]:
    """Run the compute steps of all ranks in list order, each as soon as its inputs exist.

    Args:
        schedule: Its communication steps, its FSDP steps and its empty cells are skipped.
        costs: Durations of the compute steps, and the latency between ranks; None counts cells
            instead: every step takes one, an overlap two.

    Returns:
        The compute steps of each rank, and the time at which each of them ends.

    Raises:
        DeadlockError: If the order of the compute steps contradicts itself.
    """
    compute = (*range(FIRST_COMMUNICATION), *range(FIRST_OVERLAP, len(TYPES)))
    rows = [
        [code for code in row.codes() if code >= 0 and code & KIND_MASK in compute]
        for row in schedule.steps
    ]
    sizes = (schedule.num_stages, schedule.num_microbatches)
    same = [[1.0] * math.prod(sizes)] * FIRST_COMMUNICATION
    durations = costs.durations(*sizes) if costs else same
    walk = Walk(schedule, durations, (costs or Costs()).latency_of)
    walk.run(rows)
    for rank, (codes, finish) in enumerate(zip(rows, walk.ends, strict=True)):
        if len(finish) < len(codes):
            raise DeadlockError(
                f"rank {rank}, compute step {len(finish)}: {unpack(codes[len(finish)])} waits "
                "for a value that is never computed; `validate` shows where the order is wrong"
            )
    return rows, walk.ends
