"""Deadlocks of a machine whose messages queue up on communicators while its ranks go on.

Sends and receives are issued in the order of the row and hold up nobody; a message moves when both
its ends are the oldest of their queues; a compute step waits for its inputs. This is the machine of
the simulator, and how far it comes does not depend on what the steps cost.
"""

from hp_schedule.costs import Costs
from hp_schedule.packing import leaves, pack
from hp_schedule.schedule import Schedule
from hp_schedule.simulation.channels import ChannelModel
from hp_schedule.simulation.machine import Machine
from hp_schedule.validation.rendezvous import Wait, cycle_finding, message_ends
from hp_schedule.validation.report import Finding

SHARING: dict[ChannelModel, str] = {
    "edge": "one communicator for each directed edge",
    "pair": "one communicator for each pair of ranks",
    "rank": "one communicator for all ranks",
}


def queue_deadlock(schedule: Schedule, channels: ChannelModel) -> Finding | None:
    """Return a cycle of waits, or None if every row runs to its end.

    Args:
        schedule: Must have passed the checks of the rows.
        channels: Which messages share a queue.
    """
    machine = Machine(schedule, Costs(), channels=channels)
    waits = {
        rank: _explain(schedule, machine, rank, position)
        for rank, position in machine.settle().items()
    }
    return cycle_finding(waits, suffix=f" (with {SHARING[channels]})") if waits else None


def _explain(schedule: Schedule, machine: Machine, rank: int, position: int) -> Wait:
    """Describe why a value does not reach a rank, through the messages that stand before it."""
    step = schedule.steps[rank][position]
    reads = map(machine.flow.value_read, leaves(pack(step)))
    value = next(v for v in reads if v >= 0 and (v, rank) not in machine.arrived)
    text = f"{step} waits for {message_ends(schedule, value)[1].step}"
    passed: list[int] = []
    while value not in passed:
        passed.append(value)
        ends = message_ends(schedule, value)
        for end in ends:
            queue = machine.channels.waiting(end.rank, (ends[0].rank, ends[1].rank))
            if value not in queue:
                return Wait(
                    position, f"{text}, rank {end.rank} has not come to {end.step}", end.rank
                )
            oldest = queue[0]
            if oldest != value:
                both = message_ends(schedule, oldest)
                half = next(other.step for other in both if other.rank == end.rank)
                text += f", on rank {end.rank} behind {half}"
                value = oldest
                break
    return Wait(position, text, rank)
