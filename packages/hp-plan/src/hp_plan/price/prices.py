"""Prices of stages on their ranks, each computed once for all layouts. No torch.

The price of a stage depends on a few properties of a layout: the ranks that share the stage, the
tokens of a microbatch, and the gathers of its parameters. Thousands of layouts share these.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from operator import mul
from typing import NamedTuple, TypeVar

from hp_plan.costs import modules
from hp_plan.costs.machine import Machine
from hp_plan.costs.memory import (
    Memory,
    in_turn,
    kinds_of,
    message_bytes,
    padding,
    static_memory,
    tensor_memory,
)
from hp_plan.costs.work import EXCHANGED, Kernels, Work
from hp_plan.price.rates import Compute, Routed, rates_of
from hp_plan.price.traffic import (
    Spread,
    Transfer,
    activation_transfers,
    edge_link,
    expert_transfer,
    gradient_transfers,
    shard_transfer,
)
from hp_schedule import Costs
from hp_trainer.config import Config, PipelineConfig
from hp_trainer.layout.ranks import Layout, StageLayout
from hp_trainer.layout.schedules import KINDS, count_microbatches, layers_of_stages

_EVEN = Spread()
T = TypeVar("T")


class StagePrice(NamedTuple):
    """Seconds of a stage for a microbatch, and the bytes that it keeps.

    Attributes:
        forward: Seconds of forward.
        input_grad: Seconds of the backward of activations, for which other stages wait, with
            recomputation.
        weight_grad: Seconds of the rest of backward.
        exchanges: Seconds of exchanges inside layers, included above.
        gathered: Seconds to gather its parameters once; 0 if blocks are gathered within forward and
            backward.
        reduced: Seconds to reduce its gradients once; 0 if blocks are reduced within backward.
        device: Seconds that the device computes.
        host: Seconds that the host takes to launch all kernels.
        kept: Bytes that a microbatch keeps from forward to backward.
        message: Bytes of the input of a microbatch.
    """

    forward: float
    input_grad: float
    weight_grad: float
    exchanges: float
    gathered: float
    reduced: float
    device: float
    host: float
    kept: float
    message: float

    @property
    def full(self) -> float:
        """Return the seconds of forward and backward."""
        return self.forward + self.input_grad + self.weight_grad

    def by_block(self, reductions: float) -> "StagePrice":
        """Return the price if blocks are gathered, and in backward reduced, while others compute.

        Args:
            reductions: Reductions of a gradient for each microbatch, at most 1.
        """
        back = self.gathered + reductions * self.reduced
        return self._replace(
            forward=max(self.forward, self.gathered),
            input_grad=max(self.input_grad, back - self.weight_grad),
            gathered=0.0,
            reduced=0.0,
        )


class Prices:
    """Prices of the stages of layouts that differ in mesh, pipeline, microbatches, recomputation.

    Args:
        machine: Machine of the layouts.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
        spread: Spread of a token's experts over ranks.
    """

    def __init__(self, machine: Machine, vocab_size: int, spread: Spread) -> None:
        self.machine, self.vocab_size, self.spread = machine, vocab_size, spread
        self._stages: dict[object, StagePrice] = {}
        self._ends: dict[object, Mapping[str, float]] = {}
        self._tensors: dict[object, Memory] = {}
        self._gathers: dict[object, tuple[float, float]] = {}
        self._each: dict[object, list[list[float]]] = {}

    def stages(
        self, config: Config, stages: Sequence[Work], places: Sequence[StageLayout]
    ) -> list[StagePrice]:
        """Price the stages of a layout.

        Args:
            config: Configuration of the layout.
            stages: Stages of the whole pipeline.
            places: Ranks of each stage.
        """
        num = len(stages)
        kernels: Sequence[Kernels | None] = [None] * num
        if self.machine.launch_seconds:
            kernels = modules.kernels(config, self.vocab_size, num_stages=num)
        layers = map(len, layers_of_stages(config, num))
        _, slowed = cores_of(self.machine, Layout.of(config.mesh))
        found: list[StagePrice] = []
        known: dict[tuple[int, int], StagePrice] = {}  # most stages equal an earlier one
        for stage, place, mine, number in zip(stages, places, kernels, layers, strict=True):
            key = id(stage), id(place)
            if key not in known:
                known[key] = self.stage(
                    config, stage, place, kernels=mine, layers=number, slowed=slowed
                )
            found.append(known[key])
        return found

    def stage(
        self,
        config: Config,
        stage: Work,
        place: StageLayout,
        *,
        kernels: Kernels | None,
        layers: int,
        slowed: float,
    ) -> StagePrice:
        """Price a stage.

        Args:
            config: Configuration of the layout.
            stage: Work of the stage.
            place: Ranks that share the stage.
            kernels: Kernels of the stage; None: it is priced by products and layers.
            layers: Number of its layers.
            slowed: Factor by which ranks that share cores are slower.
        """
        mesh, size = config.mesh, config.train.microbatch_size
        microbatches = count_microbatches(config) if mesh.reduce_once else 0
        parts = self.parts(config.pipeline)
        key = (stage, place, size, mesh.gather, microbatches, slowed, parts)
        compute = partial(self._compute, kernels=kernels, layers=layers, slowed=slowed)
        return once(
            self._stages,
            key,
            lambda: self._stage(config, stage, place, compute(config, stage, place)),
        )

    def parts(self, pipeline: PipelineConfig) -> int:
        """Return the number of parts of a microbatch that each take a layer's fixed seconds."""
        splits = KINDS[pipeline.schedule].splits_backward and bool(self.machine.layer_seconds)
        return 2 + splits

    def _stage(
        self, config: Config, stage: Work, place: StageLayout, compute: Compute
    ) -> StagePrice:
        ahead, back, again = self._waits(config, stage, place)
        gather, reduce = self.gather(config, stage, place)
        price = StagePrice(
            forward=compute.forward + ahead,
            input_grad=compute.input_grad + compute.again + back + again,
            weight_grad=compute.weight_grad,
            exchanges=ahead + back + again,
            gathered=gather,
            reduced=reduce,
            device=compute.device,
            host=compute.host,
            kept=stage.kept_bytes(
                config.microbatch_tokens, tp=place.tp, padded=padding(config, place)
            ),
            message=float(message_bytes(config, place)),
        )
        return price.by_block(reductions(config)) if config.mesh.gather == "block" else price

    def _waits(self, config: Config, stage: Work, place: StageLayout) -> list[float]:
        """Return the seconds of exchanges in forward, in backward and in recomputation."""
        key = (place, config.train.microbatch_size)
        each = once(self._each, key, lambda: self._seconds_of_each(config, place))
        amounts = stage.exchanged
        repeated = stage.again.exchanged if stage.again else ()
        return [
            sum(map(mul, mine, column))
            for mine, column in zip((amounts, amounts, repeated), (*each, each[0]), strict=True)
        ]

    def _seconds_of_each(self, config: Config, place: StageLayout) -> list[list[float]]:
        """Return the seconds of one unit of each of `EXCHANGED`, in forward and in backward."""
        found: list[list[float]] = []
        ranks = {"summed": place.tp, "heads": place.cp, "attentions": place.cp}
        ranks |= {"balances": place.tp * place.cp, "losses": place.tp}
        for name in EXCHANGED:
            if ranks.get(name, place.ep * place.etp) == 1:
                found.append([0.0, 0.0])
                continue
            one = [Work.counted({name: 1.0})]
            way = partial(exchanges, config, one, place, self.machine, spread=self.spread)
            ends = [way()]
            if name in _UNLIKE_BACKWARD:
                ends.append(way(backward=True))
            sums = [sum(transfer.seconds for transfer in end) for end in ends]
            found.append([sums[0], sums[-1]])
        return [list(column) for column in zip(*found, strict=True)]

    def gather(self, config: Config, stage: Work, place: StageLayout) -> tuple[float, float]:
        """Return the seconds to gather the parameters of a stage, and to reduce their gradients."""
        way = partial(shard_transfer, config, stage, place, self.machine)
        return once(
            self._gathers,
            (kinds_of(stage), place),
            lambda: (way(what="gathered").seconds, way(what="reduced").seconds),
        )

    def _compute(
        self,
        config: Config,
        stage: Work,
        place: StageLayout,
        *,
        kernels: Kernels | None,
        layers: int,
        slowed: float,
    ) -> Compute:
        """Return the compute of a stage for the tokens that attention sees on a rank."""
        machine, number = self.machine, config.microbatch_tokens / place.tp
        if kernels is not None:
            rates = rates_of(machine, is_compiled=config.train.compile != "none", slowed=slowed)
            routed = Routed(self.spread.load(place.ep), padding(config, place))
            return rates.compute(kernels, number, place, routed=routed)
        alone = slowed * layers * machine.layer_seconds
        busy = slowed * number * stage.flops / machine.flops + alone
        repeated = stage.again.flops / stage.flops if stage.again else 0.0
        # Recomputation takes as long as its forward; weight gradients of a split backward run by
        # themselves, layer by layer.
        weights = (self.parts(config.pipeline) - 2) * alone + busy
        # Recomputed products take time, fixed seconds of layers do not.
        device = 2 * busy + weights + (busy - alone) * repeated
        return Compute(busy, busy, weights, again=busy * repeated, device=device, host=0.0)

    def ends(
        self, config: Config, stages: tuple[Work, ...], place: StageLayout
    ) -> Mapping[str, float]:
        """Return the seconds of a rank after the pipeline: sums over replicas, and the update."""
        key = (tuple(map(kinds_of, stages)), place, config.mesh.pp)
        found = self._ends.get(key)
        if found is None:
            transfers = gradient_transfers(config, stages, place, self.machine)
            parameters, gradients, optimizer = static_memory(config, stages, place)
            # Parameters and moments are read and written, gradients read.
            touched = 2 * parameters + gradients + 2 * optimizer
            found = self._ends[key] = {
                "gradients": sum(transfer.seconds for transfer in transfers),
                "optimizer": touched / self.machine.memory_bandwidth,
            }
        return found

    def memory(
        self,
        config: Config,
        stages: tuple[Work, ...],
        place: StageLayout,
        *,
        rank: int,
        activations: float,
    ) -> Memory:
        """Return the memory of a rank.

        Args:
            config: Configuration of the layout.
            stages: Stages of the rank.
            place: Ranks that share the stages.
            rank: Global number of the first of these ranks.
            activations: Bytes of activations at their peak.
        """
        mesh, size = config.mesh, config.train.microbatch_size
        key = (stages, place, mesh.pp > 1, mesh.gather, mesh.reduce_once, size)
        tensors = once(self._tensors, key, lambda: tensor_memory(config, stages, place))
        tensors = tensors.with_activations(activations, in_turn(config, stages, place))
        return tensors.with_margin(config, rank, self.machine)


def once(table: dict[object, T], key: object, make: Callable[[], T]) -> T:
    """Return the entry of a key in a table, made when it is asked for first."""
    found = table.get(key)
    if found is None:
        found = table[key] = make()
    return found


_UNLIKE_BACKWARD = ("rows", "balances", "losses")
"""Those of `EXCHANGED` whose exchanges in backward differ from those in forward."""


def all_exchanges(
    config: Config,
    stages: Sequence[Work],
    place: StageLayout,
    machine: Machine,
    *,
    spread: Spread,
) -> list[Transfer]:
    """Return the exchanges inside the layers of some stages for a microbatch.

    They are those of forward, of backward, and of the forward that backward runs again.
    """
    again = [stage.again for stage in stages if stage.again is not None]
    way = partial(exchanges, config, place=place, machine=machine, spread=spread)
    return [*way(stages), *way(stages, backward=True), *way(again)]


def exchanges(
    config: Config,
    works: Sequence[Work],
    place: StageLayout,
    machine: Machine,
    *,
    spread: Spread = _EVEN,
    backward: bool = False,
    tokens: int | None = None,
) -> list[Transfer]:
    """Return the exchanges of ranks inside layers, in one direction.

    Args:
        config: Configuration of the layout.
        works: Layers.
        place: Ranks that share the layers.
        machine: Links of the machine.
        spread: Spread of a token's experts over ranks.
        backward: Whether the direction is backward.
        tokens: Tokens that attention sees on a rank; None: those of a microbatch.
    """
    if tokens is None:
        tokens = config.microbatch_tokens
    found: list[Transfer] = []
    if place.tp * place.cp > 1:
        found += activation_transfers(
            config, works, place, machine, tokens=tokens, backward=backward
        )
    if place.ep * place.etp > 1 and any(work.rows for work in works):
        found.append(
            expert_transfer(
                config,
                works,
                place,
                machine,
                tokens=tokens // place.tp,
                backward=backward,
                spread=spread,
            )
        )
    return found


def reductions(config: Config) -> float:
    """Return the reductions of a gradient per microbatch, if blocks are reduced one by one."""
    return 1 / count_microbatches(config) if config.mesh.reduce_once else 1.0


@lru_cache(maxsize=1 << 16)  # schedules and batches of one mesh ask for the same
def aligned(place: StageLayout, node_size: int) -> StageLayout:
    """Return the ranks shifted to the lowest nodes, with the same positions in their nodes."""
    first = place.first % node_size
    is_inside = first + place.num_ranks <= node_size
    return replace(place, first=0 if is_inside else first)


def cores_of(machine: Machine, layout: Layout) -> tuple[int | None, float]:
    """Return the cores of one pipeline if ranks share cores, and the factor that slows ranks.

    Pipelines share cores evenly; a fraction of a core makes all steps of a pipeline slower.
    """
    if not machine.cores or machine.cores >= layout.world_size:
        return None, 1.0
    share = machine.cores * layout.pp / layout.world_size
    whole = max(1, int(share))
    return whole, whole / share


def costs_of(
    config: Config,
    machine: Machine,
    prices: Sequence[StagePrice],
    *,
    edges: Iterable[tuple[int, int]],
) -> Costs:
    """Return the costs of the steps of a layout's schedule.

    Args:
        config: Configuration of the layout.
        machine: Links of the machine.
        prices: Prices of each stage.
        edges: Pairs of pipeline ranks that send to each other.
    """
    layout, latencies = Layout.of(config.mesh), {}
    for source, destination in edges:
        # The slowest of all pipelines, with the seconds of the bytes, in both directions.
        ends = sorted((source, destination))
        link = edge_link(config, layout, machine, source=ends[0], destination=ends[1])
        latencies[source, destination] = link.seconds
    return Costs(
        forward=[price.forward for price in prices],
        input_grad=[price.input_grad for price in prices],
        weight_grad=[price.weight_grad for price in prices],
        activation=[price.kept for price in prices],
        latency=latencies,
        unshard=[price.gathered for price in prices],
        reduce_grad=[price.reduced for price in prices],
        kept_input=[price.message for price in prices],
        # The input and the output of a stage stay on the device.
        offloaded=[max(0.0, price.kept - 2 * price.message) for price in prices],
        host_bandwidth=machine.host_bandwidth,
    )
