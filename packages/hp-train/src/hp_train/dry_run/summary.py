"""What a dry run found, as data: one value per class of ranks, all of them, and JSON. No torch."""

from collections.abc import Sequence

import msgspec

from hp_platform.dry.allocator import Usage
from hp_platform.dry.trace import Trace
from hp_train.dry_run.memory import Memory, memory_of
from hp_train.dry_run.traffic import Traffic, traffic_of
from hp_train.dry_run.work import Work, work_of

VERSION = 1
"""Of the JSON; another number where a key changed its meaning or went."""


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank would write of a checkpoint.

    Attributes:
        file: Its name.
        num_tensors: That this rank holds, or parts of them.
        num_bytes: Of these; the host copies them first where a save runs behind the training.
        own_bytes: Of these, what no other rank holds, and of the rest its share.
    """

    file: str
    num_tensors: int
    num_bytes: int
    own_bytes: int


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank does, which stands for all of its class.

    Attributes:
        rank: That was run.
        stands_for: All ranks of the class, itself among them.
        skew: Model of the routing, as the command line has it.
        memory: Of the device.
        work: Of the device, in one step.
        traffic: With other ranks.
        num_parameters: Elements of parameters that it has; -1 if nobody counted.
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
    """What a dry run found.

    Attributes:
        name: Of the config or the script.
        layout: In words.
        world_size: Ranks.
        gpu: Name of the device.
        gpu_bytes: Its memory.
        beside: Bytes that are no tensors, of the rank that has most of them: `"context"`,
            `"communicators"` and `"peer buffers"`.
        communicators: Of NCCL that this rank has, see `hp_train.communicators.Held`.
        peers: That it exchanges with one by one, likewise.
        ranks: One for each class of ranks and each routing model.
        problems: What would go wrong between ranks or on a device; none is a proof.
        seconds: That it took.
        version: Of this form.
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
        return max(self.ranks, key=lambda each: each.memory.needed)

    @property
    def skews(self) -> dict[str, RankSummary]:
        """The rank that needs the most memory under each routing model."""
        found: dict[str, RankSummary] = {}
        for each in self.ranks:
            other = found.setdefault(each.skew, each)
            if each.memory.needed > other.memory.needed:
                found[each.skew] = each
        return found

    @property
    def fits(self) -> bool:
        """Whether every rank that was run has memory enough."""
        return all(self.share(each) <= 1 and not each.memory.out_of_memory for each in self.ranks)

    def share(self, rank: RankSummary) -> float:
        """Of the device's memory that a rank needs, with what is there beside tensors."""
        return (rank.memory.needed + sum(self.beside.values())) / self.gpu_bytes


def summarize(
    trace: Trace,
    *,
    stands_for: Sequence[int] = (),
    skew: str = "uniform",
    usage: Usage | None = None,
    num_parameters: int = -1,
    saved: Saved | None = None,
) -> RankSummary:
    """Look at what one rank did.

    Args:
        trace: Of it.
        stands_for: Ranks of its class; none: itself.
        skew: Model of the routing.
        usage: The trace replayed through the caching allocator; None: live bytes alone.
        num_parameters: Elements of parameters that it has.
        saved: Plan of a save.
    """
    return RankSummary(
        rank=trace.rank,
        stands_for=tuple(stands_for) or (trace.rank,),
        skew=skew,
        memory=memory_of(trace, usage),
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
