"""The rules of sharded parameters: gathered before use, few at a time, reduced once at the end."""

from collections.abc import Iterator

from hp_schedule.packing import (
    ANY_MICROBATCH,
    BWD,
    BWD_WEIGHT,
    FIRST_FSDP,
    FIRST_OVERLAP,
    FSDP_KINDS,
    FSDP_REDUCE_GRAD,
    FSDP_RESHARD,
    FSDP_UNSHARD,
    KIND_MASK,
    STAGE_MASK,
    STAGE_SHIFT,
    is_compute,
    leaves,
)
from hp_schedule.schedule import Schedule
from hp_schedule.validation.report import Finding, FindingKind, finding_at


def gathered_stages(schedule: Schedule) -> frozenset[int]:
    """Return the stages whose parameters must be gathered: those declared, else all or none."""
    return _declared(schedule, schedule.gathered_stages, {FSDP_UNSHARD, FSDP_RESHARD})


def reduced_stages(schedule: Schedule) -> frozenset[int]:
    """Return the stages whose gradients must be reduced: those declared, else all or none."""
    return _declared(schedule, schedule.reduced_stages, {FSDP_REDUCE_GRAD})


def _declared(
    schedule: Schedule, stages: tuple[int, ...] | None, kinds: set[int]
) -> frozenset[int]:
    if stages is not None:
        return frozenset(stages)
    return frozenset(range(schedule.num_stages) if schedule.kinds & kinds else ())


class ShardingCheck:
    """Follows the parameters of each rank's stages through its row.

    Args:
        schedule: The schedule.
        forward_only: Whether it has no gradients to reduce.
        max_active_stages: Most stages a rank may hold gathered at once; None for no limit.
    """

    def __init__(
        self, schedule: Schedule, *, forward_only: bool, max_active_stages: int | None
    ) -> None:
        self._schedule = schedule
        self._cap = max_active_stages
        self._managed = gathered_stages(schedule)
        self._to_reduce = frozenset() if forward_only else reduced_stages(schedule)
        self._gathered: set[int] = set()
        self._reduced: set[int] = set()

    def findings(self) -> Iterator[Finding]:
        """Yield every broken rule, row by row."""
        steps = self._schedule.kinds & FSDP_KINDS
        if not (steps or self._managed or self._to_reduce):
            return
        for rank, row in enumerate(self._schedule.steps):
            yield from self._row(rank, row.codes())

    def _row(self, rank: int, row: list[int]) -> Iterator[Finding]:
        self._gathered.clear()
        marks = [p for p, code in enumerate(row) if FIRST_FSDP <= code & KIND_MASK < FIRST_OVERLAP]
        steps = [(row[p] & KIND_MASK, row[p] >> STAGE_SHIFT & STAGE_MASK) for p in marks]
        here = set(self._schedule.stages_of(rank))
        managed = {stage for kind, stage in steps if kind == FSDP_UNSHARD} & self._managed
        for stage in sorted(here & self._managed - managed):
            yield _finding("is sharded and never unsharded", stage, rank, None)
        begin = 0
        for mark, (kind, stage) in zip(marks, steps, strict=True):
            yield from self._uses(rank, row, range(begin, mark), managed)
            text = self._apply(kind, stage)
            if text is not None:
                yield _finding(text, stage, rank, mark)
            begin = mark + 1
        yield from self._uses(rank, row, range(begin, len(row)), managed)
        for stage in sorted(self._gathered):
            yield _finding("is left unsharded", stage, rank, None)
        for stage in sorted(here & self._to_reduce - self._reduced):
            yield _finding("never reduces its gradients", stage, rank, None)

    def _uses(
        self, rank: int, row: list[int], cells: range, managed: set[int]
    ) -> Iterator[Finding]:
        """Check the compute steps between two FSDP steps: all kinds of them at once."""
        found = {row[position] & ANY_MICROBATCH for position in cells}
        broken = {key for key in found if is_compute(key) and self._misuse(key, managed)}
        for position in cells if broken else ():
            misuse = self._misuse(row[position], managed) if is_compute(row[position]) else None
            if misuse is not None:
                yield _finding(*misuse, rank, position)

    def _misuse(self, code: int, managed: set[int]) -> tuple[str, int] | None:
        for leaf in leaves(code):
            stage = leaf >> STAGE_SHIFT & STAGE_MASK
            if stage in managed and stage not in self._gathered:
                return "computes while its parameters are sharded", stage
            if stage in self._reduced and leaf & KIND_MASK in {BWD, BWD_WEIGHT}:
                return "accumulates gradients after they were reduced", stage
        return None

    def _apply(self, kind: int, stage: int) -> str | None:
        """Apply an FSDP step; return a description of its mistake, if it has one."""
        if kind == FSDP_REDUCE_GRAD:
            return self._reduce(stage)
        if stage not in self._managed:
            return "is not sharded"
        if kind == FSDP_RESHARD:
            was_gathered = stage in self._gathered
            self._gathered.discard(stage)
            return None if was_gathered else "is not unsharded"
        return self._gather(stage)

    def _gather(self, stage: int) -> str | None:
        if stage in self._gathered:
            return "is unsharded already"
        self._gathered.add(stage)
        if self._cap is not None and len(self._gathered) > self._cap:
            return f"is one of {len(self._gathered)} unsharded, that must be <= {self._cap}"
        return None

    def _reduce(self, stage: int) -> str | None:
        again = stage in self._reduced
        self._reduced.add(stage)
        if stage not in self._to_reduce:
            return "reduces gradients that are not to be reduced"
        return "reduces its gradients twice" if again else None


def _finding(text: str, stage: int, rank: int, position: int | None) -> Finding:
    return finding_at(FindingKind.FSDP, f"stage {stage} {text}", rank, position)
