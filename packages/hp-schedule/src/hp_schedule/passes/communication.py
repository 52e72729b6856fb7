"""Send and receive steps between the compute steps: inserted, aligned and dropped.

Every message has a key: the time t at which it is produced when the compute steps run as soon as
they can, then, where several are produced at once, a number of its source. Rows are laid out along
the keys: a step that ends at t on rank r stands at (t, r) and its SENDs right behind it, a RECV
stands where its message's key belongs. A receive is posted while its rank still computes something
else, at most about one step early, and few are outstanding.

All ranks thus issue their sends and receives in one global order. A step waits only for messages
produced before its own end, and a message only for its producer, and for what stands before its
send and its receive, which has lower keys. So every wait leads to a lower key, and the rows cannot
deadlock: not with one communicator per directed edge, per pair of ranks or for all ranks, and not
if sends and receives block, whatever the steps really take. On one edge the order of receives is
that of the sends, so messages need no tags.

Even ranks are numbered before odd ones: neighbours that produce at once then exchange pairwise
instead of in a chain through all ranks.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

from hp_schedule.costs import Costs
from hp_schedule.schedule import Schedule, dataflow, receive_of
from hp_schedule.simulation.recurrence import compute_clock
from hp_schedule.steps import (
    BUBBLE,
    FIRST_COMMUNICATION,
    FIRST_COPY,
    FIRST_OVERLAP,
    FWD,
    KIND_MASK,
    PLACE_MASK,
    SEND_OF,
    encode,
    halves,
    is_compute,
    unpack,
)

_Cell = tuple[float, int, int, int]
"""Time, number of the rank that produces it, position among cells of that time, code."""
_Post = Callable[[float, int], None]
"""Notes a message; called with the time at which it is produced and the step's code."""


def add_send_recv(
    schedule: Schedule,
    *,
    costs: Costs | None = None,
    times: Sequence[Sequence[float]] | None = None,
) -> Schedule:
    """Insert the sends and receives that a schedule's compute steps need.

    Neighbouring stages on one rank hand their values over directly and get no messages. The order
    is free of deadlocks under every way communicators may be shared and whatever the steps really
    take; costs only shape where receives stand.

    Args:
        schedule: Schedule without communication steps. Empty cells and FSDP steps stay where they
            are, in front of the step they precede.
        costs: Durations and latency by which messages are laid out; default 1 for each of forward,
            input gradient and weight gradient. Every forward and backward must take some time.
            Without a latency, a quarter of the shortest forward is assumed: an order for messages
            that take no time at all would be a bad one for any real ones.
        times: For each rank the times at which its compute steps end, instead of the times that
            the costs give. They must grow along every row and from the step that makes a value to
            the step that reads it.

    Raises:
        DeadlockError: If the compute steps contradict each other.
        ValueError: If the schedule has communication steps already, a duration is 0, or there is
            not one time for each compute step.
    """
    if schedule.has_communication:
        raise ValueError("schedule must have no communication steps; see drop_communication")
    times = _times(schedule, costs or Costs()) if times is None else times
    return schedule.with_rows(lay_out(schedule, times, range(schedule.num_ranks)))


def lay_out(
    schedule: Schedule, times: Sequence[Sequence[float]], ranks: Iterable[int]
) -> Iterator[list[int]]:
    """Yield the rows of some ranks with their messages.

    Args:
        schedule: Schedule without communication steps. The rows of ranks that are neither among
            `ranks` nor their neighbours are not looked at.
        times: See `add_send_recv`.
        ranks: Ranks whose rows are laid out.

    Raises:
        ValueError: If there is not one time for each compute step.
    """
    flows_of: list[list[_Flow]] = [[] for _ in schedule.steps]
    for flow in _flows(schedule, times):
        flows_of[flow.source].append(flow)
        flows_of[flow.destination].append(flow)
    numbers = _numbers(schedule.num_ranks)
    for rank in ranks:
        row = schedule.steps[rank].codes()
        yield _row(rank, _own_cells(row, times[rank], numbers[rank]), flows_of, numbers)


def _times(schedule: Schedule, costs: Costs) -> Sequence[Sequence[float]]:
    """Return the times at which the compute steps of each rank end."""
    durations = costs.durations(schedule.num_stages, schedule.num_microbatches)
    if any(min(durations[kind]) <= 0 for kind in SEND_OF):
        raise ValueError("forward, input_grad and weight_grad + input_grad must be > 0")
    if costs.latency == 0:
        costs = replace(costs, latency=min(durations[FWD]) / 4)
    _, finish = compute_clock(schedule, costs)
    return finish


def drop_communication(schedule: Schedule) -> Schedule:
    """Return a schedule without its sends and receives."""
    return schedule.with_rows(
        [c for c in row.codes() if c < 0 or not FIRST_COMMUNICATION <= c & KIND_MASK < FIRST_COPY]
        for row in schedule.steps
    )


def auto_align_and_add_send_recv(schedule: Schedule) -> Schedule:
    """Insert empty cells until columns are moments, then the sends and receives.

    Before the messages come in, cell t of every row is the t-th moment: a step stands in the first
    column in which its rank is free and its inputs have been computed in earlier ones. An overlap
    takes two cells, the second of them empty.

    Args:
        schedule: Compute steps only. Its empty cells are dropped.

    Raises:
        DeadlockError: If the compute steps contradict each other.
        ValueError: If there are other steps.
    """
    others = [kind for kind in schedule.kinds if FIRST_COMMUNICATION <= kind < FIRST_OVERLAP]
    if others:
        name = unpack(min(others)).type.value
        raise ValueError(f"schedule must have compute steps only, it has {name} steps")
    rows: list[list[int]] = []
    for codes, finish in zip(*compute_clock(schedule, None), strict=True):
        row: list[int] = []
        for code, end in zip(codes, finish, strict=True):
            width = 2 if code & KIND_MASK >= FIRST_OVERLAP else 1
            row += [BUBBLE] * (int(end) - width - len(row))
            row += [code, *[BUBBLE] * (width - 1)]
        rows.append(row)
    return add_send_recv(schedule.with_rows(rows))


@dataclass(slots=True)
class _Flow:
    """Messages from one rank to another, in the order in which they are produced.

    Attributes:
        position: 1, or 2 for the messages of the second halves of overlaps.
        times: Times at which they are produced.
        sends: Codes of the sends.
        receives: Codes of the receives.
    """

    source: int
    destination: int
    position: int
    times: "array[float]" = field(default_factory=lambda: array("d"))
    sends: "array[int]" = field(default_factory=lambda: array("q"))
    receives: "array[int]" = field(default_factory=lambda: array("q"))


def _flows(schedule: Schedule, times: Sequence[Sequence[float]]) -> list[_Flow]:
    """Return the messages of all steps."""
    flows: dict[tuple[int, int, int], _Flow] = {}
    first, second = (_posts(schedule, position, flows) for position in (1, 2))
    for rank, (row, finish) in enumerate(zip(schedule.steps, times, strict=True)):
        codes = row.codes()
        if len(codes) != len(finish):
            codes = [code for code in codes if is_compute(code)]
        if len(codes) != len(finish):
            raise ValueError(
                f"len(times[{rank}]) ({len(finish)}) must equal the number of compute steps "
                f"({len(codes)})"
            )
        for code, time in zip(codes, finish, strict=True):
            post = first.get(code & PLACE_MASK)
            if post is not None:
                post(time, code)
            elif code & KIND_MASK >= FIRST_OVERLAP:
                for posts, half in zip((first, second), halves(code), strict=True):
                    post = posts.get(half & PLACE_MASK)
                    if post is not None:
                        post(time, half)
    return list(flows.values())


def _posts(
    schedule: Schedule, position: int, flows: dict[tuple[int, int, int], _Flow]
) -> dict[int, _Post]:
    """Return by kind and stage, where a result goes to another rank, how to note its message.

    Args:
        schedule: Schedule whose placement and chains are read.
        position: See `_Flow`.
        flows: Flows to which messages are added, by source, destination and position.
    """
    peer = dataflow(schedule).peer
    posts: dict[int, _Post] = {}
    for kind, send in SEND_OF.items():
        for stage, source in enumerate(schedule.stage_to_rank):
            destination = peer[send][stage]
            if destination >= 0:
                ends = (source, destination, position)
                flow = flows.setdefault(ends, _Flow(*ends))
                receive = receive_of(schedule, encode(send, stage))
                posts[encode(kind, stage)] = _post(flow, encode(send, stage), receive)
    return posts


def _post(flow: _Flow, send: int, receive: int) -> _Post:
    """Return a function that notes a message, given the codes of microbatch 0."""
    add_time, add_send, add_receive = flow.times.append, flow.sends.append, flow.receives.append

    def post(time: float, code: int) -> None:
        microbatch = code & ~PLACE_MASK
        add_time(time)
        add_send(send | microbatch)
        add_receive(receive | microbatch)

    return post


def _row(
    rank: int, own: Iterable[_Cell], flows_of: list[list[_Flow]], numbers: list[int]
) -> list[int]:
    """Return a rank's steps with its messages."""
    cells = list(own)
    for flow in flows_of[rank]:
        codes = flow.sends if rank == flow.source else flow.receives
        source = repeat(numbers[flow.source])
        cells.extend(zip(flow.times, source, repeat(flow.position), codes, strict=False))
    # A few sorted runs: nearly linear.
    cells.sort()
    return [cell[-1] for cell in cells]


def _own_cells(row: list[int], finish: Sequence[float], number: int) -> Iterable[_Cell]:
    """Return a rank's steps with their keys; other steps have the key of the next compute step."""
    if len(row) == len(finish):
        return zip(finish, repeat(number), repeat(0), row, strict=False)
    computed = 0
    cells: list[_Cell] = []
    for position, code in enumerate(row):
        time = finish[computed] if computed < len(finish) else math.inf
        cells.append((time, number, position - len(row), code))
        computed += is_compute(code)
    return cells


def _numbers(num_ranks: int) -> list[int]:
    """Return the number of each rank: the even ones first."""
    order = [*range(0, num_ranks, 2), *range(1, num_ranks, 2)]
    return [order.index(rank) for rank in range(num_ranks)]
