"""Bytes of one rank: parameters, gradients, optimizer and buffers. No torch.

Activations depend on the schedule: :mod:`hp_train.plan.estimate` counts them.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from hp_train.base.dtypes import BYTES
from hp_train.config import Config
from hp_train.costs.machine import Machine
from hp_train.costs.modules import kept_once
from hp_train.costs.work import Weight, Work
from hp_train.layout.communicators import held
from hp_train.layout.parameter import local_shape
from hp_train.layout.ranks import StageLayout
from hp_train.layout.vocabulary import WIDE_BYTES, logit_tile

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

    def with_margin(self, config: Config, rank: int, machine: Machine) -> "Memory":
        """What the same tensors take on a rank of a machine, where more than tensors is held."""
        nccl = held(config, rank, node_size=machine.node_size)
        return replace(
            self,
            context=round(machine.context_memory),
            communicators=round(
                nccl.communicators * machine.communicator_memory + nccl.peers * machine.peer_memory
            ),
            fragmentation=round(machine.fragmentation * self.total),
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
    return _elements(kinds_of(stage), layout, is_expert=is_expert)


@lru_cache(maxsize=1 << 16)  # pipelines and batches of one mesh ask for the same
def _elements(kinds: "Kinds", layout: StageLayout, *, is_expert: bool) -> int:
    return sum(
        count * local_elements(weight, layout)
        for weight, count in kinds.weights
        if weight.spec.is_expert is is_expert
    )


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """Parameters that layers have alike. Those of stages that have the same are one object.

    Attributes:
        weights: One of each kind, and how many there are.
    """

    weights: tuple[tuple[Weight, int], ...]


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
    per_element = parameter_bytes(config)
    by_block = config.mesh.gather == "block"
    dense, routed = (
        [stage_elements(stage, layout, is_expert=is_expert) for stage in stages]
        for is_expert in (False, True)
    )
    gathered = _gathered_by_block(stages, layout) if by_block else 0
    for local, shards in ((dense, layout.fsdp), (routed, layout.expert_shard)):
        if shards > 1 and not by_block:
            sizes = sorted((shards * elements for elements in local), reverse=True)
            # Parameters while they are used, and the gradients of the stage that is reduced.
            gathered += sum(sizes[:active_stages]) + sizes[0]
    copied = ((dense, layout.dp_replicate), (routed, layout.expert_replicate))
    flat = max((sum(local) for local, copies in copied if copies > 1), default=0)
    messages = 4 * message_bytes(config, layout) if config.mesh.pp > 1 else 0
    size, shared = BYTES[config.train.dtype], layout.ep * layout.etp
    kept = [_unsharded(stage, layout) if by_block else stage for stage in stages]
    casts = sorted(
        (s.cast_bytes(size=size, tp=layout.tp, expert_ranks=shared) for s in kept), reverse=True
    )
    if not by_block and layout.is_sharded:
        casts = casts[:active_stages]  # held while parameters are gathered
    again = max(_recomputed(config, layout), _losing(config, stages, layout))
    return (gathered + flat) * per_element + round(sum(casts)) + messages + again


def _gathered_by_block(stages: Sequence[Work], layout: StageLayout) -> int:
    """Elements that are gathered at once where FSDP does so block by block.

    What is in no block stays between a forward and its backward. Of blocks there are one that
    computes and the next one, and in backward the gradients of one, once more side by side.
    """
    outside, behind, block = 0, 0, 0
    for stage in stages:
        sizes = _sizes_by_block(stage, layout)
        outside += sizes[0]
        behind, block = max(behind, sizes[1]), max(block, sizes[2])
    return outside + behind + 4 * block


@lru_cache(maxsize=1 << 16)
def _sizes_by_block(stage: Work, layout: StageLayout) -> tuple[int, int, int]:
    """Gathered elements in no block, those of them that the last stage has, and of a block."""
    sizes: Counter[str] = Counter()
    for weight in stage.weights:
        shards = _shards(weight, layout)
        if shards > 1:
            block = re.match(r"layers\.\d+\.|mtp\.\d+\.block\.", weight.name)
            sizes[block[0] if block else ""] += shards * local_elements(weight, layout)
    outside, table = sizes.pop("", 0), table_of(stage)
    first = layout.fsdp * local_elements(table, layout) if table is not None and outside else 0
    return outside, outside - first, max(sizes.values(), default=0)


def _shards(weight: Weight, layout: StageLayout) -> int:
    """Ranks that FSDP shards a parameter over."""
    return layout.expert_shard if weight.spec.is_expert else layout.fsdp


@lru_cache(maxsize=1 << 12)
def _unsharded(stage: Work, layout: StageLayout) -> Work:
    """With the parameters that FSDP does not shard: their casts stay, others come and go."""
    left = tuple(weight for weight in stage.weights if _shards(weight, layout) == 1)
    return replace(stage, weights=left)


def _losing(config: Config, stages: Sequence[Work], layout: StageLayout) -> int:
    """What a loss holds beside the logarithms that it keeps: copies of the logits, or of a tile.

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
    return (2 * wide if layout.tp == 1 else wide + size) * tokens * rows


def _recomputed(config: Config, layout: StageLayout) -> int:
    """What one layer keeps while backward computes it again."""
    if config.train.recompute == "none":
        return 0
    tokens = config.train.microbatch_size * config.data.seq_len // layout.cp
    return round(kept_once(config, tp=layout.tp) * tokens)


def message_bytes(config: Config, layout: StageLayout) -> int:
    """What a rank of a stage sends of a microbatch to the next stage, and of its gradient back."""
    tokens = config.train.microbatch_size * config.data.seq_len // (layout.cp * layout.tp)
    return tokens * config.model.stage_width * BYTES[config.train.dtype]
