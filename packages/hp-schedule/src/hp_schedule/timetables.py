"""Schedules on a terminal."""

from hp_schedule.costs import Costs
from hp_schedule.schedule import Schedule
from hp_schedule.simulation.recurrence import compute_clock
from hp_schedule.steps import MetaStep, MetaStepType, leaves, unpack


def timetable(schedule: Schedule) -> str:
    """Return one line per rank, one column per unit of time.

    A forward, an input backward, a weight backward and a forward that is run again (R) take one
    column, a full backward two, and messages and copies none. Other steps are written as in the
    notation; with one stage per rank, where the rank says it, without the stage.

    Raises:
        DeadlockError: If the compute steps contradict each other.
    """
    one_stage = schedule.stage_to_rank == tuple(range(schedule.num_ranks))
    rows: list[list[str]] = []
    for codes, finish in zip(*compute_clock(schedule, Costs()), strict=True):
        cells: list[str] = []
        for code, end in zip(codes, finish, strict=True):
            width = sum(_UNITS[part.type.value] for part in unpack(code).leaves())
            cells += ["."] * (int(end) - width - len(cells))
            texts = [_label(unpack(part), one_stage=one_stage) for part in leaves(code)]
            cells += ["+".join(texts), *["-"] * (width - 1)]
        rows.append(cells)
    return _align(rows)


_UNITS = {"F": 1, "B": 2, "I": 1, "W": 1, "RECOMPUTE": 1}


def step_grid(schedule: Schedule, *, mark: tuple[int, int] | None = None, context: int = 6) -> str:
    """Return the rows as they stand: one column per rank, one line per cell.

    Args:
        schedule: Valid or not.
        mark: Rank and cell to mark; then only the lines around it are shown.
        context: Lines before and after the marked one.
    """
    num_lines = max((len(row) for row in schedule.steps), default=0)
    first, last = 0, num_lines
    if mark is not None:
        first, last = max(0, mark[1] - context), max(num_lines, mark[1] + 1)
        last = min(last, mark[1] + context + 1)
    table = [["cell", *(f"rank {rank}" for rank in range(schedule.num_ranks))]]
    for line in range(first, last):
        cells = [_cell(schedule, rank, line) for rank in range(schedule.num_ranks)]
        if mark is not None and mark[1] == line:
            cells[mark[0]] = f">{cells[mark[0]]}<"
        table.append([str(line), *cells])
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
    if mark is not None:
        lines[1 + mark[1] - first] += "   <-- here"
    return "\n".join(lines)


def _cell(schedule: Schedule, rank: int, line: int) -> str:
    row = schedule.steps[rank]
    step = row[line] if line < len(row) else None
    return "" if step is None else str(step)


def _label(step: MetaStep, *, one_stage: bool) -> str:
    letter = "R" if step.type is MetaStepType.RECOMPUTE else step.type.value
    stage = "" if one_stage else step.stage_index
    return f"{stage}{letter}{step.microbatch_index}"


def _align(rows: list[list[str]]) -> str:
    width = max((len(cell) for row in rows for cell in row), default=1)
    margin = len(f"rank {len(rows) - 1}")
    return "\n".join(
        f"{f'rank {rank}'.ljust(margin)} | {' '.join(cell.ljust(width) for cell in row)}".rstrip()
        for rank, row in enumerate(rows)
    )
