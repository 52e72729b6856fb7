"""The share of communication in a profiler's trace that compute hides. No torch here.

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
from typing import NamedTuple

Interval = tuple[float, float]
"""Start and end in microseconds."""

EXCHANGES = r"all_?to_?all|SendRecv"
_HOST_TRANSFER = re.compile(r"(gloo|slow):")
_NO_COMPUTE = re.compile(
    r"(_c10d_functional|c10d|gloo|slow|nccl)[:_]|.*(SyncHook|AllToAll|WaitTens)"
)


class _Event(NamedTuple):
    """An event of a trace that has a duration."""

    interval: Interval
    name: str
    process: int | str
    thread: object
    category: object
    more: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One transfer: microseconds, from the trace's own origin."""

    name: str
    start: float
    end: float
    exposed: float


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """Transfers of one process, and the share of them that was hidden.

    Attributes:
        process: Id of the process in the trace; for a GPU, its index.
        transfers: Transfers in the order of their starts.
        total: Microseconds in which at least one transfer ran.
        hidden: Microseconds in which compute ran as well.
    """

    process: int | str
    transfers: tuple[Transfer, ...]
    total: float
    hidden: float

    @property
    def fraction(self) -> float:
        """Return the share of the communication that is hidden; 1 where there is none."""
        return self.hidden / self.total if self.total else 1.0


def overlap_report(trace: Mapping[str, object], *, match: str = EXCHANGES) -> list[OverlapReport]:
    """Compare transfers with compute, process by process.

    Args:
        trace: A trace in Chrome's JSON format, as torch's profiler exports it.
        match: Regular expression of the transfers that count, found in the name, the collective's
            name or the description of its process group, in any case.

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
    transfers: dict[int | str, list[_Event]] = defaultdict(list)
    kernels: dict[int | str, list[Interval]] = defaultdict(list)
    for event in events:
        if _is_transfer(event):
            if wanted.search(_described(event)):
                transfers[event.process].append(event)
        elif event.category == "kernel":
            kernels[event.process].append(event.interval)
    reports = []
    for process, found in transfers.items():
        compute = kernels.get(process) or [i for of in kernels.values() for i in of]
        busy = _union(compute or _host_compute(e for e in events if e.process == process))
        reports.append(_report(process, _outermost(found), busy))
    return reports


def _timed_events(trace: Mapping[str, object]) -> list[_Event]:
    listed = trace.get("traceEvents", ())
    if not isinstance(listed, list | tuple) or not all(isinstance(e, Mapping) for e in listed):
        raise ValueError("traceEvents of the trace must be a list of objects")
    events = [_event(e) for e in listed if e.get("ph") == "X" and "dur" in e]
    if not events:
        raise ValueError("traceEvents (0) of the trace must be > 0: is it one of torch.profiler?")
    return events


def _event(found: Mapping[str, object]) -> _Event:
    match {"args": {}, **found}:
        case {
            "name": str(name),
            "pid": int() | str() as process,
            "ts": int() | float() as start,
            "dur": int() | float() as duration,
            "args": Mapping() as more,
        } if math.isfinite(start) and math.isfinite(duration):
            times = float(start), float(start) + float(duration)
            return _Event(times, name, process, found.get("tid"), found.get("cat"), more)
    raise ValueError(f"an event of the trace must have name, pid, ts and dur: {str(found)[:80]}")


def _report(
    process: int | str, events: Sequence[_Event], busy: Sequence[Interval]
) -> OverlapReport:
    transfers = []
    for event in events:
        start, end = event.interval
        exposed = end - start - _length(_intersection([(start, end)], busy))
        transfers.append(Transfer(event.name, start, end, exposed))
    communication = _union(event.interval for event in events)
    hidden = _length(_intersection(communication, busy))
    return OverlapReport(process, tuple(transfers), _length(communication), hidden)


def _is_transfer(event: _Event) -> bool:
    if event.category == "kernel":
        return "nccl" in event.name.lower()
    # With the same names, the host marks how long it took to launch a kernel of NCCL.
    is_of_host = event.category in ("user_annotation", "cpu_op")
    return is_of_host and bool(_HOST_TRANSFER.match(event.name))


def _outermost(events: Iterable[_Event]) -> list[_Event]:
    """Sort by start and leave out events inside another: Gloo's part of a slow transfer."""
    found: list[_Event] = []
    for event in sorted(events, key=lambda e: e.interval):
        if not found or event.interval[1] > found[-1].interval[1]:
            found.append(event)
    return found


def _described(event: _Event) -> str:
    keys = ("Collective name", "Process Group Name", "Process Group Description")
    return " ".join([event.name, *(str(event.more[key]) for key in keys if key in event.more)])


def _host_compute(events: Iterable[_Event]) -> Iterator[Interval]:
    """Yield the times in which operators of the host ran themselves, not one that they called."""
    threads: dict[object, list[_Event]] = defaultdict(list)
    for event in events:
        if event.category == "cpu_op":
            threads[event.thread].append(event)
    for of_thread in threads.values():
        of_thread.sort(key=lambda e: (e.interval[0], -e.interval[1]))
        calls: list[_Event] = []
        now = 0.0
        for event in of_thread:
            start, _ = event.interval
            while calls and calls[-1].interval[1] <= start:
                end = calls[-1].interval[1]
                yield from _own(calls.pop(), now, end)
                now = max(now, end)
            if calls:
                yield from _own(calls[-1], now, start)
            calls.append(event)
            now = start
        while calls:
            end = calls[-1].interval[1]
            yield from _own(calls.pop(), now, end)
            now = max(now, end)


def _own(event: _Event, start: float, end: float) -> Iterator[Interval]:
    if start < end and not _NO_COMPUTE.match(event.name):
        yield start, end


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _intersection(a: Sequence[Interval], b: Sequence[Interval]) -> Iterator[Interval]:
    """Yield the intervals that two unions have in common."""
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
