"""Memory and time of a layout: its pipeline schedule, simulated with stage costs. No torch.

They also choose FSDP's gathers for `mesh.gather = "auto"`, for the trainer and dry runs as well. By
stage sends least and needs most memory; by block overlaps gathers with compute, but gathers for
every microbatch. If one of them fits into the memory of a device, it is chosen; if both fit, the
one with the shorter step.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from hp_plan.costs import modules
from hp_plan.costs.machine import Machine
from hp_plan.costs.memory import Memory, padding
from hp_plan.costs.work import Work
from hp_plan.price.prices import Prices, aligned, all_exchanges, cores_of, costs_of
from hp_plan.price.traffic import (
    Spread,
    Transfer,
    edge_link,
    gradient_transfers,
    pipeline_transfer,
    shard_transfer,
)
from hp_schedule import (
    Costs,
    MetaStepType,
    Schedule,
    add_fsdp_reduce_grad,
    add_fsdp_unshard_reshard,
    simulate,
)
from hp_trainer.config import Config, PipelineConfig, rules
from hp_trainer.config.options import with_keys
from hp_trainer.layout.ranks import Layout
from hp_trainer.layout.schedules import (
    KINDS,
    compute_schedule,
    count_microbatches,
    count_stages,
    placement,
)

ROOM = 0.05
"""Share of a device that stays free: dry runs by stage reserved up to 4 % more than estimated."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The price of a step with a layout.

    Attributes:
        config: Configuration of the layout.
        seconds: Seconds of the step.
        parts: Seconds of the mean rank, which sum to `seconds`: "compute", "idle" (in the pipeline,
            waits for messages included), "exchanges" inside layers (of experts, tensor- and
            context-parallel ranks, none of them hidden), "gradients" and "optimizer".
        exposed: Most seconds that a rank waits for messages and parameters after they are computed.
        host: Seconds for which the busiest host launches kernels; 0 if launches have no price.
        memory: Memory of the fullest rank.
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
        """Return the share of the step that the mean rank is idle in the pipeline."""
        return self.parts["idle"] / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of all ranks together."""
        return self.config.train.global_batch_size * self.config.data.seq_len / self.seconds


class Plan:
    """The stages of a layout and their prices on a machine.

    Attributes:
        layout: Ranks of the layout.
        num_microbatches: Number of microbatches of a step.
        stages: Work of the stages of the whole pipeline.
        ranks: Ranks of each pipeline rank, as they lie in their nodes.
        places: Ranks of each stage, as they lie in their nodes.
        prices: Price of each stage.
        cores: Cores of one pipeline; None: as many as it has ranks.

    Args:
        config: Configuration of the layout; checked, with `mesh.gather` decided.
        machine: Machine with as many devices as the layout has ranks.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        spread: Spread of a token's experts over ranks; None: even, with hp-expert's dispatcher.
        prices: Prices of other layouts on the machine, with their spread; None: new ones.
    """

    def __init__(
        self,
        config: Config,
        machine: Machine,
        *,
        vocab_size: int,
        spread: Spread | None = None,
        prices: Prices | None = None,
    ) -> None:
        if config.mesh.gather == "auto":
            raise ValueError("mesh.gather (auto) must be decided before a layout is priced")
        self.config, self.machine = config, machine
        self.layout = Layout.of(config.mesh)
        self.num_microbatches = count_microbatches(config)
        self.stages = modules.stages(config, vocab_size, num_stages=count_stages(config))
        self.ranks = [aligned(stage, machine.node_size) for stage in self.layout.stages]
        self.places = [
            self.ranks[rank] for rank in placement(config.pipeline, num_ranks=self.layout.pp)
        ]
        self.cores, _ = cores_of(machine, self.layout)
        self._prices = prices or Prices(machine, vocab_size, spread or Spread())
        self.prices = self._prices.stages(config, self.stages, self.places)

    def schedule(self) -> Schedule:
        """Return the schedule without messages, which edges price, but with gathers by stage."""
        config, is_sharded = self.config, gathers_by_stage(self.config)
        return plain_schedule(
            config.pipeline, self.layout.pp, self.num_microbatches, is_sharded=is_sharded
        )

    def stages_of(self, schedule: Schedule, rank: int) -> tuple[Work, ...]:
        """Return the stages of a pipeline rank."""
        return tuple(self.stages[index] for index in schedule.stages_of(rank))

    def estimate(self) -> Estimate:
        """Simulate the schedule, and return the estimate."""
        schedule = self.schedule()
        simulation = simulate(schedule, self.costs(schedule), cores=self.cores)
        ranks, places = range(self.layout.pp), self.ranks
        own = [self.stages_of(schedule, rank) for rank in ranks]
        memories = [
            self._prices.memory(
                self.config, own[rank], places[rank], rank=stage.first, activations=peak
            )
            for rank, (stage, peak) in enumerate(
                zip(self.layout.stages, simulation.peak_activations, strict=True)
            )
        ]
        ends = [self._prices.ends(self.config, own[rank], places[rank]) for rank in ranks]
        sizes = [place.num_ranks for place in places]
        exchanges = [
            self.num_microbatches * sum(self.prices[s].exchanges for s in schedule.stages_of(rank))
            for rank in ranks
        ]
        idle = fmean(simulation.bubble, sizes) * simulation.makespan
        exchanging = fmean(exchanges, sizes)
        last = {name: max(end[name] for end in ends) for name in ends[0]}
        return Estimate(
            config=self.config,
            seconds=simulation.makespan + sum(last.values()),
            parts={
                "compute": simulation.makespan - idle - exchanging,
                "idle": idle,
                "exchanges": exchanging,
                **last,
            },
            exposed=max(simulation.exposed_communication),
            host=max(
                self.num_microbatches * sum(self.prices[s].host for s in schedule.stages_of(rank))
                for rank in ranks
            ),
            memory=max(memories, key=lambda memory: memory.total),
            transfers=self._transfers(schedule),
        )

    def costs(self, schedule: Schedule) -> Costs:
        """Return the costs of the steps of a schedule."""
        return costs_of(self.config, self.machine, self.prices, edges=schedule.edges)

    def _transfers(self, schedule: Schedule) -> tuple[Transfer, ...]:
        found: defaultdict[str, list[Transfer]] = defaultdict(list)
        for rank in range(self.layout.pp):
            for transfer in self._transfers_of(schedule, rank):
                found[transfer.purpose].append(transfer)
        most = (max(each, key=lambda transfer: transfer.bytes) for each in found.values())
        return tuple(transfer for transfer in most if transfer.bytes)

    def _transfers_of(self, schedule: Schedule, rank: int) -> list[Transfer]:
        config, place, machine = self.config, self.ranks[rank], self.machine
        stages, ranks = self.stages_of(schedule, rank), schedule.stage_to_rank
        edges = [
            edge_link(config, self.layout, machine, source=rank, destination=ranks[stage])
            for stage, neighbour in _neighbours(len(self.stages))
            if ranks[stage] != rank and ranks[neighbour] == rank
        ]
        rounds = sum(
            step is not None and step.type is MetaStepType.FSDP_UNSHARD
            for step in schedule.steps[rank]
        )
        gathers, reduces = (
            [shard_transfer(config, stage, place, machine, what=what) for stage in stages]
            for what in ("gathered", "reduced")
        )
        # By stage: gathers of the schedule and one reduction; by block both for every microbatch.
        gathered, reduced = rounds / max(1, len(stages)), 1.0
        if config.mesh.gather == "block":
            gathered = 2.0 * self.num_microbatches
            reduced = 1.0 if config.mesh.reduce_once else float(self.num_microbatches)
        shards = [_sum("", gathers, gathered), _sum("", reduces, reduced)]
        inside: dict[str, list[Transfer]] = defaultdict(list)
        spread = self._prices.spread
        for transfer in all_exchanges(config, stages, place, machine, spread=spread):
            inside[transfer.purpose].append(transfer)
        return [
            pipeline_transfer(config, place, edges, num_microbatches=self.num_microbatches),
            *(_sum(purpose, found, self.num_microbatches) for purpose, found in inside.items()),
            _sum("parameters", shards, 1.0),
            _sum("gradients", gradient_transfers(config, stages, place, machine), 1.0),
        ]


def plain_schedule(
    pipeline: PipelineConfig, pp: int, num_microbatches: int, *, is_sharded: bool
) -> Schedule:
    """Return a schedule without messages; with gathers by stage if parameters are sharded."""
    schedule = compute_schedule(
        pipeline, num_ranks=pp, num_microbatches=num_microbatches, paired=False
    )
    assert schedule is not None  # the rules have built it
    if is_sharded:
        schedule = add_fsdp_unshard_reshard(add_fsdp_reduce_grad(schedule))
    return schedule


def _neighbours(num_stages: int) -> list[tuple[int, int]]:
    """Return pairs of receiving and sending stage, in both directions."""
    forward = [(stage + 1, stage) for stage in range(num_stages - 1)]
    return forward + [(first, second) for second, first in forward]


def _sum(purpose: str, transfers: Sequence[Transfer], times: float) -> Transfer:
    return Transfer(
        purpose,
        times * sum(transfer.bytes for transfer in transfers),
        times * sum(transfer.seconds for transfer in transfers),
        any(transfer.between_nodes for transfer in transfers),
    )


def estimate(
    config: Config, machine: Machine, *, vocab_size: int, spread: Spread | None = None
) -> Estimate:
    """Return the estimate of a layout on a machine.

    Args:
        config: Configuration of the layout; checked.
        machine: Machine with as many devices.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        spread: See `Plan`.
    """
    return planned(config, machine, vocab_size=vocab_size, spread=spread).estimate()


def planned(
    config: Config, machine: Machine, *, vocab_size: int, spread: Spread | None = None
) -> Plan:
    """Return the plan of a layout, with "stage" or "block" in place of "auto"."""
    config = decided(config, machine, vocab_size=vocab_size, spread=spread)
    return Plan(config, machine, vocab_size=vocab_size, spread=spread)


def decided(
    config: Config, machine: Machine, *, vocab_size: int, spread: Spread | None = None
) -> Config:
    """Return the config with "stage" or "block" in place of "auto", the same on every rank.

    Args:
        config: Checked config.
        machine: Machine with the memory of the smallest device of the run.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        spread: See `Plan`.
    """
    if config.mesh.gather != "auto":
        return config
    by_stage, by_block = (with_keys(config, {"mesh.gather": each}) for each in ("stage", "block"))
    if not (rules.allows_mesh(by_block) and rules.allows_pipeline(by_block)):
        return by_stage
    fit_stage, fit_block = (
        fits(each, most_memory(each, machine, vocab_size=vocab_size).total, machine)
        for each in (by_stage, by_block)
    )
    if not (fit_stage and fit_block):
        return by_stage if fit_stage else by_block
    stage_seconds, block_seconds = (
        Plan(each, machine, vocab_size=vocab_size, spread=spread).estimate().seconds
        for each in (by_stage, by_block)
    )
    return by_stage if stage_seconds <= block_seconds else by_block


def fits(config: Config, needed: float, machine: Machine) -> bool:
    """Tell whether the estimated bytes of the fullest rank fit into a device."""
    return needed <= room(config, machine)


def room(config: Config, machine: Machine) -> float:
    """Return the bytes of a device that a layout may use.

    Args:
        config: Config with `mesh.gather` decided.
        machine: Machine with the memory of the smallest device.
    """
    return (1 - ROOM * gathers_by_stage(config)) * machine.memory


def gathers_by_stage(config: Config) -> bool:
    """Tell whether ranks gather the parameters of a whole stage at once."""
    return config.mesh.gather == "stage" and any(
        stage.is_sharded for stage in Layout.of(config.mesh).stages
    )


def most_memory(config: Config, machine: Machine, *, vocab_size: int) -> Memory:
    """Return the memory of the fullest rank.

    Args:
        config: Checked config with `mesh.gather` decided.
        machine: Machine with the margins of devices.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
    """
    mesh, pipeline = Layout.of(config.mesh), config.pipeline
    works = modules.stages(config, vocab_size, num_stages=count_stages(config))
    # Many microbatches have no more activations at once than few.
    few = min(count_microbatches(config), 2 * mesh.pp)
    schedule = KINDS[pipeline.schedule].build(mesh.pp, few, pipeline.stages_per_rank)
    places = [mesh.stages[rank] for rank in schedule.stage_to_rank]
    kept = [
        work.kept_bytes(config.microbatch_tokens, tp=place.tp, padded=padding(config, place))
        for work, place in zip(works, places, strict=True)
    ]
    peaks = simulate(schedule, Costs(activation=kept)).peak_activations
    prices = Prices(machine, vocab_size, Spread())
    return max(
        (
            prices.memory(
                config,
                tuple(works[stage] for stage in schedule.stages_of(rank)),
                place,
                rank=place.first,
                activations=peak,
            )
            for rank, (place, peak) in enumerate(zip(mesh.stages, peaks, strict=True))
        ),
        key=lambda memory: memory.total,
    )
