"""Bytes that a rank sends in a step, by what for, and how long they take on their links. No torch.

Only the bytes of experts come from elsewhere: from hp-expert, whose import loads torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hp_train.config import Config
from hp_train.layout import Axis, Layout
from hp_train.plan.machine import Machine
from hp_train.plan.memory import BYTES, local_elements, message_bytes, parameter_bytes
from hp_train.plan.modules import Work


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a rank sends in a step for one purpose.

    Attributes:
        purpose: "pipeline", "experts", "tensor", "context", "gradients" or "parameters".
        bytes: Sent.
        seconds: For which its link is busy.
        between_nodes: Whether it leaves the node.
    """

    purpose: str
    bytes: float
    seconds: float
    between_nodes: bool


def expert_bytes(config: Config, layout: Layout) -> float:
    """Bytes that a token of a layer sends to other ranks in forward and backward together.

    The dispatcher chooses between a row per expert and a row per rank as hp-expert does. Where the
    width of experts is cut, what arrives is gathered by the ranks that have the other parts, and
    their outputs are summed on the way back.
    """
    if layout.ep * layout.etp == 1:
        return 0.0
    from hp_expert import (  # noqa: PLC0415 - imports torch
        deduplication_pays,
        dispatch_bytes,
        expected_rows_per_token,
    )

    model = config.model
    row_bytes = model.dim * BYTES[config.train.dtype]
    weight_bytes = max(4, BYTES[config.train.dtype])
    shape = (model.num_experts, model.top_k, layout.ep)
    cost = dispatch_bytes(*shape, row_bytes=row_bytes, weight_bytes=weight_bytes)
    pays = deduplication_pays(*shape, row_bytes=row_bytes, weight_bytes=weight_bytes)
    share_of_others = (layout.ep - 1) / layout.ep
    dispatched = share_of_others * (cost.deduplicated if pays else cost.plain)
    rows = expected_rows_per_token(*shape) if pays else model.top_k
    return dispatched + 4 * rows * row_bytes * (layout.etp - 1)


def group_link(layout: Layout, machine: Machine, *axes: Axis) -> tuple[float, float, bool]:
    """Bandwidth and latency of the slowest group along some axes, and whether it spans nodes."""
    links = [machine.link(ranks) for ranks in layout.ranks(*axes)]
    bandwidth, latency = min(bandwidth for bandwidth, _ in links), max(late for _, late in links)
    return bandwidth, latency, bandwidth != machine.bandwidth or latency != machine.latency


def expert_transfer(
    config: Config, stages: Sequence[Work], layout: Layout, machine: Machine, *, tokens: int
) -> Transfer:
    """Dispatch and combine of some tokens through the layers of some stages, both directions."""
    layers = sum(stage.rows for stage in stages) / max(1, config.model.top_k)
    size = layers * tokens * expert_bytes(config, layout)
    bandwidth, latency, far = group_link(layout, machine, "ep", "etp")
    messages = 4 * layers * (layout.ep - 1 + layout.etp - 1)
    return Transfer("experts", size, size / bandwidth + messages * latency, far)


def activation_transfers(
    config: Config, stages: Sequence[Work], layout: Layout, machine: Machine, *, tokens: int
) -> list[Transfer]:
    """What tensor- and context-parallel ranks exchange for some tokens, both directions.

    Tensor-parallel ranks put positions together before what they cut and sum after it, and the
    reverse in backward. Context-parallel ranks send q, k, v and the output to the ranks that have
    their heads; where groups of them gather keys and values instead, that is taken for the same.

    Args:
        config: Of the run.
        stages: Of one rank.
        layout: Of the run.
        machine: Of the links.
        tokens: That attention sees on the rank.
    """
    size = BYTES[config.train.dtype]
    gathered, heads = sum(s.gathered for s in stages), sum(s.heads for s in stages)
    kinds: tuple[tuple[str, Axis, int, float], ...] = (
        ("tensor", "tp", layout.tp, 4 * gathered),
        ("context", "cp", layout.cp, 2 * heads / layout.tp),
    )
    found = []
    for purpose, axis, ranks, elements in kinds:
        if ranks == 1:
            continue
        sent = (ranks - 1) / ranks * elements * size * tokens
        bandwidth, latency, far = group_link(layout, machine, axis)
        # Per layer four exchanges forward and four backward, of a message per other rank.
        layers = sum(1 for s in stages for w in s.weights if w.name.endswith("attention.wo.weight"))
        seconds = sent / bandwidth + 8 * layers * (ranks - 1) * latency
        found.append(Transfer(purpose, sent, seconds, far))
    return found


def gradient_transfers(
    config: Config, stages: Sequence[Work], layout: Layout, machine: Machine
) -> list[Transfer]:
    """Sums over replicas at the end of a step: each rank sends 2 (n - 1) / n of what it holds."""
    transfers = []
    tables = [w for stage in stages for w in stage.weights if w.name == "embedding.weight"]
    if config.model.tie_embeddings and layout.pp > 1 and len(tables) == 1:
        # The other stage that has it is on another rank.
        size = float(local_elements(tables[0], layout) * parameter_bytes(config))
        bandwidth, latency, far = group_link(layout, machine, "pp")
        transfers.append(Transfer("gradients", size, size / bandwidth + 2 * latency, far))
    kinds: tuple[tuple[bool, Axis, int], ...] = (
        (False, "dp_replicate", layout.dp_replicate),
        (True, "expert_replicate", layout.expert_replicate),
    )
    for is_expert, axis, copies in kinds:
        if copies == 1:
            continue
        elements = sum(
            local_elements(weight, layout)
            for stage in stages
            for weight in stage.weights
            if weight.is_expert is is_expert
        )
        size = 2 * (copies - 1) / copies * elements * parameter_bytes(config)
        bandwidth, latency, far = group_link(layout, machine, axis)
        seconds = size / bandwidth + 2 * (copies - 1) * latency
        transfers.append(Transfer("gradients", size, seconds, far))
    return transfers


def shard_transfer(config: Config, stage: Work, layout: Layout, machine: Machine) -> Transfer:
    """Gathering a stage's parameters once; reducing its gradients once costs the same."""
    size, seconds, far = 0.0, 0.0, False
    kinds: tuple[tuple[bool, tuple[Axis, ...], int], ...] = (
        (False, ("dp_shard", "cp"), layout.fsdp),
        (True, ("expert_shard",), layout.expert_shard),
    )
    for is_expert, axes, shards in kinds:
        if shards == 1:
            continue
        local = sum(local_elements(w, layout) for w in stage.weights if w.is_expert is is_expert)
        part = (shards - 1) * local * parameter_bytes(config)
        bandwidth, latency, spans = group_link(layout, machine, *axes)
        size, far = size + part, far or spans
        seconds += part / bandwidth + (shards - 1) * latency
    return Transfer("parameters", size, seconds, far)


def pipeline_transfer(
    config: Config, layout: Layout, machine: Machine, *, messages: int
) -> Transfer:
    """Activations and their gradients that a rank sends to other stages."""
    size = float(messages * message_bytes(config))
    bandwidth, latency, far = group_link(layout, machine, "pp")
    return Transfer("pipeline", size, size / bandwidth + messages * latency, far)
