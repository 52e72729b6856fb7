"""Bytes of one rank: parameters, gradients, optimizer and buffers. No torch.

Activations depend on the schedule; their peak comes from its simulation.
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
"""Number of stages whose parameters are gathered at once: the default of hp-schedule's pass."""
_ENDS = ("embedding.weight", "output.weight")
"""Parameters that FSDP shards as units of their own; see `hp_trainer.model.spreading`."""
_BLOCK = re.compile(r"layers\.\d+\.|mtp\.\d+\.block\.")
_STEP_BYTES = 4
"""AdamW counts its steps in one fp32 number per parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of one rank.

    Attributes:
        parameters: Bytes of parameters, which the optimizer updates.
        gradients: Bytes of gradients, with the dtype and sharding of parameters.
        optimizer: Bytes of both moments and the count of steps.
        activations: Bytes of activations at their peak.
        buffers: Bytes of gathered parameters, casts, gradients that are flattened for a sum,
            messages and copies of logits.
        context: Bytes of the device's driver and libraries.
        communicators: Bytes of NCCL.
        fragmentation: Bytes that the allocator reserves beside tensors.
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
        """Return bytes by name, those of tensors first."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def total(self) -> int:
        """Return the sum of all bytes."""
        return sum(self.kinds.values())

    def with_activations(self, activations: float, in_turn: int) -> Memory:
        """Return the memory with activations, `in_turn` bytes of which buffers use later."""
        kept = round(activations)
        return replace(self, activations=kept, buffers=self.buffers - min(kept, in_turn))

    def with_margin(self, config: Config, rank: int, machine: Machine) -> Memory:
        """Return the memory with the margin of a machine: context, communicators, fragmentation."""
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
    """Return the memory of the tensors of a rank while no microbatch is under way.

    Args:
        config: Configuration of the run.
        stages: Stages of the rank.
        place: Ranks that share the stages.
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
    """Return the elements of a parameter on a rank; of uneven chunks the first ranks get more.

    Args:
        weight: Parameter.
        layout: Ranks that share the parameter.
        first: Whether the rank is the first of every group; if not, it is the last.
    """
    axes = ("tp", "fsdp", "ep", "etp", "expert_shard")
    index = {axis: 0 if first else getattr(layout, axis) - 1 for axis in axes}
    return math.prod(local_shape(weight.shape, weight.spec, layout, index))


def stage_elements(stage: Work, layout: StageLayout, *, is_expert: bool) -> int:
    """Return the elements on a rank of a stage's experts, or of its other parameters."""
    cutting = _cutting(layout, is_expert=is_expert)
    return _sharded_bytes(kinds_of(stage), cutting, 1, 1, is_expert=is_expert).reduced


@lru_cache(maxsize=1 << 16)
def _cutting(layout: StageLayout, *, is_expert: bool) -> StageLayout:
    """Return one layout for all that cut experts, or other parameters, in the same way."""
    if is_expert:
        ranks = layout.ep * layout.etp
        return StageLayout(dp_shard=ranks * layout.expert_shard, ep=layout.ep, etp=layout.etp)
    return StageLayout(dp_shard=layout.fsdp, tp=layout.tp)


@dataclass(frozen=True, slots=True, eq=False)
class Kinds:
    """Parameters of a stage by kind; one object for all stages with the same parameters.

    Attributes:
        weights: One parameter of each kind, and the number of the kind.
    """

    weights: tuple[tuple[Weight, int], ...]


class _Sharded(NamedTuple):
    """Bytes of parameters.

    Attributes:
        gathered: Bytes of parameters in the dtypes in which they are gathered.
        reduced: Bytes of gradients in the dtype in which they are reduced.
    """

    gathered: int
    reduced: int


def sharded_bytes(config: Config, stage: Work, layout: StageLayout, *, is_expert: bool) -> _Sharded:
    """Return the bytes on a rank of a stage's experts, or of its other parameters."""
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
    """Return the parameters of a stage by kind."""
    return _same_kinds(tuple(Counter(replace(w, name="") for w in stage.weights).items()))


@lru_cache(maxsize=4096)
def _same_kinds(weights: tuple[tuple[Weight, int], ...]) -> Kinds:
    return Kinds(weights)


@lru_cache(maxsize=4096)
def table_of(stage: Work) -> Weight | None:
    """Return the embedding of a stage, or the copy of it for tied logits; None: there is none."""
    return next((w for w in stage.weights if w.name == "embedding.weight"), None)


def parameter_bytes(config: Config) -> int:
    """Return the bytes of an element of parameters; bf16 is trained on fp32 masters."""
    return max(BYTES[config.train.dtype], 4)


def static_memory(
    config: Config, stages: Sequence[Work], layout: StageLayout
) -> tuple[int, int, int]:
    """Return the bytes of parameters, gradients and optimizer of the fullest rank of some stages.

    Args:
        config: Configuration of the run.
        stages: Stages of the rank.
        layout: Ranks that share the stages.
    """
    # A tied table of two stages is updated once, but has two gradients; FSDP stores it twice.
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
    """Return the bytes of whole gradients that replace activations in memory.

    That happens with one microbatch alone: with several, activations of the others are still in
    memory when the first has left its gradients.
    """
    return whole_gradients(config, stages, layout) if count_microbatches(config) == 1 else 0


def whole_gradients(config: Config, stages: Sequence[Work], layout: StageLayout) -> int:
    """Return the bytes of gradients that are whole until the end of a stage, or of a step."""
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
    """Return the bytes of temporary buffers of a step.

    Args:
        config: Configuration of the run.
        stages: Stages of one rank.
        layout: Ranks that share the stages.
        active_stages: Number of stages whose parameters are gathered at once.
    """
    by_block = config.mesh.gather == "block"
    gathered = _gathered_by_block(config, stages, layout) if by_block else 0
    gathered += whole_gradients(config, stages, layout)
    if not by_block:
        reduced = [size.reduced for stage in stages for _, size in _units(config, stage, layout)]
        gathered += max(reduced, default=0)  # flattened, for their reduction
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
        casts = casts[:active_stages]  # as long as parameters are gathered
    again = max(_recomputed(config, layout), _losing(config, stages, layout))
    return gathered + min(flat, SIDE_BY_SIDE) + round(sum(casts)) + messages + again


def _gathered_by_block(config: Config, stages: Sequence[Work], layout: StageLayout) -> int:
    """Return the bytes that are gathered at once where FSDP gathers unit by unit.

    Parameters in no unit stay from forward to backward. Of units, the running one and the next are
    gathered; in backward there are also the gradients of one, and the flattened gradients of the
    one before. Embedding, output matrix and the largest block count as neighbours of each other.
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
    """Return the whole bytes of each unit, under "" those of parameters in no unit.

    Equal blocks are listed once.
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
    """Return the parameters of units by kind."""
    names = {weight.name for weight in stage.weights}
    is_first = any(name.startswith("layers.0.") for name in names)
    is_both = is_first and "norm.weight" in names and _ENDS[1] not in names
    ends = _ENDS if has_ends and not is_both else ()  # a table that both ends read is in none
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
    """Return a stage with the parameters that FSDP does not shard, whose casts stay in memory."""
    shards = {True: layout.expert_shard, False: layout.fsdp}
    left = tuple(weight for weight in stage.weights if shards[weight.spec.is_expert] == 1)
    return replace(stage, weights=left)


def _losing(config: Config, stages: Sequence[Work], layout: StageLayout) -> int:
    """Count the bytes of temporary copies of logits, of all of them or of a tile.

    Without tiles, backward has gradients of the logarithms and of the logits; where ranks share the
    vocabulary, one gradient and its copy in the dtype of activations. With tiles it has one
    gradient and such a copy, or the copy and its product for a gradient that is accumulated; and
    the accumulated gradient of the input of a tile.
    """
    logits = max((stage.logits for stage in stages), default=0)
    size = BYTES[config.train.dtype]
    wide = max(size, WIDE_BYTES)
    copy = size if size < wide else 0
    tokens, rows = config.microbatch_tokens, -(-round(logits) // layout.tp)
    tile = logit_tile(tokens, rows, size=size)
    if tile is not None:
        logits, dim = tile.tokens * tile.rows, config.model.dim
        added = logits * size + max(tile) * dim * size
        return max(logits * (wide + copy), added) + tile.tokens * dim * wide
    is_cut = layout.tp > 1 and not config.model.transformers
    return (wide + size if is_cut else 2 * wide) * tokens * rows


def _recomputed(config: Config, layout: StageLayout) -> int:
    """Return the bytes that one layer keeps while backward recomputes it."""
    if config.train.recompute == "none":
        return 0
    per_token = kept_once(config, tp=layout.tp, padded=padding(config, layout))
    return round(per_token * config.microbatch_tokens)


def padding(config: Config, layout: StageLayout) -> float:
    """Return the rows of a buffer for experts divided by the routed ones; 1 without such buffers.

    See `mesh.ep_buffer`; the ratio hardly depends on the number of tokens.
    """
    factor, model = config.mesh.ep_buffer, config.model
    if not factor or layout.ep == 1:
        return 1.0
    from hp_expert import rows_per_pair  # noqa: PLC0415 - imports torch

    tokens = config.microbatch_tokens // layout.tp
    rows = rows_per_pair(tokens, model.top_k, model.num_experts, layout.ep, factor=factor)
    return rows * layout.ep / (tokens * model.top_k)


def message_bytes(config: Config, layout: StageLayout) -> int:
    """Return the bytes that a rank sends to the next stage for a microbatch, and as many back."""
    tokens = config.microbatch_tokens // (1 if config.model.transformers else layout.tp)
    return tokens * config.model.stage_width * BYTES[config.train.dtype]
