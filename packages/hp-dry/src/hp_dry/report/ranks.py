"""Report that one rank of a dry run sends to the process that started it. No torch."""

import msgspec

from hp_dry.memory.allocator import replay
from hp_dry.proof.loads import late_loads
from hp_dry.proof.streams import check_streams
from hp_dry.report.summary import RankSummary, Saved, summarize
from hp_dry.trace import Fault, Trace


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of one rank, besides its trace.

    Attributes:
        summary: Summary of its trace.
        problems: Faults and hazards of the device, a line each.
        stopped: Place and error that stopped a script early; empty: none.
        keeps_launch_order: Whether NCCL runs operations in the order of the host.
        loads_eagerly: Whether torch's kernels are loaded before anything is launched.
        gathered: Text to append to the layout, about the gathering of parameters.
    """

    summary: RankSummary
    problems: tuple[str, ...]
    gathered: str = ""
    stopped: str = ""
    keeps_launch_order: bool = False
    loads_eagerly: bool = False


def report_of(
    trace: Trace,
    *,
    skew: str = "",
    num_parameters: int = -1,
    saved: Saved | None = None,
    stopped: str = "",
    keeps_launch_order: bool = False,
    loads_eagerly: bool = False,
    from_one_thread: bool = True,
    expandable_segments: bool = False,
    gathered: str = "",
) -> object:
    """Analyse the trace of a rank, and return a `RankReport` as plain values.

    Args:
        trace: Trace of the rank, with labels.
        skew: Name of the model of the routing.
        num_parameters: Elements of the parameters of this rank; -1: not counted.
        saved: Part of this rank in a checkpoint; None: not requested.
        stopped: Place and error that stopped a script early; empty: none.
        keeps_launch_order: Whether NCCL runs operations in the order of the host.
        loads_eagerly: Whether torch's kernels are loaded before anything is launched.
        from_one_thread: Whether threads that launch take turns.
        expandable_segments: Whether torch's allocator uses expandable segments.
        gathered: See `RankReport`.
    """
    summary = summarize(
        trace,
        skew=skew,
        usage=replay(trace, expandable_segments=expandable_segments),
        expandable_segments=expandable_segments,
        num_parameters=num_parameters,
        saved=saved,
    )
    faults = (
        f"rank {trace.rank}: {event.place}: {event.at}: {event.what}"
        for event in trace
        if isinstance(event, Fault)
    )
    hazards = (f"rank {trace.rank}: {hazard}" for hazard in check_streams(trace))
    loads = [] if from_one_thread else map(str, late_loads(trace, eager=loads_eagerly))
    report = RankReport(
        summary=summary,
        problems=tuple(dict.fromkeys((*faults, *hazards, *loads))),
        stopped=stopped,
        keeps_launch_order=keeps_launch_order,
        loads_eagerly=loads_eagerly,
        gathered=gathered,
    )
    return msgspec.to_builtins(report)
