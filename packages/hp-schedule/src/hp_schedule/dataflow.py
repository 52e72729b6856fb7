"""Values that the steps of a schedule read, write and carry, as tables.

A value is the output of a stage for a microbatch, or the gradient of a stage's input for a
microbatch. Values are numbered, so that checks and passes keep their state in flat arrays:

    output of stage s, microbatch m             s * num_microbatches + m
    input gradient of stage s, microbatch m     (num_stages + s) * num_microbatches + m

A message is known by the value it carries: the send that reads it and the receive that writes it.
"""

from dataclasses import dataclass
from functools import lru_cache

from hp_schedule.packing import (
    BWD,
    BWD_INPUT,
    BWD_RECV,
    BWD_SEND,
    FWD,
    FWD_RECV,
    FWD_SEND,
    KIND_MASK,
    MICROBATCH_SHIFT,
    STAGE_MASK,
    STAGE_SHIFT,
    TYPES,
    encode,
)
from hp_schedule.schedule import Schedule

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
