"""Report of a dry run as data: one value per class of ranks, all of them, and JSON. No torch."""

from collections.abc import Iterable, Sequence

import msgspec

from hp_dry.memory.allocator import Usage, least_bytes
from hp_dry.report.traffic import Traffic, traffic_of
from hp_dry.report.usage import Memory, memory_of
from hp_dry.report.work import Work, work_of
from hp_dry.trace import Trace

VERSION = 1
"""Version of the JSON; it changes where a key changes its meaning or goes."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a checkpoint that a rank would write.

    Attributes:
        file: Name of the file.
        num_tensors: Tensors that this rank holds, whole or in part.
        num_bytes: Bytes that this rank holds; an asynchronous save copies them to the host first.
        own_bytes: Bytes that this rank writes: what no other rank holds, and its share of the rest.
    """

    file: str
    num_tensors: int
    num_bytes: int
    own_bytes: int


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Tells what one rank does, which stands for all of its class.

    Attributes:
        rank: Global rank that was run.
        stands_for: Global ranks of its class, itself among them.
        skew: Model of the routing, as the command line names it.
        memory: Memory of its device over the run.
        work: Work of its device in the last step.
        traffic: Operations between ranks in which it takes part.
        num_parameters: Elements of the parameters that it has; -1 if nobody counted.
        saved: What it would write of a checkpoint; None if nobody asked.
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
    """Tells what a dry run found.

    Attributes:
        name: Name of the config or the script.
        layout: Parallel layout in words.
        world_size: Number of ranks.
        gpu: Name of the device.
        gpu_bytes: Bytes of memory of the device.
        beside: Bytes that are no tensors, of the rank that has most of them: `"context"`,
            `"communicators"` and `"peer buffers"`.
        communicators: NCCL communicators that this rank holds, see
            `hp_base.beside_tensors.Held`.
        peers: Peers that it sends to or receives from one by one, likewise.
        ranks: Summary of one rank for each class and each model of the routing.
        problems: What would go wrong between ranks or on a device; none is a proof.
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
        """The rank that needs the most memory."""
        return _neediest(self.ranks)

    @property
    def skews(self) -> dict[str, RankSummary]:
        """The rank that needs the most memory under each routing model."""
        names = dict.fromkeys(each.skew for each in self.ranks)
        return {name: _neediest(each for each in self.ranks if each.skew == name) for name in names}

    @property
    def fits(self) -> bool:
        """Tells whether every rank that was run has memory enough."""
        return all(self.share(each) <= 1 and not each.memory.out_of_memory for each in self.ranks)

    def share(self, rank: RankSummary) -> float:
        """Share of the device's memory that a rank needs, with what is there beside tensors."""
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
    """Look at what one rank did.

    Args:
        trace: Trace of the rank.
        stands_for: Global ranks of its class; empty: itself.
        skew: Model of the routing.
        usage: The trace replayed through the caching allocator; None: live bytes alone.
        expandable_segments: Whether it was replayed with segments that grow.
        num_parameters: Elements of the parameters that it has; -1: not counted.
        saved: What it would write of a checkpoint; None: not asked.
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
    """Write a summary; `from_json` reads it back."""
    return msgspec.json.encode(summary)


def from_json(text: bytes) -> Summary:
    """Read what `to_json` wrote.

    Raises:
        ValueError: If it is not a summary, or one of another version.
    """
    try:
        summary = msgspec.json.decode(text, type=Summary)
    except msgspec.DecodeError as error:
        raise ValueError(f"text must be the JSON of a dry run: {error}") from error
    if summary.version != VERSION:
        raise ValueError(f"version ({summary.version}) must equal {VERSION}")
    return summary
