"""Memory over a run as a picture that stands alone, on light and on dark pages. No torch."""

from collections.abc import Sequence
from html import escape
from itertools import accumulate

from hp_base.messages import size
from hp_base.svg import text, ticks
from hp_dry.report.usage import Memory, Point
from hp_dry.trace import KINDS

_NAMESPACE = 'xmlns="http://www.w3.org/2000/svg"'
_WIDTH, _HEIGHT = 1040, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 78, 62
_GIB = 2**30
_LETTER = 6.6
"""Approximate width of a letter."""

# Colours for readers who cannot distinguish red from green (after Paul Tol's "muted"), on light and
# on dark pages, from the bottom up.
_COLOURS = {
    "parameters": ("#332288", "#6f63c9"),
    "optimizer": ("#88ccee", "#88ccee"),
    "gradients": ("#117733", "#2f9b57"),
    "gathered parameters": ("#ddcc77", "#ddcc77"),
    "casts": ("#aa4499", "#bf62b0"),
    "activations": ("#44aa99", "#44aa99"),
    "exchange buffers": ("#999933", "#a9a948"),
    "logits": ("#cc6677", "#d97b8b"),
    "other": ("#bbbbbb", "#8b949e"),
}

_STYLE = """
.curve{font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif;
font-size:12px}
.curve text{fill:#24292f}
.curve .page{fill:#ffffff}
.curve .title{font-size:14px;font-weight:600}
.curve .muted{fill:#57606a}
.curve .grid{stroke:#d0d7de;fill:none}
.curve .band{fill:#f3f5f7}
.curve .area{stroke:#ffffff;stroke-width:.5}
.curve .reserved{fill:none;stroke:#24292f;stroke-width:1.5;stroke-dasharray:5 3}
.curve .limit{fill:none;stroke:#b3261e;stroke-width:1.5}
.curve .peak{fill:#ffffff;stroke:#24292f;stroke-width:1.5}
.curve .at{stroke:#24292f;stroke-dasharray:1 3;fill:none}
@media (prefers-color-scheme:dark){.curve text{fill:#e6edf3}.curve .page{fill:#0d1117}
.curve .muted{fill:#9da7b1}.curve .grid{stroke:#30363d}.curve .band{fill:#161b22}
.curve .area{stroke:#0d1117}.curve .reserved{stroke:#e6edf3}.curve .limit{stroke:#ff8a80}
.curve .peak{fill:#0d1117;stroke:#e6edf3}.curve .at{stroke:#e6edf3}}
"""


def colours() -> str:
    """Return the CSS of the classes `kind0`, `kind1`, ... of `KINDS`, for areas and swatches."""
    light, dark = (
        "".join(
            f".kind{index}{{fill:{_COLOURS[kind][tone]};background-color:{_COLOURS[kind][tone]}}}"
            for index, kind in enumerate(KINDS)
        )
        for tone in (0, 1)
    )
    return f"{light}@media (prefers-color-scheme:dark){{{dark}}}"


def curve_svg(memory: Memory, *, title: str, gpu_bytes: int) -> str:
    """Draw memory by kind over a run, with the reserved memory.

    Args:
        memory: Memory of one rank.
        title: Heading of the picture.
        gpu_bytes: Bytes of memory of the device, marked by a line if the curve comes near.

    Returns:
        SVG without references to other files.
    """
    what = f"{title}: memory over the run, {size(memory.peak_live)} live at the peak"
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    return "\n".join(
        (
            f'<svg {_NAMESPACE} class="curve" {box} role="img" aria-label="{escape(what)}">',
            f"<title>{escape(what)}</title>",
            f"<style>{_STYLE}{colours()}</style>",
            f'<rect class="page" width="{_WIDTH}" height="{_HEIGHT}"/>',
            f'<text class="title" x="{_LEFT}" y="24">{escape(title)}</text>',
            *_Drawing(memory, gpu_bytes).parts(),
            "</svg>\n",
        )
    )


class _Drawing:
    """Parts of the picture.

    Args:
        memory: Memory of one rank.
        gpu_bytes: Bytes of memory of the device.
    """

    def __init__(self, memory: Memory, gpu_bytes: int) -> None:
        self._memory = memory
        self._points = memory.curve or (Point(0, (0,) * len(KINDS), 0),)
        self._gpu_bytes = gpu_bytes
        highest = max(memory.highest, 1)
        self._shows_limit = 0.5 * gpu_bytes < highest < 2 * gpu_bytes
        self._highest = 1.06 * max(highest, gpu_bytes if self._shows_limit else 0)
        self._last = max(self._points[-1].launches, 1)

    def parts(self) -> list[str]:
        """Return all parts, the background first."""
        return [
            *self._bands(),
            *self._axes(),
            *self._areas(),
            *self._lines(),
            *self._peak(),
            *self._legend(),
        ]

    def _x(self, launches: int) -> float:
        return round(_LEFT + launches / self._last * (_WIDTH - _LEFT - _RIGHT), 1)

    def _y(self, number: float) -> float:
        return round(_HEIGHT - _BOTTOM - number / self._highest * (_HEIGHT - _TOP - _BOTTOM), 1)

    def _bands(self) -> list[str]:
        bottom = _HEIGHT - _BOTTOM
        parts = []
        for index, span in enumerate(self._memory.spans):
            left, width = self._x(span.begin), self._x(span.end) - self._x(span.begin)
            if index % 2 and width >= 1:
                box = f'x="{left:g}" y="{_TOP}" width="{width:g}" height="{bottom - _TOP}"'
                parts.append(f'<rect class="band" {box}/>')
            if width > _LETTER * len(span.name):
                parts.append(text(left + width / 2, bottom + 34, span.name, "middle"))
        return parts

    def _axes(self) -> list[str]:
        parts = []
        for gib in ticks(0, self._highest / _GIB):
            y = self._y(gib * _GIB)
            parts.append(f'<path class="grid" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
            parts.append(text(_LEFT - 8, y + 4, f"{gib:g}", "end"))
        parts.append(text(_LEFT - 8, _TOP - 10, "GiB", "end"))
        for launches in ticks(0, self._last, 8):
            x = self._x(int(launches))
            parts.append(text(x, _HEIGHT - _BOTTOM + 16, f"{launches:,.0f}", "middle"))
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        parts.append(text(middle, _HEIGHT - 8, "launches given to the device", "middle"))
        return parts

    def _areas(self) -> list[str]:
        """Return an area for each kind, the largest first, which the later areas cover."""
        order = [KINDS.index(kind) for kind in _COLOURS]
        heights = [list(accumulate(point.live[kind] for kind in order)) for point in self._points]
        parts = []
        for level in reversed(range(len(order))):
            kind = KINDS[order[level]]
            if not any(point.live[order[level]] for point in self._points):
                continue
            line = self._steps([height[level] for height in heights])
            area = f"M{_LEFT} {self._y(0)}L{line}V{self._y(0)}Z"
            most = size(self._memory.peak_by_kind.get(kind, 0))
            tip = f"<title>{escape(kind)}, at most {most}</title>"
            parts.append(f'<path class="area kind{order[level]}" d="{area}">{tip}</path>')
        return parts

    def _steps(self, numbers: Sequence[int]) -> str:
        """Return a line through numbers at the launches of the points, without hidden corners."""
        corners: list[tuple[float, float]] = []
        for point, number in zip(self._points, numbers, strict=True):
            corner = self._x(point.launches), self._y(number)
            if len(corners) > 1 and corners[-1][1] == corners[-2][1] == corner[1]:
                corners[-1] = corner
            elif not corners or corners[-1] != corner:
                corners.append(corner)
        return "L".join(f"{x:g} {y:g}" for x, y in corners)

    def _lines(self) -> list[str]:
        parts, right = [], _WIDTH - _RIGHT
        if self._memory.peak_reserved is not None:
            line = self._steps([point.reserved for point in self._points])
            parts.append(f'<path class="reserved" d="M{line}"><title>reserved</title></path>')
        if self._shows_limit:
            y = self._y(self._gpu_bytes)
            parts.append(f'<path class="limit" d="M{_LEFT} {y}H{right}"/>')
            parts.append(text(right, y - 5, f"{size(self._gpu_bytes)} of the device", "end"))
        return parts

    def _peak(self) -> list[str]:
        memory, peak = self._memory, self._memory.peak
        if peak is None:
            return []
        x, y = self._x(peak.launches), self._y(memory.peak_live)
        where = peak.schedule_step or (f"step {peak.step}" if peak.step >= 0 else "")
        label = f"peak {size(memory.peak_live)}" + (f" in {where}" if where else "")
        side, anchor = (x - 9, "end") if x > _WIDTH / 2 else (x + 9, "start")
        return [
            f'<path class="at" d="M{x:g} {y:g}V{_HEIGHT - _BOTTOM}"/>',
            f'<circle class="peak" cx="{x:g}" cy="{y:g}" r="4"/>',
            text(side, self._y(memory.highest) - 9, label, anchor, "font-weight:600"),
        ]

    def _legend(self) -> list[str]:
        parts = []
        x, y = float(_LEFT), 38
        for kind in [each for each in _COLOURS if each in self._memory.peak_by_kind]:
            swatch = f'class="kind{KINDS.index(kind)}" x="{x:g}" y="{y}" width="12" height="12"'
            parts += [f"<rect {swatch}/>", text(x + 17, y + 10, kind)]
            x += 17 + _LETTER * len(kind) + 14
        if self._memory.peak_reserved is not None:
            parts.append(f'<path class="reserved" d="M{x:g} {y + 6}h22"/>')
            label = f"reserved, at most {size(self._memory.peak_reserved)}"
            parts.append(text(x + 27, y + 10, label))
        return parts
