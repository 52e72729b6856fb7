"""Bytes of one rank: parameters, gradients, optimizer and buffers. No torch.

Activations depend on the schedule, which is laid out for them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import NamedTuple

from hp_base.dtypes import BYTES
from hp_plan.costs.machine import Machine
from hp_plan.costs.modules import kept_once
from hp_plan.costs.work import Weight, Work
from hp_trainer.config import Config
from hp_trainer.layout.communicators import held
from hp_trainer.layout.parameter import SIDE_BY_SIDE, local_shape
from hp_trainer.layout.ranks import StageLayout
from hp_trainer.layout.schedules import count_microbatches
from hp_trainer.layout.vocabulary import WIDE_BYTES, logit_tile

ACTIVE_STAGES = 3
"""Stages whose parameters are gathered at once: the default of hp-schedule's pass."""
_ENDS = ("embedding.weight", "output.weight")
"""What FSDP shards as units of their own; see `hp_trainer.model.sharding`."""
_BLOCK = re.compile(r"layers\.\d+\.|mtp\.\d+\.block\.")
_STEP_BYTES = 4
"""AdamW counts its steps in one fp32 number per parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters: What the optimizer updates.
        gradients: Gradients, of the same dtype and cut.
        optimizer: Both moments and the count of steps.
        activations: Activations at their peak.
        buffers: Gathered parameters, those cast to be computed with, gradients laid side by side
            to be summed, messages, copies of logits.
        context: What the device's driver and libraries take.
        communicators: What NCCL takes.
        fragmentation: What the allocator holds beside tensors.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    context: int = 0
    communicators: int = 0
    fragmentation: int = 0

    @property
    def kinds(self) -> dict[str, int]:
        """By their names, those of tensors first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.kinds.values())

    def with_activations(self, activations: float, in_turn: int) -> Memory:
        """Return what it is with activations, some of which go before buffers of that size come."""
        kept = round(activations)
        return replace(self, activations=kept, buffers=self.buffers - min(kept, in_turn))

    def with_margin(self, config: Config, rank: int, machine: Machine) -> Memory:
        """Add what a rank of a machine holds beside the same tensors."""
        nccl = held(config, rank, node_size=machine.node_size)
        return replace(
            self,
            context=round(machine.context_memory),
            communicators=round(
                nccl.communicators * machine.communicator_memory + nccl.peers * machine.peer_memory
            ),
            fragmentation=round(machine.fragmentation * self.total),
        )


def tensor_memory(config: Config, stages: Sequence[Work], place: StageLayout) -> Memory:
    """Return what the tensors of a rank take while no microbatch is under way.

    Args:
        config: Configuration of the run.
        stages: Stages of the rank.
        place: Its place.
    """
    parameters, gradients, optimizer = static_memory(config, stages, place)
    return Memory(
        parameters=parameters,
        gradients=gradients,
        optimizer=optimizer,
        activations=0,
        buffers=buffer_bytes(config, stages, place, active_stages=ACTIVE_STAGES),
    )


def local_elements(weight: Weight, layout: StageLayout, *, first: bool = True) -> int:
    """Elements of a parameter on a rank: what is cut comes in chunks, the first ranks get most.

    Args:
        weight: The whole parameter.
        layout: Cuts it.
        first: Whether the rank is the first of every group, or the last.
    """
    axes = ("tp", "fsdp", "ep", "etp", "expert_shard")
    index = {axis: 0 if first else getattr(layout, axis) - 1 for axis in axes}
    return math.prod(local_shape(weight.shape, weight.spec, layout, index))


def stage_elements(stage: Work, layout: StageLayout, *, is_expert: bool) -> int:
    """Elements on a rank of those parameters of a stage that are experts, or of the others."""
    cutting = _cutting(layout, is_expert=is_expert)
    return _sharded_bytes(kinds_of(stage), cutting, 1, 1, is_expert=is_expert).reduced


@lru_cache(maxsize=1 << 16)
def _cutting(layout: StageLayout, *, is_expert: bool) -> StageLayout:
    """The same for all layouts that cut experts, or other parameters, alike."""
    if is_expert:
        ranks = layout.ep * layout.etp
        return StageLayout(dp_shard=ranks * layout.expert_shard, ep=layout.ep, etp=layout.etp)
    return StageLayout(dp_shard=layout.fsdp, tp=layout.tp)


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """Parameters that layers have alike. Those of stages that have the same are one object.

    Attributes:
        weights: One of each kind, and how many there are.
    """

    weights: tuple[tuple[Weight, int], ...]


class _Sharded(NamedTuple):
    """Bytes of parameters.

    Attributes:
        gathered: Bytes of the parameters in the dtypes in which they are gathered.
        reduced: Bytes of their gradients.
    """

    gathered: int
    reduced: int


def sharded_bytes(config: Config, stage: Work, layout: StageLayout, *, is_expert: bool) -> _Sharded:
    """Bytes that a rank has of those parameters of a stage that are experts, or of the others."""
    sizes = parameter_bytes(config), BYTES[config.train.dtype]
    cutting = _cutting(layout, is_expert=is_expert)
    return _sharded_bytes(kinds_of(stage), cutting, *sizes, is_expert=is_expert)


@lru_cache(maxsize=1 << 16)  # pipelines and batches of one mesh ask for the same
def _sharded_bytes(
    kinds: Kinds, layout: StageLayout, wide: int, narrow: int, *, is_expert: bool
) -> _Sharded:
    gathered = reduced = 0
    for weight, count in kinds.weights:
        if weight.spec.is_expert is is_expert:
            elements = count * local_elements(weight, layout)
            gathered += elements * (narrow if weight.is_cast else wide)
            reduced += elements * wide
    return _Sharded(gathered, reduced)


@lru_cache(maxsize=4096)
def kinds_of(stage: Work) -> Kinds:
    """The parameters of a stage by their kinds."""
    return _same_kinds(tuple(Counter(replace(w, name="") for w in stage.weights).items()))


@lru_cache(maxsize=4096)
def _same_kinds(weights: tuple[tuple[Weight, int], ...]) -> Kinds:
    return Kinds(weights)


@lru_cache(maxsize=4096)
def table_of(stage: Work) -> Weight | None:
    """The embedding of a stage, or the one that its logits share with the first stage."""
    return next((w for w in stage.weights if w.name == "embedding.weight"), None)


def parameter_bytes(config: Config) -> int:
    """Of one element: bf16 is trained on fp32 masters."""
    return max(BYTES[config.train.dtype], 4)


def static_memory(
    config: Config, stages: Sequence[Work], layout: StageLayout
) -> tuple[int, int, int]:
    """Bytes of parameters, gradients and optimizer of the rank that holds the most of some stages.

    Args:
        config: Configuration of the run.
        stages: Stages of that rank.
        layout: Cuts them.
    """
    # A tied table of two stages is updated once, and has two gradients; under FSDP there are two.
    tables = [table for stage in stages if (table := table_of(stage)) is not None]
    elements = sum(
        stage_elements(stage, layout, is_expert=is_expert)
        for stage in stages
        for is_expert in (False, True)
    )
    twice = sum(local_elements(table, layout) for table in tables[1:])
    each = elements * parameter_bytes(config)
    updated = (elements - twice) * parameter_bytes(config)
    num_updated = sum(len(stage.weights) for stage in stages) - len(tables[1:])
    held = each if layout.fsdp > 1 else updated
    return held, each, 2 * updated + _STEP_BYTES * num_updated


def in_turn(config: Config, stages: Sequence[Work], layout: StageLayout) -> int:
    """Bytes of gradients that come as activations go: whole ones, where nothing is under way then.

    With several microbatches those of the others are there when the first has left its gradients.
    """
    return whole_gradients(config, stages, layout) if count_microbatches(config) == 1 else 0


def whole_gradients(config: Config, stages: Sequence[Work], layout: StageLayout) -> int:
    """Bytes of gradients that are reduced at the end of a stage, or of a step, and whole before."""
    by_block, found = config.mesh.gather == "block", 0
    if by_block and not config.mesh.reduce_once:
        return 0
    for is_expert, shards in ((False, layout.fsdp), (True, layout.expert_shard)):
        if shards > 1:
            sizes = [
                sharded_bytes(config, stage, layout, is_expert=is_expert).reduced
                for stage in stages
            ]
            found += shards * (sum(sizes) if by_block else max(sizes))
    return found


def buffer_bytes(
    config: Config, stages: Sequence[Work], layout: StageLayout, *, active_stages: int
) -> int:
    """Bytes that come and go within a step.

    Args:
        config: Configuration of the run.
        stages: Stages of one rank.
        layout: Cuts them.
        active_stages: Stages whose parameters are gathered at once.
    """
    by_block = config.mesh.gather == "block"
    gathered = _gathered_by_block(config, stages, layout) if by_block else 0
    gathered += whole_gradients(config, stages, layout)
    if not by_block:
        reduced = [size.reduced for stage in stages for _, size in _units(config, stage, layout)]
        gathered += max(reduced, default=0)  # side by side, for their reduction
    flat = 0
    for is_expert, shards, copies in (
        (False, layout.fsdp, layout.dp_replicate),
        (True, layout.expert_shard, layout.expert_replicate),
    ):
        sizes = [sharded_bytes(config, stage, layout, is_expert=is_expert) for stage in stages]
        if shards > 1 and not by_block:
            largest = sorted((shards * size.gathered for size in sizes), reverse=True)
            gathered += sum(largest[:active_stages])
        if shards == 1 and copies > 1:
            flat = max(flat, sum(size.reduced for size in sizes))
    messages = 4 * message_bytes(config, layout) if config.mesh.pp > 1 else 0
    size, shared = BYTES[config.train.dtype], layout.ep * layout.etp
    kept = [_unsharded(stage, layout) for stage in stages]
    casts = sorted(
        (s.cast_bytes(size=size, tp=layout.tp, expert_ranks=shared) for s in kept), reverse=True
    )
    if not by_block and layout.is_sharded:
        casts = casts[:active_stages]  # held while parameters are gathered
    again = max(_recomputed(config, layout), _losing(config, stages, layout))
    return gathered + min(flat, SIDE_BY_SIDE) + round(sum(casts)) + messages + again


def _gathered_by_block(config: Config, stages: Sequence[Work], layout: StageLayout) -> int:
    """Bytes that are gathered at once where FSDP does so unit by unit.

    What is in no unit stays between a forward and its backward. Of units there are one that
    computes and the next one; in backward the gradients of one, and those of the one before side by
    side. The embedding, the output matrix and the largest block count as each other's neighbours.
    """
    stay, most = 0, 0
    for stage in stages:
        sizes = dict(_units(config, stage, layout))
        rest = sizes.pop("", _Sharded(0, 0))
        stay += rest.gathered + 2 * rest.reduced
        blocks = [size for name, size in sizes.items() if name not in _ENDS]
        block = max(blocks, key=lambda size: size.reduced, default=_Sharded(0, 0))
        for end in [size for name, size in sizes.items() if name in _ENDS] or [block]:
            first = end.gathered + 2 * end.reduced + block.gathered
            then = 2 * block.gathered + block.reduced + max(end.reduced, block.reduced)
            most = max(most, first, then)
    return stay + most


def _units(config: Config, stage: Work, layout: StageLayout) -> tuple[tuple[str, _Sharded], ...]:
    """Return what each unit is gathered and reduced as, whole; what is in none stands under "".

    Of blocks that are alike it has one.
    """
    has_ends = config.mesh.gather == "block" and not config.model.is_own
    units = _kinds_of_units(stage, has_ends=has_ends)
    return _units_of(units, layout, parameter_bytes(config), BYTES[config.train.dtype])


@lru_cache(maxsize=1 << 14)
def _units_of(
    units: tuple[tuple[str, Kinds], ...], layout: StageLayout, wide: int, narrow: int
) -> tuple[tuple[str, _Sharded], ...]:
    found: list[tuple[str, _Sharded]] = []
    for name, kinds in units:
        gathered = reduced = 0
        for is_expert, shards in ((False, layout.fsdp), (True, layout.expert_shard)):
            if shards > 1:
                cutting = _cutting(layout, is_expert=is_expert)
                part = _sharded_bytes(kinds, cutting, wide, narrow, is_expert=is_expert)
                gathered += shards * part.gathered
                reduced += shards * part.reduced
        if reduced:
            found.append((name, _Sharded(gathered, reduced)))
    return tuple(found)


@lru_cache(maxsize=4096)
def _kinds_of_units(stage: Work, *, has_ends: bool) -> tuple[tuple[str, Kinds], ...]:
    """The parameters of units by their kinds."""
    names = {weight.name for weight in stage.weights}
    is_first = any(name.startswith("layers.0.") for name in names)
    is_both = is_first and "norm.weight" in names and _ENDS[1] not in names
    ends = _ENDS if has_ends and not is_both else ()  # a table that is read at both is in none
    units: dict[str, list[Weight]] = {}
    for weight in stage.weights:
        match = _BLOCK.match(weight.name)
        unit = match[0] if match else weight.name if weight.name in ends else ""
        units.setdefault(unit, []).append(replace(weight, name=""))
    found: dict[object, tuple[str, Kinds]] = {}
    for name, weights in units.items():
        kinds = _same_kinds(tuple(Counter(weights).items()))
        found.setdefault(kinds if _BLOCK.match(name) else name, (name, kinds))
    return tuple(found.values())


@lru_cache(maxsize=4096)
def num_units(stage: Work, *, is_expert: bool) -> int:
    """Count the collectives that gather a stage's parameters, of experts or of the rest."""
    weights = (weight for weight in stage.weights if weight.spec.is_expert is is_expert)
    matches = (_BLOCK.match(weight.name) for weight in weights)
    return len({match and match[0] for match in matches})


@lru_cache(maxsize=1 << 12)
def _unsharded(stage: Work, layout: StageLayout) -> Work:
    """With the parameters that FSDP does not shard: their casts stay, others come and go."""
    shards = {True: layout.expert_shard, False: layout.fsdp}
    left = tuple(weight for weight in stage.weights if shards[weight.spec.is_expert] == 1)
    return replace(stage, weights=left)


def _losing(config: Config, stages: Sequence[Work], layout: StageLayout) -> int:
    """Count bytes of a loss beside the logarithms that it keeps: copies of logits, or of a tile.

    In backward two gradients of the size of all logits, of the logarithms and of the logits; where
    ranks share the vocabulary one, of which a copy in the dtype of activations is made. With tiles
    one gradient and such a copy, or that copy and what it gives to one of the gradients that are
    added up; and as much of that of the input as is added up at once.
    """
    logits = max((stage.logits for stage in stages), default=0)
    size = BYTES[config.train.dtype]
    wide = max(size, WIDE_BYTES)
    copy = size if size < wide else 0
    tokens = config.train.microbatch_size * config.data.seq_len // layout.cp
    rows = -(-round(logits) // layout.tp)
    tile = logit_tile(tokens, rows, size=size)
    if tile is not None:
        logits, dim = tile.tokens * tile.rows, config.model.dim
        added = logits * size + max(tile) * dim * size
        return max(logits * (wide + copy), added) + tile.tokens * dim * wide
    is_cut = layout.tp > 1 and not config.model.transformers
    return (wide + size if is_cut else 2 * wide) * tokens * rows


def _recomputed(config: Config, layout: StageLayout) -> int:
    """Return what one layer keeps while backward computes it again."""
    if config.train.recompute == "none":
        return 0
    tokens = config.train.microbatch_size * config.data.seq_len // layout.cp
    return round(kept_once(config, tp=layout.tp, padded=padding(config, layout)) * tokens)


def padding(config: Config, layout: StageLayout) -> float:
    """Rows of a buffer for experts by those that are routed: 1 where as many travel as there are.

    See `mesh.ep_buffer`; it is the same however many tokens there are, but for a part of a row.
    """
    factor, model = config.mesh.ep_buffer, config.model
    if not factor or layout.ep == 1:
        return 1.0
    from hp_expert import rows_per_pair  # noqa: PLC0415 - imports torch

    tokens = config.train.microbatch_size * config.data.seq_len // (layout.cp * layout.tp)
    rows = rows_per_pair(tokens, model.top_k, model.num_experts, layout.ep, factor=factor)
    return rows * layout.ep / (tokens * model.top_k)


def message_bytes(config: Config, layout: StageLayout) -> int:
    """Count bytes that a rank sends of a microbatch to the next stage, and of its gradient back."""
    sharing = layout.cp if config.model.transformers else layout.cp * layout.tp
    tokens = config.train.microbatch_size * config.data.seq_len // sharing
    return tokens * config.model.stage_width * BYTES[config.train.dtype]
