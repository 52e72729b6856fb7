"""Pictures of a run: the loss curve, and the pipeline's timeline as planned and as it went."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from hp_base.folder import Folder
from hp_base.svg import text, ticks
from hp_platform import all_gather_json
from hp_schedule import (
    MetaStep,
    Schedule,
    Span,
    Timeline,
    chrome_trace,
    measured_costs,
    simulate,
    timeline_svg,
)
from hp_trainer.layout.mesh import Mesh
from hp_trainer.training.metrics import read_metrics

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 360, 56, 16, 40, 44
_COLOURS = ("#4c78a8", "#e45756", "#54a24b")
_LOSSES = {"loss": "training", "eval_loss": "held out"}
_MFU = {"mfu": "%"}
_MEMORY = {
    "reserved_memory_bytes": "reserved",
    "peak_memory_bytes": "allocated at most",
    "allocated_memory_bytes": "between steps",
}


class _Timed(NamedTuple):
    """A `Span` as ranks send it, its step as text."""

    rank: int
    step: str
    start: float
    end: float


def planned_and_actual(
    schedule: Schedule, timeline: Timeline, mesh: Mesh, *, control: ProcessGroup
) -> dict[str, Timeline]:
    """Return one step of the first pipeline: as it went, and as simulated with its costs.

    All ranks call this together.

    Args:
        schedule: What was run.
        timeline: This rank's spans.
        mesh: Mesh of the run.
        control: Group over all ranks for objects.

    Returns:
        ``planned`` and ``actual``, the same on every rank.
    """
    mine = [_Timed(span.rank, str(span.step), span.start, span.end) for span in timeline]
    everyone = all_gather_json(mine, of=list[_Timed], group=control)
    first_ranks = [stage.first for stage in mesh.layout.stages]
    actual = Timeline(
        Span(span.rank, MetaStep.from_str(span.step), span.start, span.end)
        for rank in first_ranks
        for span in everyone[rank]
    )
    costs = measured_costs(
        actual, num_stages=schedule.num_stages, num_microbatches=schedule.num_microbatches
    )
    return {"planned": simulate(schedule, costs).timeline, "actual": actual}


def write_report(folder: Folder, timelines: Mapping[str, Timeline]) -> None:
    """Write the pictures of a run into its directory: loss.svg, timeline.svg and timeline.json.

    Of GPUs also memory.svg, and mfu.svg where their peak is known.

    Args:
        folder: Run directory; holds metrics.jsonl.
        timelines: Timelines by title, for example ``{"planned": ..., "actual": ...}``; none: the
            timeline is left out.
    """
    keys = ("step", *_LOSSES, *_MFU, *_MEMORY)
    rows = [{key: row.get(key) for key in keys} for _, row in read_metrics(folder)]
    folder.replace("loss.svg", loss_curve_svg(rows).encode())
    if any(row["mfu"] is not None for row in rows):
        svg = _curves_svg("model FLOPs utilization (%)", rows, _MFU, scale=100.0)
        folder.replace("mfu.svg", svg.encode())
    if any(row["reserved_memory_bytes"] is not None for row in rows):
        svg = _curves_svg("memory (GiB)", rows, _MEMORY, scale=2.0**-30)
        folder.replace("memory.svg", svg.encode())
    if timelines:
        folder.replace("timeline.svg", timeline_svg(timelines).encode())
        folder.replace("timeline.json", json.dumps(chrome_trace(timelines)).encode())


def loss_curve_svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the training and held-out loss over steps as an SVG picture.

    Args:
        rows: Lines of metrics.jsonl.
    """
    return _curves_svg("loss (nats per token)", rows, _LOSSES)


def _curves_svg(
    title: str, rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str], *, scale: float = 1.0
) -> str:
    """Return some keys of metrics.jsonl over the steps, times a factor, as a picture."""
    series = {
        key: [(row["step"], row[key] * scale) for row in rows if row.get(key) is not None]
        for key in labels
    }
    points = [point for line in series.values() for point in line] or [(0, 0.0), (1, 1.0)]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    x_ticks, y_ticks = ticks(x_low, x_high), ticks(y_low, y_high)
    x_span, y_span = max(x_high - x_low, 1e-9), max(y_high - y_low, 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x_low) / x_span * (_WIDTH - _LEFT - _RIGHT)
        down = _TOP + (y_high - y) / y_span * (_HEIGHT - _TOP - _BOTTOM)
        return round(across, 1), round(down, 1)

    parts = [text(_LEFT, 22, title)]
    for y in y_ticks:
        _, down = place(x_low, y)
        parts.append(f'<path class="grid" d="M{_LEFT} {down}H{_WIDTH - _RIGHT}"/>')
        parts.append(text(_LEFT - 8, down + 4, f"{y:g}", "end"))
    for x in x_ticks:
        across, _ = place(x, y_low)
        parts.append(text(across, _HEIGHT - _BOTTOM + 18, f"{x:g}", "middle"))
    parts.append(text(_WIDTH / 2, _HEIGHT - 8, "step", "middle"))
    for number, (key, line) in enumerate(series.items()):
        if line:
            colour = _COLOURS[number]
            path = "M" + "L".join(f"{x} {y}" for x, y in (place(*point) for point in line))
            parts.append(f'<path class="line" stroke="{colour}" d="{path}"/>')
            last = f"{labels[key]} {line[-1][1]:.3f}"
            across = _WIDTH - _RIGHT - 150 * (len(series) - number - 1)
            parts.append(text(across, 22, last, "end", f"fill:{colour}"))
    return _SVG.format(width=_WIDTH, height=_HEIGHT, body="\n".join(parts))


_SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
font-family="system-ui, sans-serif" font-size="12">
<style>
text {{ fill: #24292f }} .grid {{ stroke: #8884; fill: none }}
.line {{ fill: none; stroke-width: 1.6; stroke-linejoin: round }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #d0d7de }} }}
</style>
{body}
</svg>
"""
