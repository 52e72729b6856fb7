"""A whole pipeline schedule: the steps of every rank, and where the stages live."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Self, overload

from hp_schedule import packing
from hp_schedule.ir import MetaStep


class Row(Sequence["MetaStep | None"]):
    """The immutable list of one rank's steps; None is an empty cell.

    Args:
        codes: The steps in order, packed (see `hp_schedule.packing`).
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
    return None if code < 0 else packing.unpack(code)


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
        if not 1 <= self.num_stages <= packing.MAX_STAGES:
            raise ValueError(
                f"num_stages ({self.num_stages}) must be between 1 and {packing.MAX_STAGES}"
            )
        if not 1 <= self.num_microbatches <= packing.MAX_MICROBATCHES:
            raise ValueError(
                f"num_microbatches ({self.num_microbatches}) must be between 1 and "
                f"{packing.MAX_MICROBATCHES}"
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
            rows.append(Row(map(packing.pack, cells)))
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
        return bool(
            self.kinds & {packing.FWD_SEND, packing.FWD_RECV, packing.BWD_SEND, packing.BWD_RECV}
        )

    @cached_property
    def is_forward_only(self) -> bool:
        """Tell whether no step belongs to a backward pass."""
        return self.kinds <= {
            packing.FWD,
            packing.FWD_SEND,
            packing.FWD_RECV,
            packing.FSDP_UNSHARD,
            packing.FSDP_RESHARD,
        }

    @cached_property
    def recomputed(self) -> frozenset[tuple[int, int]]:
        """Return the (stage, microbatch) that a RECOMPUTE step runs again."""
        return self._places(packing.RECOMPUTE)

    @cached_property
    def offloaded(self) -> frozenset[tuple[int, int]]:
        """Return the (stage, microbatch) whose activations an OFFLOAD step copies away."""
        return self._places(packing.OFFLOAD)

    def _places(self, kind: int) -> frozenset[tuple[int, int]]:
        return frozenset(
            (code >> packing.STAGE_SHIFT & packing.STAGE_MASK, code >> packing.MICROBATCH_SHIFT)
            for row in self.steps
            for code in row.codes()
            if code >= 0 and code & packing.KIND_MASK == kind
        )

    @cached_property
    def kinds(self) -> frozenset[int]:
        """Return the kinds (see `hp_schedule.packing`) of all steps."""
        mask = packing.KIND_MASK
        return frozenset(code & mask for row in self.steps for code in row.codes() if code >= 0)

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
