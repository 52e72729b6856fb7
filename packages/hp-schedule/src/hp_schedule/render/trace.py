"""Timelines as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from collections.abc import Mapping
from typing import Any

from hp_schedule.timeline import Span, Timeline

_MICROSECONDS = 1e6


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
