"""Steps that decide what a microbatch keeps in a stage between its forward and its backward.

Each pass looks at one rank's row at a time and moves no other step, so that what it is given stays
free of deadlocks: none of these steps waits for another rank.
"""

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import Literal

from hp_schedule.schedule import Schedule
from hp_schedule.steps import (
    BWD,
    BWD_INPUT,
    FWD,
    FWD_SEND,
    KIND_MASK,
    OFFLOAD,
    RECOMPUTE,
    RELOAD,
    RETENTION_KINDS,
    encode,
    is_compute,
    leaves,
)

Retention = Literal["recompute", "offload"]
"""How a microbatch gives up what it keeps in a stage: it is run again, or copied to the host."""

Places = Iterable[tuple[int, int]]
"""(stage, microbatch) each."""

_PLACE = ~KIND_MASK


def add_recompute(schedule: Schedule, places: Places | None = None) -> Schedule:
    """Let forwards keep nothing but their input, and run them again before their backward.

    A RECOMPUTE stands right before the backward, or before the overlap that it is half of. It needs
    nothing from another rank, so a rank that would wait for the gradient runs it meanwhile.

    Args:
        schedule: Schedule with or without messages and steps of sharded parameters: whatever the
            backward finds gathered, the RECOMPUTE finds too.
        places: The (stage, microbatch) of the forwards; default: all that have a backward.

    Raises:
        ValueError: If a place is not in the schedule or has such steps already.
    """
    chosen = _chosen(schedule, places)
    return schedule.with_rows(recomputing(row.codes(), chosen) for row in schedule.steps)


def add_offload(schedule: Schedule, places: Places | None = None, *, ahead: int = 1) -> Schedule:
    """Copy the saved tensors of forwards to the host, and back before their backward.

    An OFFLOAD stands right behind its forward and what that sends. The RELOAD stands `ahead`
    compute steps before the backward, so that the copy back goes on while those run.

    Args:
        schedule: Schedule with or without messages and steps of sharded parameters.
        places: The (stage, microbatch) of the forwards; default: all that have a backward and at
            least one compute step between the two copies.
        ahead: Compute steps, at least 0.

    Raises:
        ValueError: If `ahead` is negative, or a place is not in the schedule or has such steps
            already.
    """
    if ahead < 0:
        raise ValueError(f"ahead ({ahead}) must be >= 0")
    chosen = _chosen(schedule, places)
    return schedule.with_rows(
        offloading(row.codes(), chosen, ahead, every=places is None) for row in schedule.steps
    )


def drop_retention(schedule: Schedule) -> Schedule:
    """Return a schedule without its RECOMPUTE, OFFLOAD and RELOAD steps."""
    return schedule.with_rows(
        [code for code in row.codes() if code < 0 or code & KIND_MASK not in RETENTION_KINDS]
        for row in schedule.steps
    )


def _chosen(schedule: Schedule, places: Places | None) -> frozenset[int]:
    """Return the codes of the forwards at some places."""
    codes = [leaf for row in schedule.steps for code in row.codes() for leaf in leaves(code)]
    taken = {code & _PLACE for code in codes if code >= 0 and code & KIND_MASK in RETENTION_KINDS}
    there = {code & _PLACE for code in codes if code >= 0 and code & KIND_MASK in {BWD, BWD_INPUT}}
    if places is None:
        return frozenset(there - taken)
    chosen: set[int] = set()
    for stage, microbatch in places:
        code = encode(FWD, stage, microbatch)
        chosen.add(code)
        if code not in there:
            raise ValueError(f"place ({stage}, {microbatch}) must have a backward in the schedule")
        if code in taken:
            raise ValueError(
                f"place ({stage}, {microbatch}) must have no RECOMPUTE, OFFLOAD or RELOAD step"
            )
    return frozenset(chosen)


def recomputing(row: list[int], chosen: AbstractSet[int]) -> list[int]:
    """Return a row in which forwards, which are known by their codes, run again."""
    if not chosen:
        return row
    result: list[int] = []
    for code in row:
        backwards = (leaf for leaf in leaves(code) if leaf & KIND_MASK in {BWD, BWD_INPUT})
        result += [leaf & _PLACE | RECOMPUTE for leaf in backwards if leaf & _PLACE in chosen]
        result.append(code)
    return result


def offloading(
    row: list[int], chosen: AbstractSet[int], ahead: int, *, every: bool = False
) -> list[int]:
    """Return a row in which saved tensors of forwards are copied away and back; see `add_offload`.

    Args:
        row: Codes of a rank's steps.
        chosen: Codes of the forwards.
        ahead: Compute steps between a copy back and its backward.
        every: Whether those are left out that have no compute step between the two copies.
    """
    if not chosen:
        return row
    computes = [cell for cell, code in enumerate(row) if is_compute(code)]
    order = {cell: number for number, cell in enumerate(computes)}
    first = _cells(row, lambda kind: kind == FWD)
    last = _cells(row, lambda kind: kind in {BWD, BWD_INPUT})
    inserted: dict[int, list[int]] = {}
    for place in sorted(chosen & first.keys() & last.keys(), key=first.__getitem__):
        begin, end = order[first[place]], order[last[place]]
        back = computes[max(begin + 1, end - ahead)]
        if every and back - first[place] <= 1:
            continue
        out = first[place] + 1
        while out < back and row[out] & KIND_MASK == FWD_SEND:
            out += 1
        # A copy back goes behind the copies out that stand at the same cell.
        inserted.setdefault(out, []).insert(0, place | OFFLOAD)
        inserted.setdefault(back, []).append(place | RELOAD)
    return [step for cell, code in enumerate(row) for step in (*inserted.get(cell, ()), code)]


def _cells(row: list[int], is_wanted: Callable[[int], bool]) -> dict[int, int]:
    """Return the cell of each place's step of some kind."""
    return {
        leaf & _PLACE: cell
        for cell, code in enumerate(row)
        if code >= 0
        for leaf in leaves(code)
        if is_wanted(leaf & KIND_MASK)
    }
