"""How long a schedule takes, how much of it is bubble, and what it holds in memory."""

from dataclasses import dataclass

from hp_schedule.costs import Costs, per_step
from hp_schedule.dataflow import Dataflow, dataflow
from hp_schedule.executor import Executor, run_together
from hp_schedule.ir import MetaStep, MetaStepType
from hp_schedule.packing import (
    BWD,
    BWD_INPUT,
    BWD_RECV,
    BWD_SEND,
    BWD_WEIGHT,
    FWD,
    FWD_RECV,
    FWD_SEND,
    KIND,
    KIND_MASK,
    MICROBATCH_SHIFT,
    SEND_OF,
    STAGE_MASK,
    STAGE_SHIFT,
    encode,
    pack,
    unpack,
)
from hp_schedule.schedule import Schedule
from hp_schedule.timeline import Span, Timeline

_RECEIVE_OF = {FWD: FWD_RECV, BWD: BWD_RECV, BWD_INPUT: BWD_RECV}


@dataclass(frozen=True, slots=True)
class Simulation:
    """What the simulator found.

    Attributes:
        makespan: From the start of the first step to the end of the last.
        bubble: For each rank the share of the makespan in which it computes nothing.
        peak_activations: For each rank the most memory its microbatches in flight hold at once.
        timeline: Every compute step, and every wait for a message.
    """

    makespan: float
    bubble: tuple[float, ...]
    peak_activations: tuple[float, ...]
    timeline: Timeline


def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Run a schedule on a machine made of numbers.

    Sends never hold up their rank. A message moves once it is sent and its receive is posted,
    takes the latency, and does not overtake another on its directed edge. In a schedule without
    communication steps a message leaves when it is produced. An overlap takes as long as its two
    halves; other ranks see its results at its end.

    Args:
        schedule: With or without communication steps.
        costs: Default: 1 for every forward, input gradient and weight gradient, no latency.

    Raises:
        DeadlockError: If the schedule cannot run to its end.
        ValueError: If the costs do not fit the number of stages.
    """
    network = _Network(schedule, costs or Costs())
    ranks = [_SimulatedRank(rank, network) for rank in range(schedule.num_ranks)]
    run_together([Executor(row, driver) for row, driver in zip(schedule.steps, ranks, strict=True)])
    timeline = Timeline(span for rank in ranks for span in rank.spans)
    return Simulation(
        makespan=timeline.makespan,
        bubble=timeline.bubble,
        peak_activations=tuple(rank.peak for rank in ranks),
        timeline=timeline,
    )


class _Network:
    """When each value is there to be read: at once on its own rank, as a message elsewhere."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.flow: Dataflow = dataflow(schedule)
        sizes = (schedule.num_stages, schedule.num_microbatches)
        self.num_microbatches = schedule.num_microbatches
        self.durations = costs.durations(*sizes)
        self.activation = per_step("activation", costs.activation, *sizes)
        self.implicit = not schedule.has_communication
        self.latency_of = costs.latency_of
        self.available: dict[tuple[int, int], float] = {}
        self._sent: dict[int, float] = {}
        self._posted: dict[int, float] = {}
        self._last_arrival: dict[tuple[int, int], float] = {}

    def index(self, code: int) -> int:
        stage = code >> STAGE_SHIFT & STAGE_MASK
        return stage * self.num_microbatches + (code >> MICROBATCH_SHIFT)

    def send(self, value: int, edge: tuple[int, int], now: float) -> None:
        self._sent[value] = now
        if value in self._posted:
            self._move(value, edge)

    def post(self, value: int, edge: tuple[int, int], now: float) -> None:
        self._posted[value] = now
        if value in self._sent:
            self._move(value, edge)

    def _move(self, value: int, edge: tuple[int, int]) -> None:
        start = max(self._sent.pop(value), self._posted.pop(value))
        arrival = max(start + self.latency_of(*edge), self._last_arrival.get(edge, 0.0))
        self._last_arrival[edge] = arrival
        self.available[value, edge[1]] = arrival


class _SimulatedRank:
    """A driver whose clock is a number."""

    def __init__(self, rank: int, network: _Network) -> None:
        self.spans: list[Span] = []
        self.peak = 0.0
        self._held = 0.0
        self._now = 0.0
        self._rank = rank
        self._network = network

    def ready(self, step_type: MetaStepType, stage_index: int, microbatch_index: int) -> bool:
        if not step_type.is_compute:
            return True
        code = encode(KIND[step_type], stage_index, microbatch_index)
        value = self._network.flow.value_read(code)
        return value < 0 or (value, self._rank) in self._network.available

    def forward(self, stage_index: int, microbatch_index: int) -> None:
        self._compute(unpack(encode(FWD, stage_index, microbatch_index)))

    def backward(self, stage_index: int, microbatch_index: int) -> None:
        self._compute(unpack(encode(BWD, stage_index, microbatch_index)))

    def backward_input(self, stage_index: int, microbatch_index: int) -> None:
        self._compute(unpack(encode(BWD_INPUT, stage_index, microbatch_index)))

    def backward_weight(self, stage_index: int, microbatch_index: int) -> None:
        self._compute(unpack(encode(BWD_WEIGHT, stage_index, microbatch_index)))

    def overlap(self, step: MetaStep) -> None:
        self._compute(step)

    def send_forward(self, stage_index: int, microbatch_index: int) -> None:
        self._send(encode(FWD_SEND, stage_index, microbatch_index))

    def send_backward(self, stage_index: int, microbatch_index: int) -> None:
        self._send(encode(BWD_SEND, stage_index, microbatch_index))

    def receive_forward(self, stage_index: int, microbatch_index: int) -> None:
        self._post(encode(FWD_RECV, stage_index, microbatch_index))

    def receive_backward(self, stage_index: int, microbatch_index: int) -> None:
        self._post(encode(BWD_RECV, stage_index, microbatch_index))

    def unshard(self, stage_index: int) -> None:
        """Parameter traffic has no cost here yet."""

    def reshard(self, stage_index: int) -> None:
        """Parameter traffic has no cost here yet."""

    def reduce_grad(self, stage_index: int) -> None:
        """Parameter traffic has no cost here yet."""

    def _send(self, code: int) -> None:
        edge = (self._rank, self._peer(code))
        self._network.send(self._network.flow.value_read(code), edge, self._now)

    def _post(self, code: int) -> None:
        edge = (self._peer(code), self._rank)
        self._network.post(self._network.flow.value_written(code), edge, self._now)

    def _peer(self, code: int) -> int:
        return self._network.flow.peer[code & KIND_MASK][code >> STAGE_SHIFT & STAGE_MASK]

    def _compute(self, step: MetaStep) -> None:
        codes = [pack(part) for part in step.leaves()]
        for code in codes:
            self._wait(code)
        start = self._now
        for code in codes:
            self._elapse(code)
        self.spans.append(Span(self._rank, step, start, self._now))
        for code in codes:
            self._hand_out(code)

    def _wait(self, code: int) -> None:
        value = self._network.flow.value_read(code)
        arrival = self._network.available[value, self._rank] if value >= 0 else 0.0
        if arrival > self._now:
            receive = code & ~KIND_MASK | _RECEIVE_OF[code & KIND_MASK]
            self.spans.append(Span(self._rank, unpack(receive), self._now, arrival))
            self._now = arrival

    def _elapse(self, code: int) -> None:
        kind, index = code & KIND_MASK, self._network.index(code)
        if kind == FWD:
            self._held += self._network.activation[index]
            self.peak = max(self.peak, self._held)
        self._now += self._network.durations[kind][index]

    def _hand_out(self, code: int) -> None:
        kind, stage = code & KIND_MASK, code >> STAGE_SHIFT & STAGE_MASK
        network = self._network
        if kind in {BWD, BWD_WEIGHT}:
            self._held -= network.activation[network.index(code)]
        value = network.flow.value_written(code)
        if value < 0:
            return
        network.available[value, self._rank] = self._now
        peer = network.flow.peer[SEND_OF[kind]][stage]
        if network.implicit and peer >= 0:
            network.available[value, peer] = self._now + network.latency_of(self._rank, peer)
