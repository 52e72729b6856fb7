"""The forward part of a schedule, for evaluation between training steps."""

from collections.abc import Iterator

from hp_schedule.packing import (
    FSDP_RESHARD,
    FSDP_UNSHARD,
    FWD,
    FWD_RECV,
    FWD_SEND,
    KIND_MASK,
    STAGE_MASK,
    STAGE_SHIFT,
    leaves,
)
from hp_schedule.schedule import Schedule

_KEPT = {FWD, FWD_SEND, FWD_RECV}


def forward_part(schedule: Schedule) -> Schedule:
    """Return a schedule without its backwards, the other steps in the same order.

    No forward waits for a step that is dropped, so a sound schedule stays sound. Parameters are
    gathered where a forward follows before they are freed, and not elsewhere.
    """
    return schedule.with_rows(_forward_row(row.codes()) for row in schedule.steps)


def _forward_row(codes: list[int]) -> Iterator[int]:
    used = _spans_with_forward(codes)
    for position, code in enumerate(codes):
        if position in used:
            yield code
        for part in leaves(code) if code >= 0 else ():
            if part & KIND_MASK in _KEPT:
                yield part


def _spans_with_forward(codes: list[int]) -> set[int]:
    """Return the positions of the gathers and frees that have a forward of the stage between."""
    found: set[int] = set()
    gathered: dict[int, int] = {}
    for position, code in enumerate(codes):
        for part in leaves(code) if code >= 0 else ():
            kind, stage = part & KIND_MASK, part >> STAGE_SHIFT & STAGE_MASK
            if kind == FSDP_UNSHARD:
                gathered[stage] = position
            elif kind == FWD and stage in gathered:
                found.add(gathered[stage])
            elif kind == FSDP_RESHARD and gathered.pop(stage, -1) in found:
                found.add(position)
    return found
