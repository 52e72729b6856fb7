"""Send and receive steps between the compute steps.

[Note: Order of messages] Rows are laid out along the time t at which messages are produced,
computed as if they took no time:

    a SEND stands right after the step that produces its message;
    a RECV stands before the first compute step of its rank that ends at t or later.

So a receive is posted while its rank still computes something else, at most one step early, and
few are outstanding. The result cannot deadlock even if a send blocks until its receive is posted,
with one channel per directed edge: the send at time t waits only for its receive; the steps before
that receive ended before t, and so did their sends; hence every wait leads to an earlier time. On
one edge receives are posted in the order of t, which is the order of the sends, so messages need
no tags.
"""

from hp_schedule.costs import Costs
from hp_schedule.dataflow import dataflow, receive_of
from hp_schedule.packing import (
    FIRST_COMMUNICATION,
    FIRST_FSDP,
    KIND_MASK,
    SEND_OF,
    STAGE_MASK,
    STAGE_SHIFT,
    is_compute,
    leaves,
)
from hp_schedule.passes.clock import ComputeClock
from hp_schedule.schedule import Schedule


def add_send_recv(schedule: Schedule, *, costs: Costs | None = None) -> Schedule:
    """Insert the sends and receives that a schedule's compute steps need.

    Neighbouring stages on one rank hand their values over directly and get no messages. The order
    is free of deadlocks whatever the steps really take; costs only shape where receives stand.

    Args:
        schedule: Without communication steps. Empty cells and FSDP steps stay where they are,
            in front of the step they precede.
        costs: Durations to lay messages out with; default 1 for each of forward, input gradient
            and weight gradient. Every forward and backward must take some time.

    Raises:
        DeadlockError: If the compute steps contradict each other.
        ValueError: If the schedule has communication steps already, or a duration is 0.
    """
    if schedule.has_communication:
        raise ValueError("schedule must have no communication steps; see drop_communication")
    costs = costs or Costs()
    durations = costs.durations(schedule.num_stages, schedule.num_microbatches)
    if any(duration <= 0 for kind in SEND_OF for duration in durations[kind]):
        raise ValueError("forward, input_grad and weight_grad + input_grad must be > 0")
    clock = ComputeClock(schedule, costs)
    sends = [_sends_after(schedule, codes) for codes in clock.codes]
    receives = _receives(schedule, clock, sends)
    return schedule.with_rows(
        _merge(row.codes(), clock.finish[rank], sends[rank], receives[rank])
        for rank, row in enumerate(schedule.steps)
    )


def drop_communication(schedule: Schedule) -> Schedule:
    """Return a schedule without its sends and receives."""
    return schedule.with_rows(
        [c for c in row.codes() if c < 0 or not FIRST_COMMUNICATION <= c & KIND_MASK < FIRST_FSDP]
        for row in schedule.steps
    )


def _sends_after(schedule: Schedule, codes: list[int]) -> list[tuple[int, ...]]:
    """Return, for each compute step of a rank, the sends of the values it writes."""
    peer = dataflow(schedule).peer
    result = []
    for code in codes:
        steps = []
        for part in leaves(code):
            send = SEND_OF.get(part & KIND_MASK)
            if send is not None and peer[send][part >> STAGE_SHIFT & STAGE_MASK] >= 0:
                steps.append(part & ~KIND_MASK | send)
        result.append(tuple(steps))
    return result


def _receives(
    schedule: Schedule, clock: ComputeClock, sends: list[list[tuple[int, ...]]]
) -> list[list[tuple[float, int]]]:
    """Return, for each rank, its receives with the time of their messages, in time order."""
    peer = dataflow(schedule).peer
    result: list[list[tuple[float, int]]] = [[] for _ in clock.codes]
    for finish, steps in zip(clock.finish, sends, strict=True):
        for time, codes in zip(finish, steps, strict=True):
            for send in codes:
                destination = peer[send & KIND_MASK][send >> STAGE_SHIFT & STAGE_MASK]
                result[destination].append((time, receive_of(schedule, send)))
    for row in result:
        # Stable: messages of one source keep the order of their sends.
        row.sort(key=lambda item: item[0])
    return result


def _merge(
    codes: list[int],
    finish: list[float],
    sends: list[tuple[int, ...]],
    receives: list[tuple[float, int]],
) -> list[int]:
    row: list[int] = []
    computed = 0
    received = 0
    for code in codes:
        if not is_compute(code):
            row.append(code)
            continue
        while received < len(receives) and receives[received][0] <= finish[computed]:
            row.append(receives[received][1])
            received += 1
        row.append(code)
        row.extend(sends[computed])
        computed += 1
    # Only an incomplete schedule has messages that no later step reads; `validate` reports them.
    row.extend(receive for _, receive in receives[received:])
    return row
