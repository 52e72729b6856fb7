"""Steps that gather, free and reduce the sharded parameters of stages.

Each pass looks at one rank's row at a time, so that all data-parallel copies of a pipeline rank get
the same order of collectives.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hp_schedule.schedule import Schedule
from hp_schedule.steps import (
    ANY_MICROBATCH,
    BWD,
    BWD_SEND,
    BWD_WEIGHT,
    FSDP_REDUCE_GRAD,
    FSDP_RESHARD,
    FSDP_UNSHARD,
    FWD_SEND,
    KIND_MASK,
    STAGE_MASK,
    STAGE_SHIFT,
    encode,
    is_compute,
    leaves,
)


def add_fsdp_unshard_reshard(
    schedule: Schedule,
    *,
    max_active_stages: int = 3,
    prefetch: int | None = None,
    stages: Iterable[int] | None = None,
) -> Schedule:
    """Gather the parameters of stages before they are used, and free them again.

    A rank holds the parameters of at most `max_active_stages` stages. Those of the next `prefetch`
    other stages that its row uses are gathered ahead of their use. To make room the stage is freed
    whose next use is farthest, which keeps the number of gathers least (Belady 1966); a stage is
    freed at once after its last use.

    Args:
        schedule: Schedule with or without communication steps.
        max_active_stages: Stages that a rank may hold gathered at once, at least 1, and at least 2
            if an overlap uses two.
        prefetch: Stages to gather ahead, less than `max_active_stages`; default: one less.
        stages: Those whose parameters are sharded; default: all. The result says so
            (`gathered_stages`), so that the absence of a step is an error.

    Raises:
        ValueError: If a number is out of range, or the schedule has such steps already.
    """
    if schedule.kinds & {FSDP_UNSHARD, FSDP_RESHARD}:
        raise ValueError("schedule must have no UNSHARD and RESHARD steps")
    if max_active_stages < 1:
        raise ValueError(f"max_active_stages ({max_active_stages}) must be >= 1")
    prefetch = max_active_stages - 1 if prefetch is None else prefetch
    if not 0 <= prefetch < max_active_stages:
        raise ValueError(
            f"prefetch ({prefetch}) must be >= 0 and < max_active_stages ({max_active_stages})"
        )
    sharded = frozenset(range(schedule.num_stages) if stages is None else stages)
    found = schedule.with_rows(
        _gather_in_time(row.codes(), sharded, max_active_stages, prefetch) for row in schedule.steps
    )
    return replace(found, gathered_stages=tuple(sorted(sharded)))


def add_fsdp_reduce_grad(schedule: Schedule, *, stages: Iterable[int] | None = None) -> Schedule:
    """Reduce the gradients of each stage after its last weight gradient of all microbatches.

    Args:
        schedule: Schedule with or without communication steps; the messages of that last step go
            first.
        stages: Those whose gradients are to be reduced; default: all. The result says so
            (`reduced_stages`).

    Raises:
        ValueError: If the schedule has such steps already.
    """
    if FSDP_REDUCE_GRAD in schedule.kinds:
        raise ValueError("schedule must have no REDUCE_GRAD steps")
    sharded = frozenset(range(schedule.num_stages) if stages is None else stages)
    found = schedule.with_rows(_reduce_at_last(row.codes(), sharded) for row in schedule.steps)
    return replace(found, reduced_stages=tuple(sorted(sharded)))


def _reduce_at_last(row: list[int], sharded: frozenset[int]) -> list[int]:
    last_cell = {code & ANY_MICROBATCH: position for position, code in enumerate(row)}
    last: dict[int, int] = {}
    for key, position in last_cell.items():
        for leaf in leaves(key) if is_compute(key) else ():
            if leaf & KIND_MASK in {BWD, BWD_WEIGHT}:
                stage = leaf >> STAGE_SHIFT & STAGE_MASK
                last[stage] = max(position, last.get(stage, 0))
    # From the back, so that positions in front stay what they are.
    for stage, position in sorted(last.items(), key=lambda item: -item[1]):
        if stage in sharded:
            after = position + 1
            while after < len(row) and row[after] & KIND_MASK in {FWD_SEND, BWD_SEND}:
                after += 1
            row.insert(after, encode(FSDP_REDUCE_GRAD, stage))
    return row


def _gather_in_time(
    row: list[int], sharded: frozenset[int], max_active_stages: int, prefetch: int
) -> list[int]:
    keys = [code & ANY_MICROBATCH for code in row]
    stages_of = {key: _sharded_stages(key, sharded) for key in set(keys) if is_compute(key)}
    cells = [position for position, key in enumerate(keys) if key in stages_of]
    uses = [stages_of[keys[position]] for position in cells]
    result: list[int] = []
    done = 0
    for use, steps in _Residency(uses, max_active_stages, prefetch).plan():
        position = cells[use] if use < len(cells) else len(row)
        result += row[done:position]
        result += steps
        done = position
    return result + row[done:]


def _sharded_stages(code: int, sharded: frozenset[int]) -> tuple[int, ...]:
    """Return the sharded stages that a compute step uses."""
    found = dict.fromkeys(leaf >> STAGE_SHIFT & STAGE_MASK for leaf in leaves(code))
    return tuple(stage for stage in found if stage in sharded)


class _Residency:
    """Decides before which use a stage is gathered and freed.

    A window slides over the uses: it begins at the current one and reaches as far as it holds no
    more different stages than may be gathered ahead. A stage is gathered when the window reaches
    it; each use enters and leaves once.

    Args:
        uses: The stages of each compute step of a row.
        max_active_stages: Most stages gathered at once.
        prefetch: Stages beyond those of the current step to gather.
    """

    def __init__(
        self, uses: Sequence[tuple[int, ...]], max_active_stages: int, prefetch: int
    ) -> None:
        self._uses = uses
        self._cap = max_active_stages
        self._prefetch = prefetch
        self._in_window = {stage: 0 for needed in uses for stage in needed}
        self._distinct = 0
        self._reach = 0
        self._resident: dict[int, None] = {}
        self._positions: dict[int, list[int]] = {}

    def plan(self) -> list[tuple[int, list[int]]]:
        """Return the steps to insert, with the number of the use before which they stand."""
        uses, in_window = self._uses, self._in_window
        last = {stage: use for use, needed in enumerate(uses) for stage in needed}
        ends: dict[int, list[int]] = {}
        for stage, use in last.items():
            ends.setdefault(use + 1, []).append(stage)
        if len(last) <= min(self._cap, 1 + self._prefetch):
            # The window holds the whole row at once: no need to slide it.
            begin = (0, self._gather(list(in_window)))
            return [begin, *((use, [self._free(s) for s in ends[use]]) for use in sorted(ends))]
        plan: list[tuple[int, list[int]]] = []
        for use, needed in enumerate(uses):
            steps = [self._free(stage) for stage in ends.get(use, ())]
            limit = min(self._cap, len(needed) + self._prefetch)
            if self._distinct < limit or self._reach == use:
                steps += self._extend(use, limit)
            if steps:
                plan.append((use, steps))
            for stage in needed:
                in_window[stage] -= 1
                self._distinct -= not in_window[stage]
        rest = [self._free(stage) for stage in ends.get(len(uses), ())]
        return [*plan, (len(uses), rest)] if rest else plan

    def _extend(self, use: int, limit: int) -> list[int]:
        """Let the window reach further; returns the steps that this takes."""
        steps: list[int] = []
        while self._reach < len(self._uses) and (self._distinct < limit or self._reach == use):
            needed = self._uses[self._reach]
            new = [stage for stage in needed if not self._in_window[stage]]
            if new:
                if self._distinct + len(new) > self._cap and self._reach > use:
                    break
                steps += self._gather(new)
            for stage in needed:
                self._in_window[stage] += 1
            self._reach += 1
        return steps

    def _gather(self, stages: list[int]) -> list[int]:
        """Let stages enter the window: gather those that are not there, in place of others."""
        self._distinct += len(stages)
        if self._distinct > self._cap:
            raise ValueError(f"max_active_stages ({self._cap}) must be >= {self._distinct}")
        missing = [stage for stage in stages if stage not in self._resident]
        surplus = len(self._resident) + len(missing) - self._cap
        steps = [self._free(self._farthest(stages)) for _ in range(surplus)]
        self._resident.update(dict.fromkeys(missing))
        return steps + [encode(FSDP_UNSHARD, stage) for stage in missing]

    def _free(self, stage: int) -> int:
        del self._resident[stage]
        return encode(FSDP_RESHARD, stage)

    def _farthest(self, entering: list[int]) -> int:
        """Return the resident stage neither in the window nor entering that is used last."""
        if not self._positions:
            for use, needed in enumerate(self._uses):
                for stage in needed:
                    self._positions.setdefault(stage, []).append(use)
        kept = {*entering, *(stage for stage, count in self._in_window.items() if count)}
        idle = [stage for stage in self._resident if stage not in kept]
        return max(idle, key=self._next_use)

    def _next_use(self, stage: int) -> int:
        positions = self._positions[stage]
        return positions[bisect_left(positions, self._reach)]
