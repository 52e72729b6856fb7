"""The entry point of the simulator."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hp_schedule.costs import Costs
from hp_schedule.schedule import Schedule
from hp_schedule.simulation.channels import ChannelModel, check_model
from hp_schedule.simulation.machine import Machine
from hp_schedule.simulation.recurrence import Numbers, recurrence
from hp_schedule.steps import (
    FSDP_REDUCE_GRAD,
    FSDP_UNSHARD,
    OFFLOAD,
    OVERLAP_B_F,
    OVERLAP_F_B,
)
from hp_schedule.timeline import Timeline


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation.

    Attributes:
        makespan: Time from the start of the first step to the end of the last.
        bubble: For each rank the share of the makespan in which it computes nothing.
        peak_activations: For each rank the most memory its microbatches in flight hold at once.
        exposed_communication: For each rank the time it stood waiting for values that were computed
            already, for a send to be taken, for a collective of its parameters, or for a copy from
            the host.
    """

    makespan: float
    bubble: tuple[float, ...]
    peak_activations: tuple[float, ...]
    exposed_communication: tuple[float, ...]
    _spans: Callable[[], Timeline] = field(repr=False, compare=False)

    @property
    def timeline(self) -> Timeline:
        """Return every compute step, and every wait for a message or a collective.

        Simulates once more when it is read: most callers, searches above all, want the numbers.
        """
        return self._spans()


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    channels: ChannelModel = "edge",
    blocking: bool = False,
    cores: int | None = None,
) -> Simulation:
    """Run a schedule on a machine made of numbers.

    A message moves once its send and its receive are both the oldest of their queues (see
    `channels`), takes message / bandwidth and then the latency. Sends do not hold up their rank;
    a compute step waits until its inputs have arrived. In a schedule without communication steps
    a message is sent and its receive posted when it is produced. An overlap waits for both inputs,
    takes as long as its two halves, and hands out both results at its end. Parameters are gathered
    and gradients reduced one after the other on a communicator of their own; compute steps wait
    for the parameters they need, and the end of the schedule for all gradients. What a microbatch
    keeps goes to the host and comes back one copy after the other, each way on its own, while the
    rank computes: it leaves the memory when its copy has ended, and is there again from the start
    of the copy back, for whose end its backward waits.

    Args:
        schedule: Schedule with or without communication steps.
        costs: Default: 1 for every forward, input gradient and weight gradient, no latency.
        channels: Which messages share an in-order queue on a rank: those of a directed edge
            ("edge"; only there may a message follow another before that has arrived), of a pair
            of ranks ("pair"), or all ("rank").
        blocking: Whether a send or a receive holds up its rank until the message has arrived. In a
            schedule without communication steps only sends do, from the end of what they send.
        cores: Cores that all ranks together have for compute steps; while more steps run than
            there are cores, all of them run slower by the same factor. Default: no such limit.

    Raises:
        DeadlockError: If the schedule cannot run to its end.
        ValueError: If the costs do not fit the schedule, `channels` is unknown, `cores` is below 1.
    """
    check_model(channels)
    if cores is not None and cores < 1:
        raise ValueError(f"cores ({cores}) must be >= 1")
    costs = costs or Costs()
    make = partial(Machine, schedule, costs, channels=channels, blocking=blocking, cores=cores)
    numbers = None
    if channels == "edge" and cores is None and _is_free_of_contention(schedule, costs, blocking):
        numbers = recurrence(schedule, costs, blocking=blocking)
    if numbers is None:
        machine = make()
        numbers = Numbers(
            makespan=machine.run(),
            busy=[rank.busy for rank in machine.ranks],
            exposed=[rank.exposed for rank in machine.ranks],
            peak=[rank.peak for rank in machine.ranks],
        )
    makespan = numbers.makespan
    return Simulation(
        makespan=makespan,
        bubble=tuple(1 - part / makespan if makespan > 0 else 0.0 for part in numbers.busy),
        peak_activations=tuple(numbers.peak),
        exposed_communication=tuple(numbers.exposed),
        _spans=partial(_timeline, make),
    )


def _is_free_of_contention(schedule: Schedule, costs: Costs, blocking: bool) -> bool:
    """Tell whether messages of an edge leave in the order of its rank, and copies take no turns."""
    if schedule.has_communication:
        return False
    sends_two_at_once = bool(schedule.kinds & {OVERLAP_F_B, OVERLAP_B_F})
    sizes = (schedule.num_stages, schedule.num_microbatches)
    if sends_two_at_once and (blocking or any(costs.transmission(*sizes))):
        return False
    if OFFLOAD in schedule.kinds and costs.host_bandwidth < math.inf:
        return False
    collectives = schedule.kinds & {FSDP_UNSHARD, FSDP_REDUCE_GRAD}
    return not collectives or (costs.unshard == 0 and costs.reduce_grad == 0)


def _timeline(make: Callable[[], Machine]) -> Timeline:
    machine = make()
    machine.run()
    return Timeline(span for rank in machine.ranks for span in rank.spans)
