"""Report of a dry run as data: one value per class of ranks, all of them, and JSON. No torch."""

from collections.abc import Iterable, Sequence

import msgspec

from hp_dry.memory.allocator import Usage, least_bytes, replay
from hp_dry.proof.loads import late_loads
from hp_dry.proof.streams import check_streams
from hp_dry.report.traffic import Traffic, traffic_of
from hp_dry.report.usage import Memory, memory_of
from hp_dry.report.work import Work, work_of
from hp_dry.trace import Fault, Trace

VERSION = 1
"""Version of the JSON, which changes if a key is removed or changes its meaning."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a checkpoint that a rank would write.

    Attributes:
        file: Name of the file.
        num_tensors: Tensors of this rank, whole or in part.
        num_bytes: Bytes of this rank; an asynchronous save copies them to the host first.
        own_bytes: Bytes that this rank writes: bytes of no other rank, and its share of the rest.
    """

    file: str
    num_tensors: int
    num_bytes: int
    own_bytes: int


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one rank, which represents its class.

    Attributes:
        rank: Global rank that was run.
        stands_for: Global ranks of its class, with itself.
        skew: Model of the routing, as the command line names it.
        memory: Memory of its device over the run.
        work: Work of its device in the last step.
        traffic: Operations between ranks in which it takes part.
        num_parameters: Elements of its parameters; -1 if they were not counted.
        saved: Its part of a checkpoint; None if not requested.
    """

    rank: int
    stands_for: tuple[int, ...]
    skew: str
    memory: Memory
    work: Work
    traffic: Traffic
    num_parameters: int = -1
    saved: Saved | None = None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a dry run.

    Attributes:
        name: Name of the config or the script.
        layout: Parallel layout in words.
        world_size: Number of ranks.
        gpu: Name of the device.
        gpu_bytes: Bytes of memory of the device.
        beside: Bytes besides tensors of the rank with most of them: `"context"`,
            `"communicators"` and `"peer buffers"`.
        communicators: NCCL communicators of that rank, see `hp_base.beside_tensors.Held`.
        peers: Peers with which that rank exchanges single messages.
        ranks: Summary of one rank for each class and each model of the routing.
        problems: Mistakes between ranks or on a device; the empty list is a proof.
        seconds: Seconds that the dry run took.
        version: Version of the JSON.
    """

    name: str
    layout: str
    world_size: int
    gpu: str
    gpu_bytes: int
    beside: dict[str, int]
    ranks: tuple[RankSummary, ...]
    problems: tuple[str, ...] = ()
    communicators: int = 0
    peers: int = 0
    seconds: float = 0.0
    version: int = VERSION

    @property
    def worst(self) -> RankSummary:
        """Return the rank that needs the most memory."""
        return _neediest(self.ranks)

    @property
    def skews(self) -> dict[str, RankSummary]:
        """Return the rank that needs the most memory under each model of the routing."""
        names = dict.fromkeys(each.skew for each in self.ranks)
        return {name: _neediest(each for each in self.ranks if each.skew == name) for name in names}

    @property
    def fits(self) -> bool:
        """Tell whether every rank that was run has enough memory."""
        return all(self.share(each) <= 1 and not each.memory.out_of_memory for each in self.ranks)

    def share(self, rank: RankSummary) -> float:
        """Return the share of the device's memory that a rank needs, with bytes besides tensors."""
        return (rank.memory.needed + sum(self.beside.values())) / self.gpu_bytes


def _neediest(ranks: Iterable[RankSummary]) -> RankSummary:
    return max(ranks, key=lambda each: each.memory.needed)


def summarize(
    trace: Trace,
    *,
    stands_for: Sequence[int] = (),
    skew: str = "uniform",
    usage: Usage | None = None,
    expandable_segments: bool = False,
    num_parameters: int = -1,
    saved: Saved | None = None,
) -> RankSummary:
    """Summarise the trace of one rank.

    Args:
        trace: Trace of the rank.
        stands_for: Global ranks of its class; empty: itself.
        skew: Model of the routing.
        usage: Replay of the trace through the caching allocator; None: live bytes only.
        expandable_segments: Whether `usage` is a replay with expandable segments.
        num_parameters: Elements of its parameters; -1: not counted.
        saved: Its part of a checkpoint; None: not requested.
    """
    least = None
    if usage is not None:
        least = least_bytes(trace.events, usage, expandable_segments=expandable_segments)
    return RankSummary(
        rank=trace.rank,
        stands_for=tuple(stands_for) or (trace.rank,),
        skew=skew,
        memory=memory_of(trace, usage, least=least),
        work=work_of(trace),
        traffic=traffic_of(trace),
        num_parameters=num_parameters,
        saved=saved,
    )


def to_json(summary: Summary) -> bytes:
    """Return the JSON of a summary, for `from_json`."""
    return msgspec.json.encode(summary)


def from_json(text: bytes) -> Summary:
    """Read the JSON of `to_json`.

    Raises:
        ValueError: If the text is no summary, or a summary of another version.
    """
    try:
        summary = msgspec.json.decode(text, type=Summary)
    except msgspec.DecodeError as error:
        raise ValueError(f"text must be the JSON of a dry run: {error}") from error
    if summary.version != VERSION:
        raise ValueError(f"version ({summary.version}) must equal {VERSION}")
    return summary


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
