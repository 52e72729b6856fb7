"""When the compute steps of a schedule run if messages take no time."""

from hp_schedule.costs import Costs
from hp_schedule.dataflow import Dataflow, dataflow
from hp_schedule.errors import DeadlockError
from hp_schedule.packing import (
    KIND_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    is_compute,
    leaves,
    unpack,
)
from hp_schedule.schedule import Schedule


class ComputeClock:
    """Runs the compute steps of all ranks in list order, each as soon as its inputs exist.

    Linear in the number of steps: a rank that lacks a value is set aside and taken up again by
    the step that writes it.

    Args:
        schedule: Its communication steps and empty cells are skipped.
        costs: Durations of the compute steps; its latency is not used.

    Attributes:
        codes: The compute steps of each rank.
        finish: The time at which each of them ends.

    Raises:
        DeadlockError: If the order of the compute steps contradicts itself.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.codes = [[c for c in row.codes() if is_compute(c)] for row in schedule.steps]
        self.finish: list[list[float]] = [[] for _ in self.codes]
        self._flow: Dataflow = dataflow(schedule)
        self._durations = costs.durations(schedule.num_stages, schedule.num_microbatches)
        self._written: list[float] = [-1.0] * self._flow.num_values
        self._waiting: dict[int, int] = {}
        self._num_microbatches = schedule.num_microbatches
        runnable = list(range(schedule.num_ranks))
        while runnable:
            self._advance(runnable.pop(), runnable)
        if self._waiting:
            self._raise_deadlock()

    def _advance(self, rank: int, runnable: list[int]) -> None:
        """Run a rank until it lacks a value, and make those runnable that waited for its."""
        codes, finish = self.codes[rank], self.finish[rank]
        written, waiting, flow = self._written, self._waiting, self._flow
        num_microbatches = self._num_microbatches
        now = finish[-1] if finish else 0.0
        for position in range(len(finish), len(codes)):
            parts = leaves(codes[position])
            for part in parts:
                value = flow.value_read(part)
                if value >= 0:
                    if written[value] < 0:
                        waiting[value] = rank
                        return
                    now = max(now, written[value])
            for part in parts:
                stage = part >> STAGE_SHIFT & STAGE_MASK
                index = stage * num_microbatches + (part >> MICROBATCH_SHIFT)
                now += self._durations[part & KIND_MASK][index]
            finish.append(now)
            for part in parts:
                value = flow.value_written(part)
                if value >= 0:
                    written[value] = now
                    if value in waiting:
                        runnable.append(waiting.pop(value))

    def _raise_deadlock(self) -> None:
        rank = min(self._waiting.values())
        position = len(self.finish[rank])
        step = unpack(self.codes[rank][position])
        raise DeadlockError(
            f"rank {rank}, compute step {position}: {step} waits for a value that is never "
            "computed; `validate` shows where the order is wrong"
        )
