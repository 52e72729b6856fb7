"""When the compute steps of a schedule run."""

import math

from hp_schedule.costs import Costs
from hp_schedule.errors import DeadlockError
from hp_schedule.packing import FIRST_COMMUNICATION, FIRST_OVERLAP, KIND_MASK, unpack
from hp_schedule.schedule import Schedule
from hp_schedule.simulation.recurrence import Walk


class ComputeClock:
    """Runs the compute steps of all ranks in list order, each as soon as its inputs exist.

    Args:
        schedule: Its communication steps, its FSDP steps and its empty cells are skipped.
        costs: Durations of the compute steps, and the latency between ranks; None counts cells
            instead: every step takes one, an overlap two.

    Attributes:
        codes: The compute steps of each rank.
        finish: The time at which each of them ends.

    Raises:
        DeadlockError: If the order of the compute steps contradicts itself.
    """

    def __init__(self, schedule: Schedule, costs: Costs | None) -> None:
        compute = (*range(FIRST_COMMUNICATION), *range(FIRST_OVERLAP, KIND_MASK))
        self.codes = [
            [code for code in row.codes() if code & KIND_MASK in compute] for row in schedule.steps
        ]
        sizes = (schedule.num_stages, schedule.num_microbatches)
        durations = costs.durations(*sizes) if costs else [[1.0] * math.prod(sizes)] * 4
        walk = Walk(schedule, durations, (costs or Costs()).latency_of)
        complete = walk.run(self.codes)
        self.finish = walk.ends
        if not complete:
            self._raise_deadlock()

    def _raise_deadlock(self) -> None:
        for rank, (codes, finish) in enumerate(zip(self.codes, self.finish, strict=True)):
            if len(finish) < len(codes):
                raise DeadlockError(
                    f"rank {rank}, compute step {len(finish)}: {unpack(codes[len(finish)])} waits "
                    "for a value that is never computed; `validate` shows where the order is wrong"
                )
