"""The simulator: ranks whose clock is a number, driven by the executor, and its entry point."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial, partialmethod

from hp_schedule.costs import Costs, per_step
from hp_schedule.executor import Executor, describe_stuck
from hp_schedule.schedule import Dataflow, DeadlockError, Schedule, dataflow
from hp_schedule.simulation.channels import (
    ChannelModel,
    Channels,
    Clock,
    Edge,
    SharedCores,
    check_model,
)
from hp_schedule.simulation.recurrence import Numbers, recurrence
from hp_schedule.steps import (
    BWD,
    BWD_INPUT,
    BWD_RECV,
    BWD_SEND,
    BWD_WEIGHT,
    FIRST_COMMUNICATION,
    FSDP_REDUCE_GRAD,
    FSDP_UNSHARD,
    FWD,
    FWD_RECV,
    FWD_SEND,
    KIND,
    KIND_MASK,
    MICROBATCH_SHIFT,
    OFFLOAD,
    OVERLAP_B_F,
    OVERLAP_F_B,
    RECEIVE_OF,
    RECOMPUTE,
    RELOAD,
    SEND_OF,
    STAGE_MASK,
    STAGE_SHIFT,
    MetaStep,
    MetaStepType,
    encode,
    pack,
    unpack,
)
from hp_schedule.timeline import Span, Timeline


class Machine:
    """All ranks, with the channels and cores that they share.

    Args:
        schedule: What they run.
        costs: What it costs.
        channels: See `simulate`.
        blocking: See `simulate`.
        cores: See `simulate`.

    Attributes:
        produced: Time at which each value was computed.
        arrived: Time at which each value was at each destination.
    """

    def __init__(
        self,
        schedule: Schedule,
        costs: Costs,
        *,
        channels: ChannelModel = "edge",
        blocking: bool = False,
        cores: int | None = None,
    ) -> None:
        sizes = (schedule.num_stages, schedule.num_microbatches)
        self.clock = Clock()
        self.flow: Dataflow = dataflow(schedule)
        self.num_microbatches = schedule.num_microbatches
        self.durations = costs.durations(*sizes)
        self.held = costs.activation_memory(*sizes)
        self.host_bandwidth = costs.host_bandwidth
        self.again = schedule.recomputed
        self.unshard = per_step("unshard", costs.unshard, schedule.num_stages)
        self.reduce_grad = per_step("reduce_grad", costs.reduce_grad, schedule.num_stages)
        self.blocking = blocking
        self.implicit = not schedule.has_communication
        self.start = self.clock.after if cores is None else SharedCores(self.clock, cores).start
        self.channels = Channels(channels, schedule, costs, self.clock, self._arrive)
        self.produced: dict[int, float] = {}
        self.arrived: dict[tuple[int, int], float] = {}
        self.ranks = [_SimulatedRank(rank, self) for rank in range(schedule.num_ranks)]
        self._executors = [
            Executor(row, driver) for row, driver in zip(schedule.steps, self.ranks, strict=True)
        ]

    def run(self) -> float:
        """Run every row to its end.

        Returns:
            The time at which the last thing ended.

        Raises:
            DeadlockError: If a row cannot be run to its end.
        """
        if self.settle():
            raise DeadlockError(describe_stuck(self._executors))
        for driver in self.ranks:
            driver.close()
        return self.clock.now

    def settle(self) -> dict[int, int]:
        """Run every row as far as it goes; return the cell of each rank that is not at its end."""
        for rank in range(len(self.ranks)):
            self.wake(rank)
        self.clock.run()
        ranks = enumerate(self._executors)
        return {rank: executor.position for rank, executor in ranks if executor.step is not None}

    def wake(self, rank: int) -> None:
        """Let a rank go on as far as it can."""
        self._executors[rank].advance()

    def index(self, code: int) -> int:
        """Return where the tables of costs have a step."""
        stage = code >> STAGE_SHIFT & STAGE_MASK
        return stage * self.num_microbatches + (code >> MICROBATCH_SHIFT)

    def produce(self, value: int, code: int, rank: int) -> bool:
        """Make a value known on its rank and, without communication steps, send it.

        Returns:
            Whether it was sent.
        """
        self.produced[value] = self.arrived[value, rank] = self.clock.now
        peer = self.flow.peer[SEND_OF[code & KIND_MASK]][code >> STAGE_SHIFT & STAGE_MASK]
        if self.implicit and peer >= 0:
            self.channels.issue(rank, value, (rank, peer))
            self.channels.issue(peer, value, (rank, peer))
            return True
        return False

    def _arrive(self, value: int, edge: Edge) -> None:
        source, destination = edge
        self.arrived[value, destination] = self.clock.now
        self.ranks[source].moved(value)
        self.ranks[destination].moved(value)


class _SimulatedRank:
    """One rank as the executor's driver.

    Args:
        rank: Its number.
        machine: What it shares with the others.

    Attributes:
        spans: Its compute steps and its waits, in order of time.
        busy: Time spent in compute steps.
        exposed: Time spent waiting for values that were computed already, for collectives and for
            copies from the host.
        peak: The most memory held by activations, until a copy to the host has ended.
    """

    def __init__(self, rank: int, machine: Machine) -> None:
        self.spans: list[Span] = []
        self.busy = 0.0
        self.exposed = 0.0
        self.peak = 0.0
        self._rank = rank
        self._machine = machine
        self._held = 0.0
        # The rank is free since this time; while it is occupied, `ready` says so.
        self._free = 0.0
        self._occupied = False
        # In blocking mode: the messages that the rank stands at, and their steps.
        self._transfers: dict[int, MetaStep] = {}
        # The collectives' communicator is free at this time; each stage has its parameters at.
        self._collectives_free = 0.0
        self._last_collective: MetaStep | None = None
        self._gathered: dict[int, float] = {}
        # The ways to the host and back are free at these times; what was asked for is away or back
        # at, by place in the tables of costs.
        self._way_out = self._way_back = 0.0
        self._away: dict[int, float] = {}
        self._back: dict[int, float] = {}

    def ready(self, step_type: MetaStepType, stage_index: int, microbatch_index: int) -> bool:
        if self._occupied:
            return False
        code = encode(KIND[step_type], stage_index, microbatch_index)
        if code & KIND_MASK >= FIRST_COMMUNICATION:
            return True
        now = self._machine.clock.now
        if self._gathered.get(stage_index, 0.0) > now:
            return False
        if self._back and self._back.get(self._machine.index(code), 0.0) > now:
            return False
        value = self._machine.flow.value_read(code)
        return value < 0 or (value, self._rank) in self._machine.arrived

    def offload(self, stage_index: int, microbatch_index: int) -> None:
        machine, index, size = self._copied(stage_index, microbatch_index)
        self._way_out = max(self._way_out, machine.clock.now) + size / machine.host_bandwidth
        self._away[index] = self._way_out
        if self._way_out > machine.clock.now:
            machine.clock.at(self._way_out, partial(self._hold, -size))
        else:
            self._hold(-size)

    def reload(self, stage_index: int, microbatch_index: int) -> None:
        machine, index, size = self._copied(stage_index, microbatch_index)
        self._hold(size)
        start = max(self._way_back, self._away[index], machine.clock.now)
        self._way_back = self._back[index] = start + size / machine.host_bandwidth
        machine.clock.at(self._way_back, partial(machine.wake, self._rank))

    def unshard(self, stage_index: int) -> None:
        step = MetaStep(MetaStepType.FSDP_UNSHARD, stage_index)
        self._gathered[stage_index] = self._collective(step, self._machine.unshard[stage_index])

    def reshard(self, stage_index: int) -> None:
        self._gathered.pop(stage_index, None)

    def reduce_grad(self, stage_index: int) -> None:
        step = MetaStep(MetaStepType.FSDP_REDUCE_GRAD, stage_index)
        self._collective(step, self._machine.reduce_grad[stage_index])

    def moved(self, value: int) -> None:
        """Record that a message of this rank has arrived."""
        step = self._transfers.pop(value, None)
        if step is not None:
            self._wait(step, self._machine.clock.now, self._machine.produced.get(value, 0.0))
            self._occupied = bool(self._transfers)
        self._machine.wake(self._rank)

    def close(self) -> None:
        """Account for the waits of the rank after its last step.

        Raises:
            DeadlockError: If that is a message which never comes.
        """
        for step in self._transfers.values():
            raise DeadlockError(f"no rank can go on: rank {self._rank} in {step}")
        if self._last_collective is not None:
            self._wait(self._last_collective, self._collectives_free, 0.0)

    def _collective(self, step: MetaStep, duration: float) -> float:
        """Queue a collective and return the time of its end."""
        self._last_collective = step
        clock = self._machine.clock
        self._collectives_free = max(self._collectives_free, clock.now) + duration
        clock.at(self._collectives_free, partial(self._machine.wake, self._rank))
        return self._collectives_free

    def _issue(self, kind: int, stage_index: int, microbatch_index: int) -> None:
        """Issue a send, which reads its value, or a receive, which writes it."""
        code, flow = encode(kind, stage_index, microbatch_index), self._machine.flow
        peer = flow.peer[kind][stage_index]
        value, edge = flow.value_read(code), (self._rank, peer)
        if value < 0:
            value, edge = flow.value_written(code), (peer, self._rank)
        if self._machine.blocking:
            self._transfers[value] = unpack(code)
            self._occupied = True
            self._free = self._machine.clock.now
        self._machine.channels.issue(self._rank, value, edge)

    send_forward = partialmethod(_issue, FWD_SEND)
    send_backward = partialmethod(_issue, BWD_SEND)
    receive_forward = partialmethod(_issue, FWD_RECV)
    receive_backward = partialmethod(_issue, BWD_RECV)

    def _compute(self, kind: int, stage_index: int, microbatch_index: int) -> None:
        self.overlap(unpack(encode(kind, stage_index, microbatch_index)))

    forward = partialmethod(_compute, FWD)
    backward = partialmethod(_compute, BWD)
    backward_input = partialmethod(_compute, BWD_INPUT)
    backward_weight = partialmethod(_compute, BWD_WEIGHT)
    recompute = partialmethod(_compute, RECOMPUTE)

    def overlap(self, step: MetaStep) -> None:
        """Start a step, alone or in halves, and account for its duration."""
        machine = self._machine
        codes = [pack(part) for part in step.leaves()]
        for code in codes:
            self._wait_for_inputs(code)
        for code in codes:
            self._hold(self._taken(code))
        self._occupied = True
        start = machine.clock.now
        duration = sum(machine.durations[c & KIND_MASK][machine.index(c)] for c in codes)
        machine.start(duration, lambda: self._finish(step, codes, start))

    def _finish(self, step: MetaStep, codes: list[int], start: float) -> None:
        machine = self._machine
        self._free = machine.clock.now
        self._occupied = False
        self.busy += self._free - start
        self.spans.append(Span(self._rank, step, start, self._free))
        for code in codes:
            if code & KIND_MASK in {BWD, BWD_WEIGHT}:
                self._hold(-machine.held.all[machine.index(code)])
            value = machine.flow.value_written(code)
            if value >= 0 and machine.produce(value, code, self._rank) and machine.blocking:
                self._transfers[value] = unpack(code & ~KIND_MASK | SEND_OF[code & KIND_MASK])
                self._occupied = True
        machine.wake(self._rank)

    def _copied(self, stage_index: int, microbatch_index: int) -> tuple[Machine, int, float]:
        machine = self._machine
        index = stage_index * machine.num_microbatches + microbatch_index
        return machine, index, machine.held.moved[index]

    def _taken(self, code: int) -> float:
        """Return the memory that a compute step takes at its start."""
        held, index = self._machine.held, self._machine.index(code)
        if code & KIND_MASK == RECOMPUTE:
            return held.all[index] - held.input[index]
        if code & KIND_MASK != FWD:
            return 0.0
        is_again = divmod(index, self._machine.num_microbatches) in self._machine.again
        return (held.input if is_again else held.all)[index]

    def _hold(self, more: float) -> None:
        self._held += more
        self.peak = max(self.peak, self._held)

    def _wait_for_inputs(self, code: int) -> None:
        """Account for the time since the rank was free, by the step that it waited for."""
        machine = self._machine
        stage = code >> STAGE_SHIFT & STAGE_MASK
        value = machine.flow.value_read(code)
        if value >= 0:
            receive = unpack(code & ~KIND_MASK | RECEIVE_OF[code & KIND_MASK])
            self._wait(receive, machine.arrived[value, self._rank], machine.produced[value])
        self._wait(unpack(encode(FSDP_UNSHARD, stage)), self._gathered.get(stage, 0.0), 0.0)
        if self._back:
            reload = unpack(code & ~KIND_MASK | RELOAD)
            self._wait(reload, self._back.get(machine.index(code), 0.0), 0.0)

    def _wait(self, step: MetaStep, until: float, produced: float) -> None:
        if until > self._free:
            self.spans.append(Span(self._rank, step, self._free, until))
            self.exposed += max(0.0, until - max(self._free, produced))
            self._free = until


@dataclass(frozen=True)
class Simulation:
    """Result of a simulation.

    Attributes:
        makespan: Time from the start of the first step to the end of the last.
        bubble: For each rank the share of the makespan in which it computes nothing.
        peak_activations: For each rank the most memory its microbatches in flight hold at once.
        exposed_communication: For each rank the time it stood waiting for values that were computed
            already, for a send to be taken, for a collective of its parameters, or for a copy from
            the host.
    """

    makespan: float
    bubble: tuple[float, ...]
    peak_activations: tuple[float, ...]
    exposed_communication: tuple[float, ...]
    _spans: Callable[[], Timeline] = field(repr=False, compare=False)

    @property
    def timeline(self) -> Timeline:
        """Return every compute step, and every wait for a message or a collective.

        Simulates once more when it is read: most callers, searches above all, want the numbers.
        """
        return self._spans()


def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    *,
    channels: ChannelModel = "edge",
    blocking: bool = False,
    cores: int | None = None,
) -> Simulation:
    """Run a schedule on a machine made of numbers.

    A message moves once its send and its receive are both the oldest of their queues (see
    `channels`), takes message / bandwidth and then the latency. Sends do not hold up their rank;
    a compute step waits until its inputs have arrived. In a schedule without communication steps
    a message is sent and its receive posted when it is produced. An overlap waits for both inputs,
    takes as long as its two halves, and hands out both results at its end. Parameters are gathered
    and gradients reduced one after the other on a communicator of their own; compute steps wait
    for the parameters they need, and the end of the schedule for all gradients. What a microbatch
    keeps goes to the host and comes back one copy after the other, each way on its own, while the
    rank computes: it leaves the memory when its copy has ended, and is there again from the start
    of the copy back, for whose end its backward waits.

    Args:
        schedule: Schedule with or without communication steps.
        costs: Default: 1 for every forward, input gradient and weight gradient, no latency.
        channels: Which messages share an in-order queue on a rank: those of a directed edge
            ("edge"; only there may a message follow another before that has arrived), of a pair
            of ranks ("pair"), or all ("rank").
        blocking: Whether a send or a receive holds up its rank until the message has arrived. In a
            schedule without communication steps only sends do, from the end of what they send.
        cores: Cores that all ranks together have for compute steps; while more steps run than
            there are cores, all of them run slower by the same factor. Default: no such limit.

    Raises:
        DeadlockError: If the schedule cannot run to its end.
        ValueError: If the costs do not fit the schedule, `channels` is unknown, `cores` is below 1.
    """
    check_model(channels)
    if cores is not None and cores < 1:
        raise ValueError(f"cores ({cores}) must be >= 1")
    costs = costs or Costs()
    make = partial(Machine, schedule, costs, channels=channels, blocking=blocking, cores=cores)
    numbers = None
    if channels == "edge" and cores is None and _is_free_of_contention(schedule, costs, blocking):
        numbers = recurrence(schedule, costs, blocking=blocking)
    if numbers is None:
        machine = make()
        numbers = Numbers(
            makespan=machine.run(),
            busy=[rank.busy for rank in machine.ranks],
            exposed=[rank.exposed for rank in machine.ranks],
            peak=[rank.peak for rank in machine.ranks],
        )
    makespan = numbers.makespan
    return Simulation(
        makespan=makespan,
        bubble=tuple(1 - part / makespan if makespan > 0 else 0.0 for part in numbers.busy),
        peak_activations=tuple(numbers.peak),
        exposed_communication=tuple(numbers.exposed),
        _spans=partial(_timeline, make),
    )


def _is_free_of_contention(schedule: Schedule, costs: Costs, blocking: bool) -> bool:
    """Tell whether messages of an edge leave in the order of its rank, and copies take no turns."""
    if schedule.has_communication:
        return False
    sends_two_at_once = bool(schedule.kinds & {OVERLAP_F_B, OVERLAP_B_F})
    sizes = (schedule.num_stages, schedule.num_microbatches)
    if sends_two_at_once and (blocking or any(costs.transmission(*sizes))):
        return False
    if OFFLOAD in schedule.kinds and costs.host_bandwidth < math.inf:
        return False
    collectives = schedule.kinds & {FSDP_UNSHARD, FSDP_REDUCE_GRAD}
    return not collectives or (costs.unshard == 0 and costs.reduce_grad == 0)


def _timeline(make: Callable[[], Machine]) -> Timeline:
    machine = make()
    machine.run()
    return Timeline(span for rank in machine.ranks for span in rank.spans)
