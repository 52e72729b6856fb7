"""Plan the transfer of a tensor between two stages, as a pure function.

Legend: a source ranks, b destination ranks, N elements.

- `interval`: every source rank sends its a-th part, cut where the b-th parts of the destination
  end; a replicated destination then exchanges its b-th parts locally. The cut carries N elements
  in a + b - gcd(a, b) messages and no rank sends or receives more than N / min(a, b), which is the
  lower bound. In chunks, the exchange of one runs under the hop of the next.
- `leader`: first rank to first rank, then a broadcast tree. One message over the cut.
- `direct`: every destination rank gets all it needs across the cut, and nothing is spread.
- `auto`: the cheapest of the three by `hp_vtp.plan`, and of several numbers of chunks.

Needs no torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from hp_vtp.plan import Algorithm, Links, Move, Step, StepKind, TransferPlan, choose
from hp_vtp.topology.stages import Edge, Placement, Replicated, Sharded, cut, cut_by_lane

_CHUNKS = (2, 4, 8, 16, 32)
_LEAST_CHUNK_BYTES = 64 * 1024  # below, what a message costs is not known well enough to decide


@lru_cache(maxsize=1024)
def plan_transfer(
    shape: tuple[int, ...],
    *,
    num_sources: int,
    num_destinations: int,
    itemsize: int = 1,
    source: Placement = Replicated(),  # noqa: B008 (frozen)
    destination: Placement = Replicated(),  # noqa: B008 (frozen)
    source_lanes: int | None = None,
    destination_lanes: int | None = None,
    algorithm: Algorithm = "auto",
    chunks: int | None = None,
    links: Links = Links(),  # noqa: B008 (frozen)
) -> TransferPlan:
    """Plan the transfer of one tensor between two stages.

    Gradients of a transfer use the plan with the two ends exchanged: a replicated activation has
    the same, complete gradient on every rank, so nothing is summed or averaged.

    Args:
        shape: Global shape of the tensor.
        num_sources: Ranks of the source stage.
        num_destinations: Ranks of the destination stage.
        itemsize: Bytes of an element.
        source: Placement over the source stage.
        destination: Placement over the destination stage.
        source_lanes: Independent links of the source stage, shared by consecutive ranks; None:
            one per rank.
        destination_lanes: The same for the destination stage.
        algorithm: See the module's docstring.
        chunks: Parts of `"interval"` that cross one after the other. None: by cost under `"auto"`,
            otherwise one.
        links: Speeds by which `"auto"` decides; every rank must pass the same.

    Raises:
        ValueError: If an argument is out of range or the placements do not fit the shape.
    """
    _check(shape, num_sources, num_destinations, itemsize, 1 if chunks is None else chunks)
    _check_placements(shape, source, destination)
    plan = TransferPlan(
        shape=tuple(shape),
        itemsize=itemsize,
        num_sources=num_sources,
        num_destinations=num_destinations,
        source=source,
        destination=destination,
        source_lanes=_lanes("source_lanes", source_lanes, num_sources),
        destination_lanes=_lanes("destination_lanes", destination_lanes, num_destinations),
        algorithm=algorithm,
    )
    if algorithm == "auto":
        return choose(list(_candidates(plan, chunks)), links)
    if algorithm not in _BUILDERS:
        raise ValueError(f"algorithm ({algorithm}) must be auto, {', '.join(_BUILDERS)}")
    if algorithm != "interval" and chunks not in (None, 1):
        raise ValueError(f"chunks ({chunks}) must be 1 for algorithm ({algorithm})")
    return _with_steps(replace(plan, chunks=chunks or 1), algorithm)


def plan_edge(
    edge: Edge,
    shape: Sequence[int],
    *,
    itemsize: int,
    replicated: bool = False,
    algorithm: Algorithm = "auto",
    links: Links = Links(),  # noqa: B008 (frozen)
) -> TransferPlan:
    """Plan the transfer of one tensor over an edge of a layout.

    Args:
        edge: Edge of the layout, from `PipelineLayout.edge`.
        shape: Global shape of the tensor.
        itemsize: Bytes of an element.
        replicated: The tensor is replicated at both ends, whatever the stages' boundaries say.
        algorithm: Same as in `plan_transfer`.
        links: Same as in `plan_transfer`.

    Raises:
        ValueError: If a boundary of the stages does not fit the shape.
    """
    return plan_transfer(
        tuple(shape),
        num_sources=len(edge.source_ranks),
        num_destinations=len(edge.destination_ranks),
        itemsize=itemsize,
        source=Replicated() if replicated else edge.source_boundary,
        destination=Replicated() if replicated else edge.destination_boundary,
        source_lanes=edge.source_lanes,
        destination_lanes=edge.destination_lanes,
        algorithm=algorithm,
        links=links,
    )


def _candidates(plan: TransferPlan, chunks: int | None) -> Iterator[TransferPlan]:
    """Yield the plans that "auto" chooses from; chunks pay where they hide a later exchange."""
    yield _with_steps(replace(plan, chunks=chunks or 1), "interval")
    if chunks is None and isinstance(plan.destination, Replicated) and plan.num_destinations > 1:
        for number in _CHUNKS:
            if plan.total_bytes >= number * _LEAST_CHUNK_BYTES:
                yield _with_steps(replace(plan, chunks=number), "interval")
    for name in _BUILDERS:
        if name != "interval":
            yield _with_steps(plan, name)


def _with_steps(plan: TransferPlan, algorithm: Algorithm) -> TransferPlan:
    rounds: dict[StepKind, int] = {}
    steps = []
    for kind, moves in _BUILDERS[algorithm](plan):
        kept = tuple(sorted(move for move in moves if move.start < move.stop))
        if kept:
            steps.append(Step(kind, rounds.setdefault(kind, 0), kept))
            rounds[kind] += 1
    steps.sort(key=lambda step: (step.round, step.kind))
    return replace(plan, algorithm=algorithm, steps=tuple(steps))


_Moves = Iterator[tuple[StepKind, Sequence[Move]]]


def _interval(plan: TransferPlan) -> _Moves:
    b = plan.num_destinations
    outgoing = _cut_for(plan.source, plan.num_sources, plan.source_lanes, plan.extent)
    incoming = _cut_for(plan.destination, b, plan.destination_lanes, plan.extent)
    ends = [
        [start + end for end in cut(stop - start, plan.chunks)]
        for start, stop in pairwise(incoming)
    ]
    for chunk in range(plan.chunks):
        parts = [(end[chunk], end[chunk + 1]) for end in ends]
        yield StepKind.HOP, list(_intersect(outgoing, parts))
        if isinstance(plan.destination, Replicated):
            exchange = [
                Move(j, other, *parts[j]) for j in range(b) for other in range(b) if other != j
            ]
            yield StepKind.SPREAD, exchange


def _leader(plan: TransferPlan) -> _Moves:
    if isinstance(plan.source, Sharded):
        shards = [(i, *plan.source_range(i)) for i in range(1, plan.num_sources)]
        yield StepKind.COLLECT, [Move(i, 0, start, stop) for i, start, stop in shards]
    yield StepKind.HOP, [Move(0, 0, 0, plan.extent)]
    b = plan.num_destinations
    if isinstance(plan.destination, Sharded):
        yield StepKind.SPREAD, [Move(0, j, *plan.destination_range(j)) for j in range(1, b)]
        return
    have = 1  # ranks 0..have - 1 hold the tensor; each round doubles their number
    while have < b:
        pairs = range(min(have, b - have))
        yield StepKind.SPREAD, [Move(j, j + have, 0, plan.extent) for j in pairs]
        have *= 2


def _direct(plan: TransferPlan) -> _Moves:
    moves = []
    for j in range(plan.num_destinations):
        start, stop = plan.destination_range(j)
        if isinstance(plan.source, Replicated):
            moves.append(Move(j * plan.num_sources // plan.num_destinations, j, start, stop))
            continue
        for i in range(plan.num_sources):
            first, last = plan.source_range(i)
            moves.append(Move(i, j, max(start, first), min(stop, last)))
    yield StepKind.HOP, moves


# In the order of preference where they cost the same.
_BUILDERS: Mapping[Algorithm, Callable[[TransferPlan], _Moves]] = {
    "interval": _interval,
    "leader": _leader,
    "direct": _direct,
}

ALGORITHMS = tuple(_BUILDERS)


def _intersect(outgoing: Sequence[int], parts: Sequence[tuple[int, int]]) -> Iterator[Move]:
    for i, (first, last) in enumerate(pairwise(outgoing)):
        for j, (start, stop) in enumerate(parts):
            yield Move(i, j, max(first, start), min(last, stop))


def _cut_for(placement: Placement, parts: int, lanes: int, extent: int) -> tuple[int, ...]:
    """Return the cuts of one end: equal parts for its links if replicated, else its shards."""
    is_cut = isinstance(placement, Sharded)
    return cut(extent, parts) if is_cut else cut_by_lane(extent, parts, lanes)


def _lanes(name: str, lanes: int | None, ranks: int) -> int:
    if lanes is None:
        return ranks
    if not 1 <= lanes <= ranks:
        raise ValueError(f"{name} ({lanes}) must be within 1..number of ranks ({ranks})")
    return lanes


def _check(
    shape: Sequence[int], num_sources: int, num_destinations: int, itemsize: int, chunks: int
) -> None:
    for name, value in (
        ("num_sources", num_sources),
        ("num_destinations", num_destinations),
        ("itemsize", itemsize),
        ("chunks", chunks),
    ):
        if value < 1:
            raise ValueError(f"{name} ({value}) must be at least 1")
    if any(length < 0 for length in shape):
        raise ValueError(f"shape ({tuple(shape)}) must not be negative")


def _check_placements(shape: Sequence[int], source: Placement, destination: Placement) -> None:
    for name, placement in (("source", source), ("destination", destination)):
        if isinstance(placement, Sharded) and not 0 <= placement.dim < len(shape):
            raise ValueError(
                f"{name}.dim ({placement.dim}) must be within the dimensions of shape "
                f"({tuple(shape)})"
            )
    if isinstance(source, Sharded) and isinstance(destination, Sharded) and source != destination:
        raise ValueError(
            f"source.dim ({source.dim}) must equal destination.dim ({destination.dim})"
        )
