"""Rows in which one column is one moment."""

from hp_schedule.packing import (
    BUBBLE,
    FIRST_COMMUNICATION,
    FIRST_OVERLAP,
    KIND_MASK,
    unpack,
)
from hp_schedule.passes.clock import compute_clock
from hp_schedule.passes.communication import add_send_recv
from hp_schedule.schedule import Schedule


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
