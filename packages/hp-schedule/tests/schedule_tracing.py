"""What a schedule computes, shown with symbols: the executor's driver for tests.

Messages have no tags: what a receive gets is the next value of its queue, whatever the schedule
meant. A wrong order therefore shows as a wrong symbol, or as a deadlock of the machine that is
chosen. Nothing here knows the rules that `hp_schedule.validate` checks, so it can judge them.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Final

from hp_schedule.executor import Executor, run_together
from hp_schedule.schedule import DeadlockError, Schedule
from hp_schedule.steps import MetaStep, MetaStepType

Symbol = Hashable
"""A value, written as the nested tuple of what it was computed from."""

_Edge = tuple[int, int]
_Receive = tuple[MetaStepType, int, int]
"""Type, stage and microbatch."""


@dataclass(frozen=True, slots=True)
class MessageMachine:
    """How messages move: the halves of a message meet when both are the oldest of their queues.

    Attributes:
        shares: Whether a rank has a queue for each directed edge (0), for each other rank (1) or
            one for all its messages (2).
        send_waits: Whether a send holds up its rank until it has met its receive.
        receive_waits: Whether a receive does until a value is there.
    """

    shares: int = 0
    send_waits: bool = False
    receive_waits: bool = False

    def queue(self, rank: int, edge: _Edge) -> Hashable:
        """Return the name of a rank's queue for an edge."""
        return rank, (edge, frozenset(edge), "all")[self.shares]


MACHINES: Final = {
    "rendezvous": MessageMachine(send_waits=True, receive_waits=True),
    "buffered": MessageMachine(receive_waits=True),
    "edge": MessageMachine(),
    "pair": MessageMachine(shares=1),
    "rank": MessageMachine(shares=2),
}
"""From the least helpful to those whose communicators are queues."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What each stage computed.

    Attributes:
        outputs: Output of each (stage, microbatch).
        weight_grads: What was added to the weight gradients of each stage, in order.
        reduced: How much of that had been added when the gradients of the stage were reduced.
        gathered: Stages whose parameters were still gathered in the end.
    """

    outputs: dict[tuple[int, int], Symbol]
    weight_grads: dict[int, list[Symbol]]
    reduced: dict[int, list[int]]
    gathered: set[int]


def trace(
    schedule: Schedule,
    machine: MessageMachine = MACHINES["rendezvous"],
    *,
    sharded: Iterable[int] | None = None,
) -> Trace:
    """Run a schedule with communication steps on symbols.

    Args:
        schedule: Any.
        machine: How messages move.
        sharded: The stages whose parameters must be gathered; default: those the schedule declares,
            or has an UNSHARD step for.

    Raises:
        DeadlockError: If it cannot run to its end, or messages are left then.
        KeyError: If a step needs a value that was never made or was used up, has run before, or is
            not of its rank, parameters are not as it needs them, or what a forward kept is run
            again or copied for no backward.
    """
    network = _Network(machine)
    stages = range(schedule.num_stages)
    result = Trace({}, {stage: [] for stage in stages}, {stage: [] for stage in stages}, set())
    if sharded is None:
        sharded = schedule.gathered_stages
    if sharded is None:
        unshard = MetaStepType.FSDP_UNSHARD
        steps = (step for row in schedule.steps for step in row if step)
        sharded = {step.stage_index or 0 for step in steps if step.type is unshard}
    whole = set(stages) - set(sharded)
    ranks = [
        _TracedRank(rank, schedule, network, result, whole) for rank in range(schedule.num_ranks)
    ]
    run_together([Executor(row, rank) for row, rank in zip(schedule.steps, ranks, strict=True)])
    network.check_empty()
    for rank in ranks:
        rank.check_used()
    return result


@dataclass(slots=True)
class _Half:
    """One half of a message: a send has a value, a receive the step that waits for it."""

    rank: int
    edge: _Edge
    value: Symbol = None
    receive: _Receive | None = None
    has_met: bool = False


class _Network:
    """The queues of all ranks.

    Attributes:
        arrived: Values that arrived, by rank and receive.
    """

    def __init__(self, machine: MessageMachine) -> None:
        self.arrived: dict[tuple[int, _Receive], Symbol] = {}
        self._machine = machine
        self._queues: defaultdict[Hashable, deque[_Half]] = defaultdict(deque)
        self._holding: dict[int, _Half] = {}

    def is_held_up(self, rank: int) -> bool:
        return rank in self._holding and not self._holding[rank].has_met

    def issue(self, half: _Half) -> None:
        waits = self._machine.receive_waits if half.receive else self._machine.send_waits
        if waits:
            self._holding[half.rank] = half
        self._queues[self._machine.queue(half.rank, half.edge)].append(half)
        pending = [half]
        while pending:
            pending += self._meet(pending.pop())

    def check_empty(self) -> None:
        left = [half.edge for queue in self._queues.values() for half in queue]
        if left:
            raise DeadlockError(f"messages are left on edges {sorted(set(left))}")

    def _meet(self, half: _Half) -> list[_Half]:
        """Let a half meet the other one if both are the oldest; return who is oldest then."""
        other = half.edge[0] if half.receive else half.edge[1]
        queues = [self._queues[self._machine.queue(rank, half.edge)] for rank in (half.rank, other)]
        if not all(queues) or queues[0][0] is not half:
            return []
        partner = queues[1][0]
        if partner.edge != half.edge or (partner.receive is None) == (half.receive is None):
            return []
        send, receive = (partner, half) if half.receive else (half, partner)
        assert receive.receive is not None
        self.arrived[receive.rank, receive.receive] = send.value
        for queue in queues:
            queue.popleft().has_met = True
        return [queue[0] for queue in queues if queue]


class _TracedRank:
    """A driver whose tensors are tuples."""

    def __init__(
        self, rank: int, schedule: Schedule, network: _Network, result: Trace, whole: set[int]
    ) -> None:
        self._rank = rank
        self._schedule = schedule
        self._network = network
        self._result = result
        self._whole = whole
        self._posted: set[_Receive] = set()
        self._inputs: dict[tuple[int, int], Symbol] = {}
        self._grads: dict[tuple[int, int], Symbol] = {}
        self._saved: dict[tuple[int, int], Symbol] = {}
        # What forwards keep that are run again; what is on the host; whose steps have run.
        self._kept_inputs: dict[tuple[int, int], Symbol] = {}
        self._on_host: dict[tuple[int, int], Symbol] = {}
        self._retained: set[tuple[MetaStepType, int, int]] = set()
        steps = {
            (step.type, step.stage_index or 0, step.microbatch_index or 0)
            for step in schedule.steps[rank]
            if step is not None
        }
        self._again = {step[1:] for step in steps if step[0] is MetaStepType.RECOMPUTE}
        self._moved = {step[1:] for step in steps if step[0] is MetaStepType.OFFLOAD}
        self._pending: dict[tuple[int, int], tuple[Symbol, Symbol]] = {}
        self._outgoing: dict[tuple[MetaStepType, int, int], Symbol] = {}

    def ready(self, step_type: MetaStepType, stage_index: int, microbatch_index: int) -> bool:
        if self._network.is_held_up(self._rank):
            return False
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
        if key in self._again & self._moved:
            raise KeyError(f"forward {key} is to keep nothing, and to have it copied")
        (self._kept_inputs if key in self._again else self._saved)[key] = value
        if key in self._result.outputs:
            raise KeyError(f"forward {key} runs twice")
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

    def recompute(self, stage_index: int, microbatch_index: int) -> None:
        self._use(stage_index)
        key = self._once(MetaStepType.RECOMPUTE, stage_index, microbatch_index)
        self._saved[key] = self._kept_inputs.pop(key)

    def offload(self, stage_index: int, microbatch_index: int) -> None:
        key = self._once(MetaStepType.OFFLOAD, stage_index, microbatch_index)
        self._on_host[key] = self._saved.pop(key)

    def reload(self, stage_index: int, microbatch_index: int) -> None:
        key = self._once(MetaStepType.RELOAD, stage_index, microbatch_index)
        self._saved[key] = self._on_host.pop(key)

    def check_used(self) -> None:
        """Refuse what was run again or copied, and no backward has used."""
        left = {step[1:] for step in self._retained} & self._saved.keys()
        if left or self._on_host or self._kept_inputs:
            raise KeyError("what forwards kept is left")

    def _once(self, step_type: MetaStepType, stage: int, microbatch: int) -> tuple[int, int]:
        self._here(stage)
        if (step_type, stage, microbatch) in self._retained:
            raise KeyError(f"{step_type.name} {(stage, microbatch)} runs twice")
        self._retained.add((step_type, stage, microbatch))
        return stage, microbatch

    def send_forward(self, stage_index: int, microbatch_index: int) -> None:
        self._send(MetaStepType.FWD_SEND, stage_index, microbatch_index)

    def send_backward(self, stage_index: int, microbatch_index: int) -> None:
        self._send(MetaStepType.BWD_SEND, stage_index, microbatch_index)

    def receive_forward(self, stage_index: int, microbatch_index: int) -> None:
        self._post(MetaStepType.FWD_RECV, stage_index, microbatch_index)

    def receive_backward(self, stage_index: int, microbatch_index: int) -> None:
        self._post(MetaStepType.BWD_RECV, stage_index, microbatch_index)

    def unshard(self, stage_index: int) -> None:
        self._here(stage_index)
        if stage_index in self._whole | self._result.gathered:
            raise KeyError(f"parameters of stage {stage_index} are there")
        self._result.gathered.add(stage_index)

    def reshard(self, stage_index: int) -> None:
        self._here(stage_index)
        self._result.gathered.remove(stage_index)

    def reduce_grad(self, stage_index: int) -> None:
        self._here(stage_index)
        self._result.reduced[stage_index].append(len(self._result.weight_grads[stage_index]))

    def overlap(self, step: MetaStep) -> None:
        for half in step.sub_steps:
            if half.type is not MetaStepType.FWD:
                # Both halves start at once: the backward cannot wait for its own forward.
                self._saved[half.stage_index or 0, half.microbatch_index or 0]
        for half in step.sub_steps:
            run = {
                MetaStepType.FWD: self.forward,
                MetaStepType.BWD: self.backward,
                MetaStepType.BWD_INPUT: self.backward_input,
            }[half.type]
            run(half.stage_index or 0, half.microbatch_index or 0)

    def _here(self, stage: int) -> None:
        if self._place(stage) != self._rank:
            raise KeyError(f"stage {stage} is not on rank {self._rank}")

    def _use(self, stage: int) -> None:
        self._here(stage)
        if stage not in self._whole | self._result.gathered:
            raise KeyError(f"parameters of stage {stage}")

    def _send(self, step_type: MetaStepType, stage: int, microbatch: int) -> None:
        edge = (self._rank, self._other_rank(step_type, stage))
        value = self._outgoing.pop((step_type, stage, microbatch))
        self._network.issue(_Half(self._rank, edge, value))

    def _post(self, step_type: MetaStepType, stage: int, microbatch: int) -> None:
        edge = (self._other_rank(step_type, stage), self._rank)
        receive = (step_type, stage, microbatch)
        if receive in self._posted:
            raise KeyError(f"receive {receive} is posted twice")
        self._posted.add(receive)
        self._network.issue(_Half(self._rank, edge, receive=receive))

    def _other_rank(self, step_type: MetaStepType, stage: int) -> int:
        self._here(stage)
        peer = self._peer(step_type, stage)
        if peer < 0:
            raise KeyError(f"stage {stage} has no other rank for {step_type.name}")
        return peer

    def _has(self, receive: MetaStepType, stage: int, microbatch: int) -> bool:
        """Whether the input of a compute step is there; a local one is, or never will be."""
        if self._peer(receive, stage) < 0:
            return True
        return (self._rank, (receive, stage, microbatch)) in self._network.arrived

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
        return self._network.arrived.pop((self._rank, (receive, *key)))

    def _peer(self, step_type: MetaStepType, stage: int) -> int:
        onward = step_type in {MetaStepType.FWD_SEND, MetaStepType.BWD_RECV}
        other = (self._schedule.downstream if onward else self._schedule.upstream)[stage]
        return -1 if other < 0 or self._place(other) == self._rank else self._place(other)

    def _place(self, stage: int) -> int:
        return self._schedule.stage_to_rank[stage]
