"""Schedules on a terminal; timelines as a picture that stands alone, and as a Chrome trace."""

import math
from collections.abc import Mapping
from html import escape
from typing import Any

from hp_schedule.costs import Costs
from hp_schedule.schedule import Schedule
from hp_schedule.simulation.recurrence import compute_clock
from hp_schedule.steps import MetaStep, MetaStepType, leaves, unpack
from hp_schedule.timeline import Span, Timeline

_NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'
_LEFT = 76.0
_PLOT = 980.0
_RIGHT = 84.0
_WIDTH = _LEFT + _PLOT + _RIGHT
_ROW = 26.0
_GAP = 5.0
_TITLE = 34.0
_AXIS = 26.0
_PANEL_GAP = 18.0
_LEGEND = 34.0
_DIGIT = 6.4
"""Width of a digit of the cell text."""


_MICROSECONDS = 1e6


_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input backward",
    "W": "weight backward",
    "R": "forward run again",
    "wait": "waiting for a message",
}

# Tones of a rank's first, second and third stage (then again), all readable under white text on a
# light and on a dark page.
_TONES = {
    "F": ("#3d7de0", "#2456ab", "#6a93d8"),
    "B": ("#12946f", "#0b6b50", "#4aa38a"),
    "I": ("#bd731a", "#8a5210", "#c08d4f"),
    "W": ("#8657cf", "#6238a6", "#a283d3"),
    "R": ("#6c7a89", "#4a5663", "#8a96a3"),
    "wait": ("#d6336c",),
}

_STYLE = """
.page{fill:#ffffff}
text{font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;
font-size:12px;fill:#24292f}
.title{font-size:14px;font-weight:600}
.muted{fill:#6e7781;font-weight:400;font-size:12px}
.end{text-anchor:end}
.mid{text-anchor:middle}
.cell{font-size:11px;text-anchor:middle;fill:#ffffff;pointer-events:none}
.grid{stroke:#d0d7de;stroke-width:1}
.lane{fill:#f3f5f7}
@media (prefers-color-scheme:dark){.page{fill:#0d1117}text{fill:#e6edf3}.muted{fill:#8b949e}
.cell{fill:#ffffff}.grid{stroke:#30363d}.lane{fill:#161b22}}
"""

_LETTER = {
    MetaStepType.FWD: "F",
    MetaStepType.BWD: "B",
    MetaStepType.BWD_INPUT: "I",
    MetaStepType.BWD_WEIGHT: "W",
    MetaStepType.RECOMPUTE: "R",
}


def timeline_svg(timelines: Mapping[str, Timeline], *, in_seconds: bool = True) -> str:
    """Return timelines stacked over one time axis, one row per rank.

    Compute steps are blocks with their microbatch where it fits, in another tone for each of a
    rank's stages; a wait for a message is a thin line. Every row ends with its share of bubble.
    Pointing at a block tells step and times.

    Args:
        timelines: Timelines by title, for example a plan and a measurement; each starts at 0.
        in_seconds: Whether times are seconds; otherwise they are printed as numbers of units.

    Raises:
        ValueError: If there is no timeline.
    """
    if not timelines:
        raise ValueError("timelines (0) must be at least 1")
    longest = max(timeline.makespan for timeline in timelines.values())
    body: list[str] = []
    top = 10.0
    for title, timeline in timelines.items():
        panel = _Panel(title, timeline, longest=longest, top=top, in_seconds=in_seconds)
        body += panel.draw()
        top = panel.bottom + _AXIS + _PANEL_GAP
    body += _legend(timelines, top)
    width, high = f"{_WIDTH:g}", f"{top + _LEGEND:g}"
    size = f"{width} {high}"
    return "\n".join(
        (
            f'<svg {_NAMESPACE} viewBox="0 0 {size}" width="{width}" height="{high}" role="img">',
            f"<title>Pipeline timeline: {escape(' and '.join(timelines))}</title>",
            f"<style>{_STYLE}{_tone_styles()}</style>",
            f'<rect class="page" width="{width}" height="{high}"/>',
            *body,
            "</svg>\n",
        )
    )


class _Panel:
    """One timeline: title, a lane per rank, axis.

    Args:
        title: Above the lanes.
        timeline: What is drawn.
        longest: Time that the axis spans.
        top: Where the panel begins, in pixels.
        in_seconds: Whether times are seconds.
    """

    def __init__(
        self, title: str, timeline: Timeline, *, longest: float, top: float, in_seconds: bool
    ) -> None:
        self._in_seconds = in_seconds
        self._title = title
        self._timeline = timeline
        self._origin = timeline.start
        self._longest = longest
        self._scale = _PLOT / longest if longest > 0 else 0.0
        self._top = top
        self._lanes = [top + _TITLE + rank * (_ROW + _GAP) for rank in range(timeline.num_ranks)]
        self._tones = _tones(timeline)
        self.bottom = top + _TITLE + timeline.num_ranks * (_ROW + _GAP)

    def draw(self) -> list[str]:
        """Return the elements of the panel."""
        parts = [*self._heading(), *self._frame(), *self._axis()]
        for span in self._timeline:
            parts += self._block(span)
        return parts

    def _heading(self) -> list[str]:
        bubble = self._timeline.bubble
        average = sum(bubble) / len(bubble) if bubble else 0.0
        unit, factor = _unit(self._longest, self._in_seconds)
        summary = f"{_number(self._timeline.makespan * factor)} {unit}, bubble {average:.1%}"
        y = self._top + 18
        title = f'<text class="title" x="{_LEFT:g}" y="{y:g}">{escape(self._title)}'
        return [
            f'{title}<tspan class="muted" dx="10">{summary}</tspan></text>',
            f'<text class="muted end" x="{_WIDTH - 14:g}" y="{y:g}">bubble</text>',
        ]

    def _frame(self) -> list[str]:
        parts = []
        for rank, (y, bubble) in enumerate(zip(self._lanes, self._timeline.bubble, strict=True)):
            middle = f"{y + _ROW / 2 + 4:g}"
            parts += [
                f'<rect class="lane" x="{_LEFT:g}" y="{y:g}" width="{_PLOT:g}" height="{_ROW:g}"/>',
                f'<text class="end" x="{_LEFT - 10:g}" y="{middle}">rank {rank}</text>',
                f'<text class="muted end" x="{_WIDTH - 14:g}" y="{middle}">{bubble:.1%}</text>',
            ]
        return parts

    def _axis(self) -> list[str]:
        unit, factor = _unit(self._longest, self._in_seconds)
        step = _tick(self._longest)
        last = int(self._longest / step * (1 + 1e-9)) if step > 0 else 0
        y1, y2 = self._top + _TITLE - 4, self.bottom
        parts = []
        for index in range(last + 1):
            x = f"{_LEFT + index * step * self._scale:.2f}"
            label = _number(index * step * factor) + (f" {unit}" if index == last else "")
            parts += [
                f'<line class="grid" x1="{x}" y1="{y1:g}" x2="{x}" y2="{y2:g}"/>',
                f'<text class="muted mid" x="{x}" y="{y2 + 14:g}">{label}</text>',
            ]
        return parts

    def _block(self, span: Span) -> list[str]:
        x = _LEFT + (span.start - self._origin) * self._scale
        y = self._lanes[span.rank]
        width = (span.end - span.start) * self._scale
        tip = f"<title>{escape(_tip(span, self._origin, self._in_seconds))}</title>"
        if not span.step.type.is_compute:
            return [_rect("wait0", (x, y + _ROW - 3, width, 3), tip)] if width > 0 else []
        leaves = list(span.step.leaves())
        height = _ROW / len(leaves)
        parts = []
        for index, leaf in enumerate(leaves):
            top = y + index * height
            tone = self._tones[span.rank, leaf.stage_index or 0]
            parts.append(_rect(f"{_LETTER[leaf.type]}{tone}", (x, top, width, height), tip))
            text = str(leaf.microbatch_index)
            if width >= len(text) * _DIGIT + 3:
                place = f'x="{x + width / 2:.2f}" y="{top + height / 2 + 4:.2f}"'
                parts.append(f'<text class="cell" {place}>{text}</text>')
        return parts


def _rect(name: str, box: tuple[float, float, float, float], tip: str = "") -> str:
    """Return a block of a class; the box is x, y, width and height."""
    x, y, width, height = box
    # A hair of space between blocks, but never so much that a short block disappears.
    inner = max(width - 0.8, width * 0.6)
    return (
        f'<rect class="{name}" x="{x:.2f}" y="{y:.2f}" width="{inner:.2f}" height="{height:.2f}" '
        f'rx="{min(2.0, inner / 4):.2f}">{tip}</rect>'
    )


def _legend(timelines: Mapping[str, Timeline], top: float) -> list[str]:
    present = {
        _LETTER.get(leaf.type, "wait")
        for timeline in timelines.values()
        for span in timeline
        for leaf in span.step.leaves()
    }
    parts = []
    x = _LEFT
    for letter, name in _NAMES.items():
        if letter in present:
            offset, height = (8.5, 3.0) if letter == "wait" else (4.0, 12.0)
            parts.append(_rect(f"{letter}0", (x, top + offset, 18.0, height)))
            parts.append(f'<text x="{x + 24:g}" y="{top + 14:g}">{name}</text>')
            x += 24 + 6.6 * len(name) + 22
    several = any(tone > 0 for timeline in timelines.values() for tone in _tones(timeline).values())
    note = "numbers are microbatches" + (", tones a rank's stages" if several else "")
    parts.append(f'<text class="muted" x="{x:g}" y="{top + 14:g}">{note}</text>')
    return parts


def _tone_styles() -> str:
    return "".join(
        f".{letter}{index}{{fill:{colour}}}"
        for letter, colours in _TONES.items()
        for index, colour in enumerate(colours)
    )


def _tones(timeline: Timeline) -> dict[tuple[int, int], int]:
    """Return the tone of each (rank, stage)."""
    stages: dict[int, set[int]] = {}
    for span in timeline:
        for leaf in span.step.leaves():
            stages.setdefault(span.rank, set()).add(leaf.stage_index or 0)
    return {
        (rank, stage): index % len(_TONES["F"])
        for rank, local in stages.items()
        for index, stage in enumerate(sorted(local))
    }


def _tip(span: Span, origin: float, in_seconds: bool) -> str:
    unit, factor = _unit(span.end - origin, in_seconds)
    start, end = (_number((time - origin) * factor) for time in (span.start, span.end))
    what = " with ".join(_describe(leaf) for leaf in span.step.leaves())
    return f"rank {span.rank}, {what}: {start} to {end} {unit}"


def _describe(step: MetaStep) -> str:
    name = _NAMES[_LETTER.get(step.type, "wait")]
    return f"{name} of stage {step.stage_index}, microbatch {step.microbatch_index}"


def _unit(longest: float, in_seconds: bool) -> tuple[str, float]:
    """Return the unit for times up to `longest`, and the factor for it."""
    if not in_seconds:
        return "units", 1.0
    large = ((unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e3)) if longest * factor >= 1)
    return next(large, ("us", 1e6))


def _tick(longest: float) -> float:
    """Return the round distance (1, 2 or 5 times a power of ten) that makes 5 to 12 ticks."""
    if longest <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(longest / 10))
    return next(power * m for m in (1, 2, 5, 10) if longest / (power * m) <= 12)


def _number(value: float) -> str:
    return f"{value:.4g}"


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return timelines in Chrome's Trace Event format, ready for ``json.dump``.

    Every timeline is a process and every rank a thread; each starts at 0. Spans become complete
    events ("X") named like their step, with stage, microbatch and type as arguments.

    Args:
        timelines: Timelines by title, in seconds.
    """
    events: list[dict[str, object]] = []
    for pid, (title, timeline) in enumerate(timelines.items()):
        events.append(_metadata("process_name", pid, 0, {"name": title}))
        events.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
        for rank in range(timeline.num_ranks):
            events.append(_metadata("thread_name", pid, rank, {"name": f"rank {rank}"}))
            events.append(_metadata("thread_sort_index", pid, rank, {"sort_index": rank}))
        origin = timeline.start
        events.extend(_event(span, pid, origin) for span in timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(name: str, pid: int, tid: int, args: dict[str, object]) -> dict[str, object]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _event(span: Span, pid: int, origin: float) -> dict[str, object]:
    leaves = list(span.step.leaves())
    return {
        "name": str(span.step),
        "cat": span.step.type.name,
        "ph": "X",
        "pid": pid,
        "tid": span.rank,
        "ts": (span.start - origin) * _MICROSECONDS,
        "dur": (span.end - span.start) * _MICROSECONDS,
        "args": {
            "type": [leaf.type.name for leaf in leaves],
            "stage": [leaf.stage_index for leaf in leaves],
            "microbatch": [leaf.microbatch_index for leaf in leaves],
        },
    }


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
        cells = [str(row[line] or "") if line < len(row) else "" for row in schedule.steps]
        if mark is not None and mark[1] == line:
            cells[mark[0]] = f">{cells[mark[0]]}<"
        table.append([str(line), *cells])
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
    if mark is not None:
        lines[1 + mark[1] - first] += "   <-- here"
    return "\n".join(lines)


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
