"""What stages cost where they are: each worked out once for all layouts that ask for it. No torch.

Of a layout only a few things matter to one of its stages: which ranks share it, how many tokens a
microbatch has, and how its parameters are gathered. Thousands of layouts have these in common.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from hp_train.config import Config
from hp_train.costs.machine import Machine
from hp_train.costs.work import Kernels, Work
from hp_train.layout.ranks import StageLayout
from hp_train.plan.kernels import Compute, rates_of
from hp_train.plan.memory import Memory, buffer_bytes, static_memory
from hp_train.plan.traffic import (
    Spread,
    Transfer,
    activation_transfers,
    expert_transfer,
    gradient_transfers,
    shard_transfer,
)

ACTIVE_STAGES = 3
"""Stages whose parameters are gathered at once: the default of hp-schedule's pass."""


class StagePrice(NamedTuple):
    """Seconds of a stage for a microbatch, and the bytes that one keeps.

    Attributes:
        forward: Forward.
        input_grad: The part of backward that other stages wait for, with what runs again.
        weight_grad: The rest of it.
        exchanges: Of these, what the stage waits for others inside its layers.
        sharded: Gathering its parameters once, or reducing its gradients; 0 where that happens
            block by block, within forward and backward.
        host: What the host takes to launch all of it.
        kept: Bytes that a microbatch keeps from forward to backward.
    """

    forward: float
    input_grad: float
    weight_grad: float
    exchanges: float
    sharded: float
    host: float
    kept: float

    @property
    def full(self) -> float:
        """Forward and backward."""
        return self.forward + self.input_grad + self.weight_grad


class Prices:
    """Prices of the stages of layouts that differ in mesh, pipeline, microbatches, recomputation.

    Args:
        machine: Machine that they are on.
        spread: Where the experts of a token are.
    """

    def __init__(self, machine: Machine, spread: Spread) -> None:
        self.machine, self.spread = machine, spread
        self._stages: dict[object, StagePrice] = {}
        self._ends: dict[object, Mapping[str, float]] = {}
        self._tensors: dict[object, Memory] = {}

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
            stage: The stage.
            place: The ranks that share it.
            kernels: What it launches; None: it is priced as products and layers.
            layers: Layers that it has.
            slowed: Factor by which ranks are slower that share cores.
        """
        key = (stage, place, config.train.microbatch_size, config.mesh.gather, slowed)
        found = self._stages.get(key)
        if found is None:
            tokens = config.train.microbatch_size * config.data.seq_len // config.mesh.cp
            compute = self._compute(
                config, stage, place, tokens, kernels=kernels, layers=layers, slowed=slowed
            )
            found = self._stages[key] = self._stage(config, stage, place, tokens, compute)
        return found

    def _stage(
        self, config: Config, stage: Work, place: StageLayout, tokens: int, compute: Compute
    ) -> StagePrice:
        waits = [
            sum(transfer.seconds for transfer in way)
            for way in ways(config, [stage], place, self.machine, spread=self.spread)
        ]
        gather = shard_transfer(config, stage, place, self.machine).seconds
        by_stage, by_block = (
            gather if config.mesh.gather == what else 0.0 for what in ("stage", "block")
        )
        return StagePrice(
            # Parameters are gathered meanwhile, and in backward gradients reduced.
            forward=max(compute.forward + waits[0], by_block),
            input_grad=max(
                compute.input_grad + compute.again + sum(waits[1:]),
                2 * by_block - compute.weight_grad,
            ),
            weight_grad=compute.weight_grad,
            exchanges=sum(waits),
            sharded=by_stage,
            host=compute.host,
            kept=stage.kept_bytes(tokens, tp=place.tp),
        )

    def _compute(
        self,
        config: Config,
        stage: Work,
        place: StageLayout,
        tokens: int,
        *,
        kernels: Kernels | None,
        layers: int,
        slowed: float,
    ) -> Compute:
        """What a stage computes for a microbatch of tokens that attention sees on a rank."""
        machine, number = self.machine, tokens / place.tp
        if kernels is not None:
            compiled = config.train.compile != "none"
            rates = rates_of(machine, is_compiled=compiled, slowed=slowed)
            return rates.compute(kernels, number, place, load=self.spread.load)
        busy = slowed * (number * stage.flops / machine.flops + layers * machine.layer_seconds)
        repeated = stage.again.flops / stage.flops if stage.again else 0.0
        # What runs again takes as long as it did.
        return Compute(busy, busy, busy, again=busy * repeated)

    def ends(
        self, config: Config, stages: tuple[Work, ...], place: StageLayout
    ) -> Mapping[str, float]:
        """Seconds after the pipeline, of the stages of a rank: sums over replicas, the update."""
        key = (stages, place, config.mesh.pp)
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
        """What a rank needs.

        Args:
            config: Configuration of the layout.
            stages: Stages of the rank.
            place: The ranks that share them.
            rank: Global number of the first of them.
            activations: Bytes of its microbatches under way.
        """
        tensors = self.tensors(config, stages, place)
        tensors = replace(tensors, activations=round(activations))
        return tensors.with_margin(config, rank, self.machine)

    def tensors(self, config: Config, stages: tuple[Work, ...], place: StageLayout) -> Memory:
        """What the tensors of a rank take that are not of microbatches under way."""
        key = (stages, place, config.mesh.pp > 1, config.mesh.gather, config.train.microbatch_size)
        found = self._tensors.get(key)
        if found is None:
            parameters, gradients, optimizer = static_memory(config, stages, place)
            found = self._tensors[key] = Memory(
                parameters=parameters,
                gradients=gradients,
                optimizer=optimizer,
                activations=0,
                buffers=buffer_bytes(config, stages, place, active_stages=ACTIVE_STAGES),
            )
        return found


def ways(
    config: Config,
    stages: Sequence[Work],
    place: StageLayout,
    machine: Machine,
    *,
    spread: Spread,
) -> list[list[Transfer]]:
    """What ranks exchange inside the layers of some stages for a microbatch.

    Returns:
        In forward, in backward, and in what backward runs again.
    """
    tokens = config.train.microbatch_size * config.data.seq_len // config.mesh.cp
    again = [stage.again for stage in stages if stage.again is not None]
    found = []
    for works, backward in ((stages, False), (stages, True), (again, False)):
        way = activation_transfers(config, works, place, machine, tokens=tokens)
        if works and place.ep * place.etp > 1 and config.model.has_experts:
            dealt = tokens // place.tp
            way.append(
                expert_transfer(
                    config, works, place, machine, tokens=dealt, backward=backward, spread=spread
                )
            )
        found.append(way)
    return found


def aligned(place: StageLayout, node_size: int) -> StageLayout:
    """The same ranks where they are in their nodes, as low as can be: that is all that matters."""
    first = place.first % node_size
    is_inside = first + place.num_ranks <= node_size
    return replace(place, first=0 if is_inside else first)
