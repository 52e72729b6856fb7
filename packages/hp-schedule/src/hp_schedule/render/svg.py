"""Timelines as a picture that stands alone, on light and on dark pages."""

import math
from collections.abc import Mapping
from html import escape

from hp_schedule.ir import MetaStep, MetaStepType
from hp_schedule.timeline import Span, Timeline

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

_NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input backward",
    "W": "weight backward",
    "wait": "waiting for a message",
}

# Tones of a rank's first, second and third stage (then again), all readable under white text on a
# light and on a dark page.
_TONES = {
    "F": ("#3d7de0", "#2456ab", "#6a93d8"),
    "B": ("#12946f", "#0b6b50", "#4aa38a"),
    "I": ("#bd731a", "#8a5210", "#c08d4f"),
    "W": ("#8657cf", "#6238a6", "#a283d3"),
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
}


def timeline_svg(timelines: Mapping[str, Timeline]) -> str:
    """Return timelines stacked over one time axis, one row per rank.

    Compute steps are blocks with their microbatch where it fits, in another tone for each of a
    rank's stages; a wait for a message is a thin line. Every row ends with its share of bubble. Pointing
    at a block tells step and times.

    Args:
        timelines: By title, in seconds, for example a plan and a measurement; each starts at 0.

    Raises:
        ValueError: If there is no timeline.
    """
    if not timelines:
        raise ValueError("timelines (0) must be at least 1")
    longest = max(timeline.makespan for timeline in timelines.values())
    scale = _PLOT / longest if longest > 0 else 0.0
    body: list[str] = []
    top = 10.0
    for title, timeline in timelines.items():
        body += _panel(title, timeline, scale, longest, top)
        top += _TITLE + timeline.num_ranks * (_ROW + _GAP) + _AXIS + _PANEL_GAP
    body += _legend(timelines, top)
    height = top + _LEGEND
    title_text = escape(" and ".join(timelines))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH:g} {height:g}" '
            f'width="{_WIDTH:g}" height="{height:g}" role="img">',
            f"<title>Pipeline timeline: {title_text}</title>",
            f"<style>{_STYLE}{_tone_styles()}</style>",
            f'<rect class="page" width="{_WIDTH:g}" height="{height:g}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(title: str, timeline: Timeline, scale: float, longest: float, top: float) -> list[str]:
    bubble = timeline.bubble
    average = sum(bubble) / len(bubble) if bubble else 0.0
    unit, factor = _unit(longest)
    summary = f"{_number(timeline.makespan * factor)} {unit}, bubble {average:.1%}"
    first = top + _TITLE
    bottom = first + timeline.num_ranks * (_ROW + _GAP)
    parts = [
        f'<text class="title" x="{_LEFT:g}" y="{top + 18:g}">{escape(title)}'
        f'<tspan class="muted" dx="10">{summary}</tspan></text>',
        f'<text class="muted end" x="{_WIDTH - 14:g}" y="{top + 18:g}">bubble</text>',
    ]
    rows = [first + rank * (_ROW + _GAP) for rank in range(timeline.num_ranks)]
    for rank, y in enumerate(rows):
        middle = y + _ROW / 2 + 4
        parts += [
            f'<rect class="lane" x="{_LEFT:g}" y="{y:g}" width="{_PLOT:g}" height="{_ROW:g}"/>',
            f'<text class="end" x="{_LEFT - 10:g}" y="{middle:g}">rank {rank}</text>',
            f'<text class="muted end" x="{_WIDTH - 14:g}" y="{middle:g}">{bubble[rank]:.1%}</text>',
        ]
    parts += _axis(scale, longest, first - 4, bottom)
    tones = _tones(timeline)
    for span in timeline:
        parts += _block(span, timeline.start, scale, rows[span.rank], tones)
    return parts


def _axis(scale: float, longest: float, top: float, bottom: float) -> list[str]:
    unit, factor = _unit(longest)
    parts = []
    step = _tick(longest)
    count = int(longest / step * (1 + 1e-9)) if step > 0 else 0
    for index in range(count + 1):
        x = _LEFT + index * step * scale
        label = _number(index * step * factor)
        last = f" {unit}" if index == count else ""
        parts += [
            f'<line class="grid" x1="{x:.2f}" y1="{top:g}" x2="{x:.2f}" y2="{bottom:g}"/>',
            f'<text class="muted mid" x="{x:.2f}" y="{bottom + 14:g}">{label}{last}</text>',
        ]
    return parts


def _block(
    span: Span, origin: float, scale: float, y: float, tones: Mapping[tuple[int, int], int]
) -> list[str]:
    x = _LEFT + (span.start - origin) * scale
    width = (span.end - span.start) * scale
    tip = f"<title>{escape(_tip(span, origin))}</title>"
    if not span.step.type.is_compute:
        return [_rect("wait0", x, y + _ROW - 3, width, 3, tip)] if width > 0 else []
    leaves = list(span.step.leaves())
    height = _ROW / len(leaves)
    parts = []
    for index, leaf in enumerate(leaves):
        top = y + index * height
        tone = tones[span.rank, leaf.stage_index or 0]
        parts.append(_rect(f"{_LETTER[leaf.type]}{tone}", x, top, width, height, tip))
        text = str(leaf.microbatch_index)
        if width >= len(text) * _DIGIT + 3:
            parts.append(
                f'<text class="cell" x="{x + width / 2:.2f}" y="{top + height / 2 + 4:.2f}">'
                f"{text}</text>"
            )
    return parts


def _rect(name: str, x: float, y: float, width: float, height: float, tip: str = "") -> str:
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
            size = (18.0, 3.0, 8.5) if letter == "wait" else (18.0, 12.0, 4.0)
            parts.append(_rect(f"{letter}0", x, top + size[2], size[0], size[1]))
            parts.append(f'<text x="{x + 24:g}" y="{top + 14:g}">{name}</text>')
            x += 24 + 6.6 * len(name) + 22
    note = "numbers are microbatches, tones a rank's stages"
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


def _tip(span: Span, origin: float) -> str:
    unit, factor = _unit(span.end - origin)
    start, end = (_number((time - origin) * factor) for time in (span.start, span.end))
    what = " with ".join(_describe(leaf) for leaf in span.step.leaves())
    return f"rank {span.rank}, {what}: {start} to {end} {unit}"


def _describe(step: MetaStep) -> str:
    name = _NAMES[_LETTER.get(step.type, "wait")]
    return f"{name} of stage {step.stage_index}, microbatch {step.microbatch_index}"


def _unit(longest: float) -> tuple[str, float]:
    """Return the unit for times up to `longest` seconds, and how many of it a second has."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if longest * factor >= 1 or unit == "us":
            break
    return unit, factor


def _tick(longest: float) -> float:
    """Return the round distance (1, 2 or 5 times a power of ten) that makes 5 to 12 ticks."""
    if longest <= 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(longest / 10))
    return next(power * m for m in (1, 2, 5, 10) if longest / (power * m) <= 12)


def _number(value: float) -> str:
    return f"{value:.4g}"
