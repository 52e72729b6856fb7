"""A whole pipeline schedule: the steps of every rank, where the stages live, and what steps read.

A value is the output of a stage for a microbatch, or the gradient of a stage's
input for a microbatch. Values are numbered, so that checks and passes keep their state in flat
arrays:

    output of stage s, microbatch m             s * num_microbatches + m
    input gradient of stage s, microbatch m     (num_stages + s) * num_microbatches + m

A message is known by the value it carries: the send that reads it and the receive that writes it.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal, Self, get_args, overload

from hp_schedule.steps import (
    BWD,
    BWD_INPUT,
    BWD_RECV,
    BWD_SEND,
    FSDP_RESHARD,
    FSDP_UNSHARD,
    FWD,
    FWD_RECV,
    FWD_SEND,
    KIND_MASK,
    MAX_MICROBATCHES,
    MAX_STAGES,
    MICROBATCH_SHIFT,
    OFFLOAD,
    RECOMPUTE,
    STAGE_MASK,
    STAGE_SHIFT,
    TYPES,
    MetaStep,
    encode,
    pack,
    unpack,
)


class ScheduleError(ValueError):
    """A schedule breaks a rule; the message names the cell and shows the timetable around it."""


class DeadlockError(ScheduleError):
    """The ranks of a schedule wait for each other, or for something that never happens."""


PlacementStyle = Literal["loop", "v", "u"]


def generate_stage_to_rank_mapping(
    num_ranks: int, num_stages: int, style: PlacementStyle | Sequence[int] = "loop"
) -> dict[int, int]:
    """Return the rank of every stage, in their order.

    Args:
        num_ranks: Number of ranks, at least 1.
        num_stages: Number of stages, at least one per rank; for ``v`` a multiple of num_ranks, for
            ``u`` one more than a multiple.
        style: ``loop`` deals the stages out like cards (0, 1, 2, 0, 1, 2). ``v`` turns round at
            each end (0, 1, 2, 2, 1, 0), so that neighbours at a turn share a rank. ``u`` is a loop
            that ends where it began (0, 1, 2, 0): rank 0 has the first stage and the last. A
            sequence gives any other chain as the rank of each stage in order.

    Raises:
        ValueError: If a count does not fit, the style is unknown, or a chain leaves a rank out.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks ({num_ranks}) must be >= 1")
    if num_stages < num_ranks:
        raise ValueError(f"num_stages ({num_stages}) must be >= num_ranks ({num_ranks})")
    if not isinstance(style, str):
        return _chain(num_ranks, num_stages, style)
    if style not in get_args(PlacementStyle):
        raise ValueError(
            f"style ({style}) must be {' or '.join(get_args(PlacementStyle))}, or a rank for each "
            "stage"
        )
    if style == "v":
        if num_stages % num_ranks:
            raise ValueError(
                f"num_stages ({num_stages}) must be a multiple of num_ranks ({num_ranks}) for "
                "style v"
            )
        there_and_back = [*range(num_ranks), *reversed(range(num_ranks))]
        return {stage: there_and_back[stage % (2 * num_ranks)] for stage in range(num_stages)}
    if style == "u" and (num_stages - 1) % num_ranks:
        raise ValueError(
            f"num_stages ({num_stages}) must be one more than a multiple of num_ranks "
            f"({num_ranks}) for style u"
        )
    return {stage: stage % num_ranks for stage in range(num_stages)}


def generate_rank_to_stage_mapping(
    num_ranks: int, num_stages: int, style: PlacementStyle | Sequence[int] = "loop"
) -> dict[int, list[int]]:
    """Return the stages of every rank, ascending; see `generate_stage_to_rank_mapping`.

    Raises:
        ValueError: If a count does not fit, the style is unknown, or a chain leaves a rank out.
    """
    stages: dict[int, list[int]] = {rank: [] for rank in range(num_ranks)}
    for stage, rank in generate_stage_to_rank_mapping(num_ranks, num_stages, style).items():
        stages[rank].append(stage)
    return stages


def _chain(num_ranks: int, num_stages: int, ranks: Sequence[int]) -> dict[int, int]:
    if len(ranks) != num_stages:
        raise ValueError(f"len(style) ({len(ranks)}) must equal num_stages ({num_stages})")
    for stage, rank in enumerate(ranks):
        if not 0 <= rank < num_ranks:
            raise ValueError(
                f"rank ({rank}) of stage {stage} must be >= 0 and < num_ranks ({num_ranks})"
            )
    missing = set(range(num_ranks)) - set(ranks)
    if missing:
        raise ValueError(f"rank ({min(missing)}) must have a stage")
    return dict(enumerate(ranks))


class Row(Sequence["MetaStep | None"]):
    """The immutable list of one rank's steps; None is an empty cell.

    Args:
        codes: The steps in order, packed (see `hp_schedule.steps`).
    """

    __slots__ = ("_packed",)

    def __init__(self, codes: Iterable[int] = ()) -> None:
        self._packed = memoryview(array("q", codes)).toreadonly()

    def codes(self) -> list[int]:
        """Return the packed steps as a new list."""
        return self._packed.tolist()

    def __len__(self) -> int:
        return len(self._packed)

    @overload
    def __getitem__(self, index: int) -> MetaStep | None: ...
    @overload
    def __getitem__(self, index: slice) -> "Row": ...
    def __getitem__(self, index: int | slice) -> "MetaStep | Row | None":
        return Row(self.codes()[index]) if isinstance(index, slice) else _view(self._packed[index])

    def __iter__(self) -> Iterator[MetaStep | None]:
        return map(_view, self.codes())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Row):
            return NotImplemented
        return self._packed.tobytes() == other._packed.tobytes()

    def __hash__(self) -> int:
        return hash(self._packed.tobytes())

    def __reduce__(self) -> tuple[type["Row"], tuple[list[int]]]:
        return (Row, (self.codes(),))

    def __repr__(self) -> str:
        return f"Row({', '.join('' if step is None else str(step) for step in self)})"


def _view(code: int) -> MetaStep | None:
    return None if code < 0 else unpack(code)


@dataclass(frozen=True)
class Schedule:
    """The steps of every rank in order; equal schedules compare and hash equal.

    Attributes:
        steps: One row per rank.
        stage_to_rank: The rank of each stage.
        num_microbatches: Microbatches, numbered from 0, that pass through every chain.
        chains: Logical pipelines: each a sequence of stages that hand their output to the next.
            Every stage belongs to exactly one. Default: one chain of all stages in order.
        gathered_stages: Stages whose parameters are sharded, so that UNSHARD and RESHARD steps must
            gather and free them. None: all if there are any such steps, else none.
        reduced_stages: Stages whose gradients REDUCE_GRAD steps must reduce. None: all if there are
            any such steps, else none.

    Raises:
        ValueError: If the placement, the chains or the counts do not fit each other. Whether the
            steps make sense is `hp_schedule.validate`'s question, not the constructor's.
    """

    steps: tuple[Row, ...]
    stage_to_rank: tuple[int, ...]
    num_microbatches: int
    chains: tuple[tuple[int, ...], ...] = ()
    gathered_stages: tuple[int, ...] | None = None
    reduced_stages: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.chains:
            object.__setattr__(self, "chains", (tuple(range(self.num_stages)),))
        if not 1 <= self.num_stages <= MAX_STAGES:
            raise ValueError(f"num_stages ({self.num_stages}) must be between 1 and {MAX_STAGES}")
        if not 1 <= self.num_microbatches <= MAX_MICROBATCHES:
            raise ValueError(
                f"num_microbatches ({self.num_microbatches}) must be between 1 and "
                f"{MAX_MICROBATCHES}"
            )
        for stage, rank in enumerate(self.stage_to_rank):
            if not 0 <= rank < self.num_ranks:
                raise ValueError(
                    f"rank ({rank}) of stage {stage} must be >= 0 and < num_ranks "
                    f"({self.num_ranks})"
                )
        if sorted(stage for chain in self.chains for stage in chain) != list(
            range(self.num_stages)
        ):
            raise ValueError(
                f"chains ({[list(chain) for chain in self.chains]}) must hold each of the "
                f"{self.num_stages} stages once"
            )
        for name in ("gathered_stages", "reduced_stages"):
            stages = list(getattr(self, name) or ())
            if stages != sorted(set(stages).intersection(range(self.num_stages))):
                raise ValueError(
                    f"{name} ({stages}) must be of the {self.num_stages} stages, ascending"
                )

    @classmethod
    def from_steps(
        cls,
        steps: Iterable[Iterable[MetaStep | None]],
        *,
        stage_to_rank: Sequence[int],
        num_microbatches: int,
        chains: Sequence[Sequence[int]] = (),
        gathered_stages: Sequence[int] | None = None,
        reduced_stages: Sequence[int] | None = None,
    ) -> Self:
        """Build a schedule from steps per rank; see the class for the arguments.

        Raises:
            ValueError: If a step names a stage or a microbatch that does not exist.
        """
        rows = []
        for rank, row in enumerate(steps):
            cells = list(row)
            _check_cells(rank, cells, len(stage_to_rank), num_microbatches)
            rows.append(Row(map(pack, cells)))
        return cls(
            steps=tuple(rows),
            stage_to_rank=tuple(stage_to_rank),
            num_microbatches=num_microbatches,
            chains=tuple(tuple(chain) for chain in chains),
            gathered_stages=None if gathered_stages is None else tuple(gathered_stages),
            reduced_stages=None if reduced_stages is None else tuple(reduced_stages),
        )

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks, one row each."""
        return len(self.steps)

    @property
    def num_stages(self) -> int:
        """Return the number of stages of all chains together."""
        return len(self.stage_to_rank)

    @cached_property
    def upstream(self) -> tuple[int, ...]:
        """Return for each stage the one whose output it reads, -1 at the start of a chain."""
        result = [-1] * self.num_stages
        for chain in self.chains:
            for before, after in pairwise(chain):
                result[after] = before
        return tuple(result)

    @cached_property
    def downstream(self) -> tuple[int, ...]:
        """Return for each stage the one that reads its output, -1 at the end of a chain."""
        result = [-1] * self.num_stages
        for stage, before in enumerate(self.upstream):
            if before >= 0:
                result[before] = stage
        return tuple(result)

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of ranks (source, destination) between which messages travel, sorted."""
        place = self.stage_to_rank
        pairs = {
            (place[before], place[stage])
            for stage, before in enumerate(self.upstream)
            if before >= 0 and place[before] != place[stage]
        }
        return tuple(sorted(pairs | {(b, a) for a, b in pairs}))

    @cached_property
    def has_communication(self) -> bool:
        """Tell whether any step sends or receives."""
        return bool(self.kinds & {FWD_SEND, FWD_RECV, BWD_SEND, BWD_RECV})

    @cached_property
    def is_forward_only(self) -> bool:
        """Tell whether no step belongs to a backward pass."""
        return self.kinds <= {
            FWD,
            FWD_SEND,
            FWD_RECV,
            FSDP_UNSHARD,
            FSDP_RESHARD,
        }

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """Return the (stage, microbatch) that a RECOMPUTE step runs again."""
        return self._places(RECOMPUTE)

    @cached_property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """Return the (stage, microbatch) whose activations an OFFLOAD step copies away."""
        return self._places(OFFLOAD)

    def _places(self, kind: int) -> frozenset[tuple[int, int]]:
        return frozenset(
            (code >> STAGE_SHIFT & STAGE_MASK, code >> MICROBATCH_SHIFT)
            for row in self.steps
            for code in row.codes()
            if code >= 0 and code & KIND_MASK == kind
        )

    @cached_property
    def kinds(self) -> frozenset[int]:
        """Return the kinds (see `hp_schedule.steps`) of all steps."""
        codes = (code for row in self.steps for code in row.codes())
        return frozenset(code & KIND_MASK for code in codes if code >= 0)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that live on a rank, ascending."""
        return tuple(s for s, place in enumerate(self.stage_to_rank) if place == rank)

    def with_rows(self, rows: Iterable[Iterable[int]]) -> "Schedule":
        """Return the same schedule with other packed steps; the tool of passes."""
        return replace(self, steps=tuple(Row(row) for row in rows))


def _check_cells(
    rank: int, cells: Sequence[MetaStep | None], num_stages: int, num_microbatches: int
) -> None:
    for position, step in enumerate(cells):
        for leaf in step.leaves() if step else ():
            if (leaf.stage_index or 0) >= num_stages:
                raise ValueError(
                    f"rank {rank}, cell {position}: stage ({leaf.stage_index}) of {step} must be "
                    f"< num_stages ({num_stages})"
                )
            if (leaf.microbatch_index or 0) >= num_microbatches:
                raise ValueError(
                    f"rank {rank}, cell {position}: microbatch ({leaf.microbatch_index}) of "
                    f"{step} must be < num_microbatches ({num_microbatches})"
                )


Table = tuple[tuple[int, ...], ...]
"""Indexed by kind, then by stage."""


@dataclass(frozen=True, slots=True)
class Dataflow:
    """Tables by kind and stage; -1 where there is nothing.

    Attributes:
        num_values: Values are numbered from 0 to num_values - 1.
        reads: The value of microbatch 0 that a step needs; add the microbatch for another's.
        writes: The value of microbatch 0 that a step makes available on its rank.
        peer: The rank at the other end of a send or a receive; -1 where both ends are one rank.
    """

    num_values: int
    reads: Table
    writes: Table
    peer: Table

    def value_read(self, code: int) -> int:
        """Return the value a step (no overlap) needs, -1 for none."""
        return _lookup(self.reads, code)

    def value_written(self, code: int) -> int:
        """Return the value a step (no overlap) makes available, -1 for none."""
        return _lookup(self.writes, code)


def _lookup(table: Table, code: int) -> int:
    base = table[code & KIND_MASK][code >> STAGE_SHIFT & STAGE_MASK]
    return base if base < 0 else base + (code >> MICROBATCH_SHIFT)


def dataflow(schedule: Schedule) -> Dataflow:
    """Return the tables of a schedule's placement and chains."""
    chains = schedule.upstream, schedule.downstream
    return _dataflow(schedule.num_microbatches, schedule.stage_to_rank, *chains)


@lru_cache(maxsize=8)  # passes and checks ask for the same tables one after the other
def _dataflow(
    num_microbatches: int,
    place: tuple[int, ...],
    upstream: tuple[int, ...],
    downstream: tuple[int, ...],
) -> Dataflow:
    num_stages = len(place)
    stages = range(num_stages)
    outputs = tuple(stage * num_microbatches for stage in stages)
    gradients = tuple((num_stages + stage) * num_microbatches for stage in stages)
    inputs = _pick(outputs, upstream)
    output_gradients = _pick(gradients, downstream)
    # The end of a chain starts its backward from its own output: the loss.
    backward_inputs = tuple(
        gradient if gradient >= 0 else output
        for gradient, output in zip(output_gradients, outputs, strict=True)
    )
    reads = {
        FWD: inputs,
        BWD: backward_inputs,
        BWD_INPUT: backward_inputs,
        FWD_SEND: outputs,
        BWD_SEND: gradients,
    }
    writes = {
        FWD: outputs,
        BWD: gradients,
        BWD_INPUT: gradients,
        FWD_RECV: inputs,
        BWD_RECV: output_gradients,
    }
    before, after = _other_rank(place, upstream), _other_rank(place, downstream)
    peer = {FWD_SEND: after, BWD_RECV: after, FWD_RECV: before, BWD_SEND: before}
    return Dataflow(
        num_values=2 * num_stages * num_microbatches,
        reads=_table(reads, num_stages),
        writes=_table(writes, num_stages),
        peer=_table(peer, num_stages),
    )


def receive_of(schedule: Schedule, send: int) -> int:
    """Return the code of the receive that takes a send's message."""
    stage = send >> STAGE_SHIFT & STAGE_MASK
    if send & KIND_MASK == FWD_SEND:
        return encode(FWD_RECV, schedule.downstream[stage], send >> MICROBATCH_SHIFT)
    return encode(BWD_RECV, schedule.upstream[stage], send >> MICROBATCH_SHIFT)


def _pick(values: tuple[int, ...], neighbours: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(values[other] if other >= 0 else -1 for other in neighbours)


def _other_rank(place: tuple[int, ...], neighbours: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(
        place[other] if other >= 0 and place[other] != place[stage] else -1
        for stage, other in enumerate(neighbours)
    )


def _table(columns: dict[int, tuple[int, ...]], num_stages: int) -> Table:
    """Return columns by kind, with nothing for the other kinds."""
    return tuple([columns.get(kind, (-1,) * num_stages) for kind in range(len(TYPES))])
