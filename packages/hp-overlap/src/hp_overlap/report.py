"""How much of the communication in a profiler's trace is hidden behind compute. No torch here.

A transfer is a kernel of NCCL, or a range that Gloo or `hp_platform.testing.slow_group` recorded.
Compute is every other kernel; where a trace has no kernels, it is the time in which an operator
ran on the host, without that of operators inside it, and without waiting for a transfer or a turn.
Host operators of the backward side are there only if the profiler saw all threads.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Interval = tuple[float, float]
"""Start and end in microseconds."""

EXCHANGES = r"all_?to_?all|SendRecv"
_HOST_TRANSFER = re.compile(r"(gloo|slow):")
_NO_COMPUTE = re.compile(
    r"(_c10d_functional|c10d|gloo|slow|nccl)[:_]|.*(SyncHook|AllToAll|WaitTens)"
)


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer: microseconds, from the trace's own origin."""

    name: str
    start: float
    end: float
    exposed: float


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """What was hidden in one process.

    Attributes:
        process: Its id in the trace; of a GPU, its index.
        transfers: Transfers in the order of their starts.
        total: Microseconds in which at least one transfer ran.
        hidden: Those of them in which compute ran as well.
    """

    process: int | str
    transfers: tuple[Transfer, ...]
    total: float
    hidden: float

    @property
    def fraction(self) -> float:
        """Share of the communication that is hidden; 1 where there is none."""
        return self.hidden / self.total if self.total else 1.0


def overlap_report(trace: Mapping[str, Any], *, match: str = EXCHANGES) -> list[OverlapReport]:
    """Compare transfers with compute, process by process.

    Args:
        trace: A trace in Chrome's JSON format, as torch's profiler exports it.
        match: Which transfers count: a regular expression found in the name, the collective's name
            or the description of its process group, in any case.

    Returns:
        A report for each process that has transfers.

    Raises:
        ValueError: The trace has no events, one is none of torch's, or the expression is none.
    """
    events = _timed_events(trace)
    try:
        wanted = re.compile(match, re.IGNORECASE)
    except re.error as error:
        raise ValueError(f"match ({match!r}) must be a regular expression: {error}") from None
    transfers: dict[int | str, list[Mapping[str, Any]]] = defaultdict(list)
    kernels: dict[int | str, list[Interval]] = defaultdict(list)
    for event in events:
        if _is_transfer(event):
            if wanted.search(_described(event)):
                transfers[event["pid"]].append(event)
        elif event.get("cat") == "kernel":
            kernels[event["pid"]].append(_interval(event))
    reports = []
    for process, found in transfers.items():
        compute = kernels.get(process) or [i for of in kernels.values() for i in of]
        busy = _union(compute or _host_compute(e for e in events if e["pid"] == process))
        reports.append(_report(process, _outermost(found), busy))
    return reports


def _timed_events(trace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    listed = trace.get("traceEvents", ())
    if not isinstance(listed, list | tuple) or not all(isinstance(e, Mapping) for e in listed):
        raise ValueError("traceEvents of the trace must be a list of objects")
    events = [e for e in listed if e.get("ph") == "X" and "dur" in e]
    if not events:
        raise ValueError("traceEvents (0) of the trace must be > 0: is it one of torch.profiler?")
    for event in events:
        if not _is_whole(event):
            raise ValueError(
                f"an event of the trace must have name, pid, ts and dur: {str(event)[:80]}"
            )
    return events


def _is_whole(event: Mapping[str, Any]) -> bool:
    times = (event.get("ts"), event["dur"])
    return (
        all(isinstance(time, int | float) and math.isfinite(time) for time in times)
        and isinstance(event.get("name"), str)
        and isinstance(event.get("pid"), int | str)
        and isinstance(event.get("args", {}), Mapping)
    )


def _report(
    process: int | str, events: Sequence[Mapping[str, Any]], busy: Sequence[Interval]
) -> OverlapReport:
    transfers = []
    for event in events:
        start, end = _interval(event)
        exposed = end - start - _length(_intersection([(start, end)], busy))
        transfers.append(Transfer(event["name"], start, end, exposed))
    communication = _union(map(_interval, events))
    hidden = _length(_intersection(communication, busy))
    return OverlapReport(process, tuple(transfers), _length(communication), hidden)


def _is_transfer(event: Mapping[str, Any]) -> bool:
    if event.get("cat") == "kernel":
        return "nccl" in event["name"].lower()
    # With the same names, the host marks how long it took to launch a kernel of NCCL.
    return event.get("cat") in ("user_annotation", "cpu_op") and bool(
        _HOST_TRANSFER.match(event["name"])
    )


def _outermost(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sort by start and leave out what lies inside another: Gloo's part of a slow transfer."""
    found: list[Mapping[str, Any]] = []
    for event in sorted(events, key=_interval):
        if not found or _interval(event)[1] > _interval(found[-1])[1]:
            found.append(event)
    return found


def _described(event: Mapping[str, Any]) -> str:
    more = event.get("args", {})
    keys = ("Collective name", "Process Group Name", "Process Group Description")
    return " ".join([event["name"], *(str(more[key]) for key in keys if key in more)])


def _host_compute(events: Iterable[Mapping[str, Any]]) -> Iterator[Interval]:
    """Yield when each operator of the host ran itself, and not one that it called."""
    threads: dict[object, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            threads[event["tid"]].append(event)
    for of_thread in threads.values():
        of_thread.sort(key=lambda e: (float(e["ts"]), -float(e["dur"])))
        calls: list[Mapping[str, Any]] = []
        now = 0.0
        for event in of_thread:
            start, _ = _interval(event)
            while calls and _interval(calls[-1])[1] <= start:
                end = _interval(calls[-1])[1]
                yield from _own(calls.pop(), now, end)
                now = max(now, end)
            if calls:
                yield from _own(calls[-1], now, start)
            calls.append(event)
            now = start
        while calls:
            end = _interval(calls[-1])[1]
            yield from _own(calls.pop(), now, end)
            now = max(now, end)


def _own(event: Mapping[str, Any], start: float, end: float) -> Iterator[Interval]:
    if start < end and not _NO_COMPUTE.match(event["name"]):
        yield start, end


def _interval(event: Mapping[str, Any]) -> Interval:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _intersection(a: Sequence[Interval], b: Sequence[Interval]) -> Iterator[Interval]:
    """Yield what two unions have in common."""
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            yield start, end
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
