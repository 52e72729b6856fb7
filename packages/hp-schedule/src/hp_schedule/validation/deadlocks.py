"""Freedom from deadlock, which shows only when all rows run together.

Two machines are asked. On the least helpful one a send and a receive hold up their rank until the
other side stands at its half of the same message, and nothing is buffered. A schedule that runs on
it runs on every other: with one communicator per directed edge, per pair or for all ranks, and
whatever else a rank launches between its messages in the order of its row. Collectives of sharded
parameters, or of expert parallelism inside compute steps, join ranks that run copies of one row; a
cycle of launches through several communicators would be a cycle of this machine too.

On the other machine messages queue up on communicators while its ranks go on: sends and receives
are issued in the order of the row and hold up nobody; a message moves when both its ends are the
oldest of their queues; a compute step waits for its inputs. This is the machine of the simulator,
and how far it comes does not depend on what the steps cost.
"""

from collections.abc import Mapping
from typing import NamedTuple

from hp_schedule.costs import Costs
from hp_schedule.schedule import Schedule, dataflow
from hp_schedule.simulation.channels import ChannelModel
from hp_schedule.simulation.recurrence import Walk
from hp_schedule.simulation.simulate import Machine
from hp_schedule.steps import (
    BWD_RECV,
    BWD_SEND,
    FIRST_COMMUNICATION,
    FIRST_COPY,
    FWD_RECV,
    FWD_SEND,
    KIND_MASK,
    MICROBATCH_SHIFT,
    PLACE_MASK,
    MetaStep,
    encode,
    is_compute,
    leaves,
    pack,
    unpack,
)
from hp_schedule.validation.report import Finding, FindingKind, finding_at


class Wait(NamedTuple):
    """A rank's wait: its cell, the reason in words, and the rank that it waits for."""

    position: int
    text: str
    rank: int


class End(NamedTuple):
    """One half of a message."""

    rank: int
    step: MetaStep


def rendezvous(schedule: Schedule) -> dict[int, int]:
    """Run the messages of all rows on the least helpful machine; linear in their number.

    Args:
        schedule: Must have passed the checks of the rows.

    Returns:
        The ranks that are stuck, by the value that each waits for; empty if all rows run.
    """
    rows = [iter(row) for row in message_values(schedule)]
    waiting: dict[int, int] = {}
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        for value in rows[rank]:
            other = waiting.pop(value, None)
            if other is None:
                waiting[value] = rank
                break
            runnable.append(other)
    return waiting


def rendezvous_deadlock(schedule: Schedule, waiting: Mapping[int, int]) -> Finding:
    """Return the cycle among the ranks that `rendezvous` has found stuck."""
    waits: dict[int, Wait] = {}
    for value, rank in waiting.items():
        ends = message_ends(schedule, value)
        mine, theirs = ends if ends[0].rank == rank else ends[::-1]
        text = f"{mine.step} waits for rank {theirs.rank} to reach {theirs.step}"
        waits[rank] = Wait(cell_of(schedule, mine), text, theirs.rank)
    return cycle_finding(waits)


def message_mismatch(schedule: Schedule) -> Finding | None:
    """Return a receive that stands before another whose message is sent first, if any."""
    sends: dict[tuple[int, int], list[int]] = {edge: [] for edge in schedule.edges}
    receives: dict[tuple[int, int], list[int]] = {edge: [] for edge in schedule.edges}
    for rank, values in enumerate(message_values(schedule)):
        for value in values:
            send, receive = message_ends(schedule, value)
            side = sends if send.rank == rank else receives
            side[send.rank, receive.rank].append(value)
    for edge, values in receives.items():
        for sent, received in zip(sends[edge], values, strict=False):
            if sent != received:
                receive = message_ends(schedule, received)[1]
                text = f"{receive.step} is not the next message that rank {edge[0]} sends"
                cell = cell_of(schedule, receive)
                return finding_at(FindingKind.MESSAGE_ORDER, text, receive.rank, cell)
    return None


def message_values(schedule: Schedule) -> list[list[int]]:
    """Return for each rank the values of its sends and receives in the order of its row."""
    flow = dataflow(schedule)
    base = {
        encode(kind, stage): (flow.reads if kind in {FWD_SEND, BWD_SEND} else flow.writes)[kind][
            stage
        ]
        for kind in (FWD_SEND, FWD_RECV, BWD_SEND, BWD_RECV)
        for stage in range(schedule.num_stages)
    }
    return [
        [
            base[code & PLACE_MASK] + (code >> MICROBATCH_SHIFT)
            for code in row.codes()
            if FIRST_COMMUNICATION <= code & KIND_MASK < FIRST_COPY
        ]
        for row in schedule.steps
    ]


def message_ends(schedule: Schedule, value: int) -> tuple[End, End]:
    """Return the send and the receive of a value."""
    index, microbatch = divmod(value, schedule.num_microbatches)
    forward, stage = index < schedule.num_stages, index % schedule.num_stages
    other = (schedule.downstream if forward else schedule.upstream)[stage]
    send = encode(FWD_SEND if forward else BWD_SEND, stage, microbatch)
    receive = encode(FWD_RECV if forward else BWD_RECV, other, microbatch)
    place = schedule.stage_to_rank
    return End(place[stage], unpack(send)), End(place[other], unpack(receive))


def cell_of(schedule: Schedule, end: End) -> int:
    """Return the cell of a step in its row."""
    return schedule.steps[end.rank].index(end.step)


def order_deadlock(schedule: Schedule) -> Finding | None:
    """Return the cycle of waits between compute steps whose values need no messages, if any."""
    rows = [row.codes() for row in schedule.steps]
    size = schedule.num_stages * schedule.num_microbatches
    walk = Walk(schedule, [[1.0] * size] * FIRST_COMMUNICATION, lambda _source, _destination: 0.0)
    if walk.run(rows):
        return None
    flow = dataflow(schedule)
    compute = [[cell for cell, code in enumerate(row) if is_compute(code)] for row in rows]
    stuck = {
        rank: cells[len(ends)]
        for rank, (cells, ends) in enumerate(zip(compute, walk.ends, strict=True))
        if len(ends) < len(cells)
    }
    waits: dict[int, Wait] = {}
    for rank, cell in stuck.items():
        for part in leaves(rows[rank][cell]):
            value = flow.value_read(part)
            other = schedule.stage_to_rank[value // schedule.num_microbatches % schedule.num_stages]
            if value >= 0 and other in stuck:
                text = f"{unpack(rows[rank][cell])} waits for its value to come from rank {other}"
                waits[rank] = Wait(cell, text, other)
    return cycle_finding(waits)


def cycle_finding(waits: Mapping[int, Wait], suffix: str = "") -> Finding:
    """Follow the waits from the lowest stuck rank until one comes round again."""
    path: list[int] = []
    rank = min(waits)
    while rank in waits and rank not in path:
        path.append(rank)
        rank = waits[rank].rank
    cycle = path[path.index(rank) :] if rank in path else path
    parts = [f"rank {r}, cell {waits[r].position}: {waits[r].text}" for r in cycle]
    first = cycle[0]
    return Finding(FindingKind.DEADLOCK, "; ".join(parts) + suffix, first, waits[first].position)


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
