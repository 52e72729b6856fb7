"""Lay a pipeline schedule over the costs of its stages: memory and time of a layout. No torch."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from statistics import fmean
from typing import Literal, TypeVar

from hp_schedule import (
    Costs,
    MetaStep,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    simulate,
)
from hp_train.config import Config
from hp_train.costs import modules
from hp_train.costs.gather import decided
from hp_train.costs.machine import Machine
from hp_train.costs.memory import Memory, in_turn, rank_memory, static_memory
from hp_train.costs.work import Work
from hp_train.layout.ranks import Layout, StageLayout
from hp_train.layout.schedules import (
    KINDS,
    count_microbatches,
    count_stages,
    placement,
    split_layers,
)
from hp_train.plan.kernels import Compute, rates_of
from hp_train.plan.traffic import (
    EdgeLink,
    Spread,
    Transfer,
    activation_transfers,
    edge_link,
    expert_transfer,
    gradient_transfers,
    pipeline_transfer,
    shard_transfer,
)

S = TypeVar("S")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a layout costs per step. Times are in seconds, of the mean rank; they add up.

    Attributes:
        config: Configuration of the layout.
        seconds: Time of the step.
        parts: "compute", "idle" (in the pipeline, waits for messages included), "exchanges" inside
            layers (of experts, tensor- and context-parallel ranks, none of them hidden),
            "gradients" and "optimizer".
        exposed: Time for which the rank that does so longest waits for messages and parameters that
            somebody has computed already.
        host: Seconds for which the busiest host launches kernels; 0 where they are not priced.
        memory: Memory of the rank that needs most.
        transfers: Transfers by purpose, of the rank that sends most for it.
    """

    config: Config
    seconds: float
    parts: Mapping[str, float]
    exposed: float
    host: float
    memory: Memory
    transfers: tuple[Transfer, ...]

    @property
    def bubble(self) -> float:
        """Share of the step that the mean rank is idle in the pipeline."""
        return self.parts["idle"] / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.config.train.global_batch_size * self.config.data.seq_len / self.seconds


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a rank needs at least.

    Attributes:
        fixed: Bytes needed whatever is under way.
        in_turn: Those of them that come as what is under way goes.
        stage: Bytes of a microbatch under way in one of its stages.
        stages: Bytes of a microbatch that has been through all of them.
    """

    fixed: int
    in_turn: int
    stage: float
    stages: float

    def least(self, in_flight: float) -> float:
        """With so many microbatches at once, each counted in every stage that it is in."""
        kept = max(self.stages, in_flight * self.stage)
        return self.fixed + max(0.0, kept - self.in_turn)


class Plan:
    """The stages of a layout and what they cost on a machine.

    Args:
        config: Configuration of the layout; checked.
        machine: Machine with as many devices as the layout has ranks.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        spread: Where the experts of a token are; None: by even chances, by hp-expert's dispatcher.
    """

    def __init__(
        self, config: Config, machine: Machine, *, vocab_size: int, spread: Spread | None = None
    ) -> None:
        config = decided(config, machine, vocab_size=vocab_size)
        self.config, self.machine = config, machine
        self.spread, self._vocab_size = spread or Spread(), vocab_size
        self.layout = Layout.of(config.mesh)
        train = config.train
        # That attention sees on a rank; between layers tensor-parallel ranks share them.
        self.tokens = train.microbatch_size * config.data.seq_len // config.mesh.cp
        self.num_microbatches = count_microbatches(config)
        num_stages = count_stages(config)
        self.stages = modules.stages(config, vocab_size, num_stages=num_stages)
        # Of each pipeline rank; where in its node it begins is all that its first rank matters for.
        self.ranks = [
            replace(stage, first=stage.first % machine.node_size) for stage in self.layout.stages
        ]
        self.places = [
            self.ranks[rank] for rank in placement(config.pipeline, num_ranks=self.layout.pp)
        ]
        self.cores, self._slowed = _cores(machine, self.layout)

    @cached_property
    def forward(self) -> list[float]:
        """Seconds of each stage for a microbatch."""
        each = zip(self._computes, self._waits, self._gathers("block"), strict=True)
        # Parameters are gathered meanwhile.
        return [max(compute.forward + wait[0], gather) for compute, wait, gather in each]

    @cached_property
    def input_grad(self) -> list[float]:
        """Likewise, with what runs again."""
        reduces = self._reduces("block")
        if self.config.mesh.reduce_once:  # in the last backward alone
            reduces = [seconds / self.num_microbatches for seconds in reduces]
        each = zip(self._computes, self._waits, self._gathers("block"), reduces, strict=True)
        return [
            # Meanwhile parameters are gathered and gradients reduced.
            max(
                compute.input_grad + compute.again + sum(wait[1:]),
                gather + reduce - compute.weight_grad,
            )
            for compute, wait, gather, reduce in each
        ]

    @cached_property
    def weight_grad(self) -> list[float]:
        """Likewise; weights wait for nobody."""
        return [compute.weight_grad for compute in self._computes]

    @cached_property
    def _computes(self) -> list[Compute]:
        """What each stage computes for a microbatch."""
        tokens, slowed = [self.tokens / place.tp for place in self.places], self._slowed
        config, machine = self.config, self.machine
        if machine.launch_seconds:
            kernels = modules.kernels(config, self._vocab_size, num_stages=len(self.stages))
            compiled = config.train.compile != "none"
            rates = rates_of(machine, is_compiled=compiled, slowed=slowed)
            return [
                rates.compute(each, number, place, load=self.spread.load)
                for each, number, place in zip(kernels, tokens, self.places, strict=True)
            ]
        layers = map(len, split_layers(config.model.num_layers, len(self.stages)))
        found = []
        for stage, number, mine in zip(self.stages, tokens, layers, strict=True):
            busy = slowed * (number * stage.flops / machine.flops + mine * machine.layer_seconds)
            repeated = stage.again.flops / stage.flops if stage.again else 0.0
            # What runs again takes as long as it did.
            found.append(Compute(busy, busy, busy, again=busy * repeated))
        return found

    def _gathers(self, by: str) -> list[float]:
        """Seconds of each stage to gather its parameters; none where `mesh.gather` is another."""
        return self._shares(by, "gathered")

    def _reduces(self, by: str) -> list[float]:
        """Likewise, to reduce its gradients."""
        return self._shares(by, "reduced")

    def _shares(self, by: str, what: Literal["gathered", "reduced"]) -> list[float]:
        if self.config.mesh.gather != by:
            return [0.0] * len(self.stages)
        return self._of_each(
            lambda stage, place: (
                shard_transfer(self.config, stage, place, self.machine, what=what).seconds
            )
        )

    @cached_property
    def exchange_seconds(self) -> list[float]:
        """Of these, what stages wait for others inside their layers."""
        return [sum(wait) for wait in self._waits]

    @cached_property
    def _waits(self) -> list[list[float]]:
        """Of each stage: in forward, in backward, and in what backward runs again."""
        return self._of_each(
            lambda stage, place: [sum(t.seconds for t in way) for way in self._ways([stage], place)]
        )

    def _of_each(self, price: Callable[[Work, StageLayout], T]) -> list[T]:
        """Something of each stage in its place; of those that are alike it is the same."""
        return _once(zip(self.stages, self.places, strict=True), price)

    def _ways(self, stages: Sequence[Work], place: StageLayout) -> list[list[Transfer]]:
        """What ranks exchange inside layers for a microbatch.

        Returns:
            In forward, in backward, and in what backward runs again.
        """
        again = [stage.again for stage in stages if stage.again is not None]
        return [
            self._exchanges(stages, place, backward=False),
            self._exchanges(stages, place, backward=True),
            self._exchanges(again, place, backward=False),
        ]

    def _exchanges(
        self, works: Sequence[Work], place: StageLayout, *, backward: bool
    ) -> list[Transfer]:
        config, machine = self.config, self.machine
        found = activation_transfers(config, works, place, machine, tokens=self.tokens)
        if place.ep * place.etp > 1 and config.model.has_experts:
            dealt = self.tokens // place.tp
            found.append(
                expert_transfer(
                    config,
                    works,
                    place,
                    machine,
                    tokens=dealt,
                    backward=backward,
                    spread=self.spread,
                )
            )
        return found

    def schedule(self) -> Schedule:
        """Compute steps, and those of sharded parameters; messages are priced by their edges."""
        pipeline = self.config.pipeline
        schedule = KINDS[pipeline.schedule].build(
            self.layout.pp, self.num_microbatches, pipeline.stages_per_rank
        )
        if self.config.mesh.gather == "stage" and any(
            place.is_sharded for place in self.layout.stages
        ):
            schedule = add_fsdp_unshard_reshard(add_fsdp_reduce_grad(schedule))
        return schedule

    def stages_of(self, schedule: Schedule, rank: int) -> tuple[Work, ...]:
        """The stages of a pipeline rank."""
        return tuple(self.stages[index] for index in schedule.stages_of(rank))

    def _held(self, schedule: Schedule) -> list[tuple[tuple[Work, ...], StageLayout]]:
        """The stages of each pipeline rank, and its place."""
        return [(self.stages_of(schedule, rank), place) for rank, place in enumerate(self.ranks)]

    def least_seconds(self, schedule: Schedule) -> float:
        """No order of the steps takes less.

        Each rank computes its own after its first input and parameters, and reduces gradients
        after it; and its collectives go one by one.
        """
        full, gathering, reducing = self._full(), self._gathers("stage"), self._reduces("stage")
        longest = 0.0
        ends = _once(self._held(schedule), self._ends)
        for rank, end in enumerate(ends):
            mine = schedule.stages_of(rank)
            gathers = [gathering[stage] for stage in mine]
            reduces = [reducing[stage] for stage in mine]
            before = max(sum(self.forward[: min(mine)]), min(gathers))
            busy = self.num_microbatches * sum(full[stage] for stage in mine)
            pipeline = max(before + busy + min(reduces), sum(gathers) + sum(reduces))
            longest = max(longest, pipeline + sum(end.values()))
        return longest

    def least_mean_seconds(self) -> float:
        """No layout of this mesh takes less that has as many stages and microbatches, or more.

        Each rank takes the mean of all at least, if it never waits. Stages of one rank may share a
        table.
        """
        ends = self._ends(self.stages, self.ranks[0])
        exchanges = sum(self._gathers("stage")) + sum(self._reduces("stage"))
        busy = max(self.num_microbatches * sum(self._full()), exchanges)
        return (busy + sum(ends.values())) / self.layout.pp

    def needs(self, schedule: Schedule) -> list[Need]:
        """What each pipeline rank needs at least."""
        return _once(self._held(schedule), self._need)

    def _need(self, stages: Sequence[Work], place: StageLayout) -> Need:
        kept = [stage.kept_bytes(self.tokens, tp=place.tp) for stage in stages]
        shared = in_turn(self.config, stages, place)
        fixed = self._memory(stages, place, 0.0).total
        return Need(fixed, shared, min(kept), sum(kept))

    def _full(self) -> list[float]:
        """Seconds of each stage for a microbatch."""
        kinds = (self.forward, self.input_grad, self.weight_grad)
        return [sum(seconds) for seconds in zip(*kinds, strict=True)]

    def estimate(self) -> Estimate:
        """Simulate the schedule."""
        schedule = self.schedule()
        simulation = simulate(schedule, self.costs(schedule), cores=self.cores)
        ranks, places = range(self.layout.pp), self.ranks
        held = self._held(schedule)
        memories = [
            self._memory(stages, place, peak)
            for (stages, place), peak in zip(held, simulation.peak_activations, strict=True)
        ]
        ends = _once(held, self._ends)
        sizes = [place.num_ranks for place in places]
        exchanges = [
            self.num_microbatches * sum(self.exchange_seconds[s] for s in schedule.stages_of(rank))
            for rank in ranks
        ]
        idle = fmean(simulation.bubble, sizes) * simulation.makespan
        exchanging = fmean(exchanges, sizes)
        last = {name: max(end[name] for end in ends) for name in ends[0]}
        parts = {
            "compute": simulation.makespan - idle - exchanging,
            "idle": idle,
            "exchanges": exchanging,
            **last,
        }
        return Estimate(
            config=self.config,
            seconds=simulation.makespan + sum(last.values()),
            parts=parts,
            exposed=max(simulation.exposed_communication),
            host=max(
                self.num_microbatches
                * sum(self._computes[s].host for s in schedule.stages_of(rank))
                for rank in ranks
            ),
            memory=max(memories, key=lambda memory: memory.total),
            transfers=self._transfers(schedule),
        )

    def costs(self, schedule: Schedule) -> Costs:
        """What the steps of a schedule cost."""
        return Costs(
            forward=self.forward,
            input_grad=self.input_grad,
            weight_grad=self.weight_grad,
            activation=self._of_each(
                lambda stage, place: stage.kept_bytes(self.tokens, tp=place.tp)
            ),
            latency=self._latencies(schedule),
            unshard=self._gathers("stage"),
            reduce_grad=self._reduces("stage"),
        )

    def _latencies(self, schedule: Schedule) -> dict[tuple[int, int], float]:
        """Of every edge: of all pipelines the slowest, with the time that the bytes take."""
        found = {}
        for source, destination in schedule.edges:
            seconds = self._edge(source, destination).seconds
            found[source, destination] = found[destination, source] = seconds
        return found

    def _edge(self, source: int, destination: int) -> EdgeLink:
        return edge_link(
            self.config, self.layout, self.machine, source=source, destination=destination
        )

    def _memory(self, stages: Sequence[Work], place: StageLayout, activations: float) -> Memory:
        return rank_memory(self.config, stages, place, self.machine, activations)

    def _ends(self, stages: Sequence[Work], place: StageLayout) -> dict[str, float]:
        """Seconds after the pipeline: sums over replicas, and the update of the weights."""
        transfers = gradient_transfers(self.config, stages, place, self.machine)
        parameters, gradients, optimizer = static_memory(self.config, stages, place)
        # Parameters and moments are read and written, gradients read.
        touched = 2 * parameters + gradients + 2 * optimizer
        return {
            "gradients": sum(transfer.seconds for transfer in transfers),
            "optimizer": touched / self.machine.memory_bandwidth,
        }

    def _transfers(self, schedule: Schedule) -> tuple[Transfer, ...]:
        found: dict[str, Transfer] = {}
        for rank in range(self.layout.pp):
            for transfer in self._transfers_of(schedule, rank):
                known = found.get(transfer.purpose)
                if known is None or transfer.bytes > known.bytes:
                    found[transfer.purpose] = transfer
        return tuple(transfer for transfer in found.values() if transfer.bytes)

    def _transfers_of(self, schedule: Schedule, rank: int) -> list[Transfer]:
        config, place, machine = self.config, self.ranks[rank], self.machine
        stages, ranks = self.stages_of(schedule, rank), schedule.stage_to_rank
        edges = [
            self._edge(rank, ranks[stage])
            for stage, neighbour in _neighbours(len(self.stages))
            if ranks[stage] != rank and ranks[neighbour] == rank
        ]
        rounds = sum(step.type.name == "FSDP_UNSHARD" for step in _steps(schedule, rank))
        gathers, reduces = (
            [shard_transfer(config, stage, place, machine, what=what) for stage in stages]
            for what in ("gathered", "reduced")
        )
        # Gathered as often as the schedule says, reduced once; or both for every microbatch.
        gathered, reduced = rounds / max(1, len(stages)), 1.0
        if config.mesh.gather == "block":
            gathered = 2.0 * self.num_microbatches
            reduced = 1.0 if config.mesh.reduce_once else float(self.num_microbatches)
        shards = [_sum("", gathers, gathered), _sum("", reduces, reduced)]
        gradients = gradient_transfers(config, stages, place, machine)
        inside: dict[str, list[Transfer]] = defaultdict(list)
        for transfer in chain.from_iterable(self._ways(stages, place)):
            inside[transfer.purpose].append(transfer)
        return [
            pipeline_transfer(config, place, edges, num_microbatches=self.num_microbatches),
            *(_sum(purpose, found, self.num_microbatches) for purpose, found in inside.items()),
            _sum("parameters", shards, 1.0),
            _sum("gradients", gradients, 1.0),
        ]


def estimate(
    config: Config, machine: Machine, *, vocab_size: int, spread: Spread | None = None
) -> Estimate:
    """What a layout costs on a machine.

    Args:
        config: Configuration of the layout; checked.
        machine: What its devices do.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        spread: See `Plan`.
    """
    return Plan(config, machine, vocab_size=vocab_size, spread=spread).estimate()


def _cores(machine: Machine, layout: Layout) -> tuple[int | None, float]:
    """Cores for one pipeline where ranks share them, and how much slower ranks are besides.

    Pipelines share cores evenly; where one has a fraction of a core left, all its steps take
    longer.
    """
    if not machine.cores or machine.cores >= layout.world_size:
        return None, 1.0
    share = machine.cores * layout.pp / layout.world_size
    whole = max(1, int(share))
    return whole, whole / share


def _once(pairs: Iterable[tuple[S, StageLayout]], price: Callable[[S, StageLayout], T]) -> list[T]:
    """Something of each pair, worked out once for those that are the same."""
    wanted = list(pairs)
    known = {pair: price(*pair) for pair in set(wanted)}
    return [known[pair] for pair in wanted]


def _neighbours(num_stages: int) -> list[tuple[int, int]]:
    """(receiving stage, sending stage), in both directions."""
    forward = [(stage + 1, stage) for stage in range(num_stages - 1)]
    return forward + [(first, second) for second, first in forward]


def _steps(schedule: Schedule, rank: int) -> list[MetaStep]:
    return [step for step in schedule.steps[rank] if step is not None]


def _sum(purpose: str, transfers: Sequence[Transfer], times: float) -> Transfer:
    return Transfer(
        purpose,
        times * sum(transfer.bytes for transfer in transfers),
        times * sum(transfer.seconds for transfer in transfers),
        any(transfer.between_nodes for transfer in transfers),
    )
