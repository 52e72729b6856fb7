"""What a schedule computes, shown with symbols: the executor's driver for tests.

The machine is as unhelpful as the validator's: a send holds up its rank until a receive is posted,
and what a receive gets is simply the next value of its edge. A wrong order therefore shows as a
wrong symbol or as a deadlock.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from hp_schedule.executor import Executor, run_together
from hp_schedule.ir import MetaStep, MetaStepType
from hp_schedule.schedule import Schedule

_UNSHARD = MetaStepType.FSDP_UNSHARD

Symbol = Hashable
"""A value, written as the nested tuple of what it was computed from."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What each stage computed.

    Attributes:
        outputs: By (stage, microbatch): the output.
        weight_grads: By stage: what was added to the weight gradients, in order.
        reduced: By stage: how much of that had been added when the gradients were reduced.
    """

    outputs: dict[tuple[int, int], Symbol]
    weight_grads: dict[int, list[Symbol]]
    reduced: dict[int, list[int]]


def trace(schedule: Schedule) -> Trace:
    """Run a schedule with communication steps on symbols.

    Raises:
        DeadlockError: If it cannot run to its end.
        KeyError: If a step needs a value that was never made or was used up, or parameters that
            are sharded.
    """
    edges = _Edges()
    stages = range(schedule.num_stages)
    result = Trace({}, {stage: [] for stage in stages}, {stage: [] for stage in stages})
    ranks = [_TracedRank(rank, schedule, edges, result) for rank in range(schedule.num_ranks)]
    run_together([Executor(row, rank) for row, rank in zip(schedule.steps, ranks, strict=True)])
    return result


class _Edges:
    """Untagged channels: the n-th value sent goes to the n-th receive posted."""

    def __init__(self) -> None:
        self.sent: defaultdict[tuple[int, int], list[Symbol]] = defaultdict(list)
        self.posted: defaultdict[tuple[int, int], list[object]] = defaultdict(list)

    def can_send(self, edge: tuple[int, int]) -> bool:
        return len(self.posted[edge]) > len(self.sent[edge])

    def arrived(self, edge: tuple[int, int], receive: object) -> bool:
        posted = self.posted[edge]
        return receive in posted and posted.index(receive) < len(self.sent[edge])

    def take(self, edge: tuple[int, int], receive: object) -> Symbol:
        return self.sent[edge][self.posted[edge].index(receive)]


class _TracedRank:
    """A driver whose tensors are tuples."""

    def __init__(self, rank: int, schedule: Schedule, edges: _Edges, result: Trace) -> None:
        self._rank = rank
        self._schedule = schedule
        self._edges = edges
        self._result = result
        self._inputs: dict[tuple[int, int], Symbol] = {}
        self._grads: dict[tuple[int, int], Symbol] = {}
        self._saved: dict[tuple[int, int], Symbol] = {}
        self._pending: dict[tuple[int, int], tuple[Symbol, Symbol]] = {}
        self._outgoing: dict[tuple[MetaStepType, int, int], Symbol] = {}
        # Stages that the schedule never gathers have their parameters.
        managed = {s.stage_index for s in schedule.steps[rank] if s and s.type is _UNSHARD}
        self._gathered = set(range(schedule.num_stages)) - managed

    def ready(self, step_type: MetaStepType, stage_index: int, microbatch_index: int) -> bool:
        if step_type in {MetaStepType.FWD_SEND, MetaStepType.BWD_SEND}:
            return self._edges.can_send((self._rank, self._peer(step_type, stage_index)))
        if step_type is MetaStepType.FWD:
            return self._has(MetaStepType.FWD_RECV, stage_index, microbatch_index)
        if step_type in {MetaStepType.BWD, MetaStepType.BWD_INPUT}:
            return self._has(MetaStepType.BWD_RECV, stage_index, microbatch_index)
        return True

    def forward(self, stage_index: int, microbatch_index: int) -> None:
        self._use(stage_index)
        key = (stage_index, microbatch_index)
        value = self._take(MetaStepType.FWD_RECV, self._inputs, key, ("x", microbatch_index))
        output = ("F", stage_index, value)
        self._saved[key] = value
        self._result.outputs[key] = output
        after = self._schedule.downstream[stage_index]
        if after >= 0 and self._place(after) == self._rank:
            self._inputs[after, microbatch_index] = output
        self._outgoing[MetaStepType.FWD_SEND, stage_index, microbatch_index] = output

    def backward(self, stage_index: int, microbatch_index: int) -> None:
        self.backward_input(stage_index, microbatch_index)
        self.backward_weight(stage_index, microbatch_index)

    def backward_input(self, stage_index: int, microbatch_index: int) -> None:
        self._use(stage_index)
        key = (stage_index, microbatch_index)
        loss = ("loss", self._result.outputs[key])
        grad = self._take(MetaStepType.BWD_RECV, self._grads, key, loss)
        self._pending[key] = (self._saved.pop(key), grad)
        before = self._schedule.upstream[stage_index]
        result = ("B", stage_index, grad)
        if before >= 0 and self._place(before) == self._rank:
            self._grads[before, microbatch_index] = result
        self._outgoing[MetaStepType.BWD_SEND, stage_index, microbatch_index] = result

    def backward_weight(self, stage_index: int, microbatch_index: int) -> None:
        self._use(stage_index)
        grad = self._pending.pop((stage_index, microbatch_index))
        self._result.weight_grads[stage_index].append(grad)

    def send_forward(self, stage_index: int, microbatch_index: int) -> None:
        self._send(MetaStepType.FWD_SEND, stage_index, microbatch_index)

    def send_backward(self, stage_index: int, microbatch_index: int) -> None:
        self._send(MetaStepType.BWD_SEND, stage_index, microbatch_index)

    def receive_forward(self, stage_index: int, microbatch_index: int) -> None:
        self._post(MetaStepType.FWD_RECV, stage_index, microbatch_index)

    def receive_backward(self, stage_index: int, microbatch_index: int) -> None:
        self._post(MetaStepType.BWD_RECV, stage_index, microbatch_index)

    def unshard(self, stage_index: int) -> None:
        self._gathered.add(stage_index)

    def reshard(self, stage_index: int) -> None:
        self._gathered.remove(stage_index)

    def reduce_grad(self, stage_index: int) -> None:
        self._result.reduced[stage_index].append(len(self._result.weight_grads[stage_index]))

    def overlap(self, step: MetaStep) -> None:
        for half in step.sub_steps:
            run = {
                MetaStepType.FWD: self.forward,
                MetaStepType.BWD: self.backward,
                MetaStepType.BWD_INPUT: self.backward_input,
            }[half.type]
            run(half.stage_index or 0, half.microbatch_index or 0)

    def _use(self, stage: int) -> None:
        if stage not in self._gathered:
            raise KeyError(f"parameters of stage {stage}")

    def _send(self, step_type: MetaStepType, stage: int, microbatch: int) -> None:
        edge = (self._rank, self._peer(step_type, stage))
        self._edges.sent[edge].append(self._outgoing.pop((step_type, stage, microbatch)))

    def _post(self, step_type: MetaStepType, stage: int, microbatch: int) -> None:
        edge = (self._peer(step_type, stage), self._rank)
        self._edges.posted[edge].append((step_type, stage, microbatch))

    def _has(self, receive: MetaStepType, stage: int, microbatch: int) -> bool:
        """Whether the input of a compute step is there; a local one is, or never will be."""
        peer = self._peer(receive, stage)
        if peer < 0:
            return True
        return self._edges.arrived((peer, self._rank), (receive, stage, microbatch))

    def _take(
        self,
        receive: MetaStepType,
        local: dict[tuple[int, int], Symbol],
        key: tuple[int, int],
        at_end: Symbol,
    ) -> Symbol:
        forward = receive is MetaStepType.FWD_RECV
        other = (self._schedule.upstream if forward else self._schedule.downstream)[key[0]]
        if other < 0:
            return at_end
        if self._place(other) == self._rank:
            return local.pop(key)
        return self._edges.take((self._place(other), self._rank), (receive, *key))

    def _peer(self, step_type: MetaStepType, stage: int) -> int:
        onward = step_type in {MetaStepType.FWD_SEND, MetaStepType.BWD_RECV}
        other = (self._schedule.downstream if onward else self._schedule.upstream)[stage]
        return -1 if other < 0 or self._place(other) == self._rank else self._place(other)

    def _place(self, stage: int) -> int:
        return self._schedule.stage_to_rank[stage]
