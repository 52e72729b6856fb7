"""Bytes that a rank sends in a step, by purpose, and the seconds that links take. No torch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from hp_base.dtypes import BYTES
from hp_plan.costs.dispatch import row_costs
from hp_plan.costs.machine import Link, Machine
from hp_plan.costs.memory import (
    local_elements,
    message_bytes,
    num_units,
    padding,
    parameter_bytes,
    sharded_bytes,
    stage_elements,
    table_of,
)
from hp_plan.costs.work import Work
from hp_trainer.config import Config, ModelConfig
from hp_trainer.layout.ranks import Axis, Layout, StageLayout


@dataclass(frozen=True, slots=True)
class Transfer:
    """The bytes that a rank sends in a step for one purpose.

    Attributes:
        purpose: "pipeline", "experts", "tensor", "context", "gradients" or "parameters".
        bytes: Bytes that are sent.
        seconds: Seconds for which the link is busy.
        between_nodes: Whether the bytes leave the node.
    """

    purpose: str
    bytes: float
    seconds: float
    between_nodes: bool


@dataclass(frozen=True, slots=True)
class Spread:
    """The spread of a token's experts over ranks and nodes, and the way of rows there.

    Attributes:
        ranks: Mean number of ranks that have experts of a token; 0: that of even routing, with a
            row for each expert or each rank as hp-expert's dispatcher chooses.
        nodes: Mean number of nodes that have experts of a token, if one row goes to each node and
            is spread there; 0: a row goes to each rank, as in hp-expert.
        loads: Rows of the busiest rank divided by the mean, for numbers of ranks that share
            experts; 1 for other numbers.
    """

    ranks: float = 0.0
    nodes: float = 0.0
    loads: tuple[tuple[int, float], ...] = ()

    def load(self, ep: int) -> float:
        """Return the rows of the busiest of `ep` ranks divided by the mean."""
        return dict(self.loads).get(ep, 1.0)


@dataclass(frozen=True, slots=True)
class ExpertExchanges:
    """The exchanges of a layer of experts.

    Attributes:
        inside: Bytes sent within the node for a token in forward, and as many in backward.
        between: Bytes sent to other nodes for a token in forward, and as many in backward.
        forward: Messages of a rank in forward.
        backward: Messages of a rank in backward.
    """

    inside: float
    between: float
    forward: int
    backward: int

    @property
    def bytes(self) -> float:
        """Return the bytes of a token in forward."""
        return self.inside + self.between


def expert_exchanges(
    config: Config, layout: StageLayout, *, node_size: int, spread: Spread = Spread()
) -> ExpertExchanges:
    """Return the exchanges of a layer of experts.

    The dispatcher chooses between a row per expert and a row per rank as hp-expert does; in buffers
    of a fixed size every rank sends the same number of rows to every other, whatever the routing.
    If the width of experts is cut, the ranks with its parts gather the rows that arrive, and sum
    their outputs on the way back.
    """
    padded = padding(config, layout) if config.mesh.ep_buffer else 0.0
    return _expert_exchanges(
        config.model, BYTES[config.train.dtype], layout, node_size, spread=spread, padded=padded
    )


@lru_cache(maxsize=4096)
def _expert_exchanges(
    model: ModelConfig,
    size: int,
    layout: StageLayout,
    node_size: int,
    *,
    spread: Spread,
    padded: float,
) -> ExpertExchanges:
    ep = layout.ep
    if ep * layout.etp == 1:
        return ExpertExchanges(0.0, 0.0, 0, 0)
    row_bytes = model.dim * size
    cost = row_costs(model.num_experts, model.top_k, row_bytes, max(4, size))[ep]
    pays = not padded and cost.pays
    # Of a token, there and back.
    rows = cost.rows if pays else model.top_k
    sent = (cost.deduplicated if pays else cost.plain) / 2
    if padded:
        sent *= padded
    elif spread.ranks:
        rows, sent = spread.ranks, spread.ranks / rows * sent
    # Ranks of the node that has fewest of a group, and whether parts of an expert lie in several.
    near = min(map(_near, _nodes(layout, node_size, "ep")))
    apart = any(_near(nodes) < layout.etp for nodes in _nodes(layout, node_size, "etp"))
    # Rows that stay on their rank are not sent.
    inside, between = sent * (near - 1) / ep, sent * (ep - near) / ep
    if spread.nodes and not padded:
        inside, between = sent * (near - 1) / near, sent / rows * spread.nodes * (ep - near) / ep
    gathered = 2 * rows * row_bytes * (layout.etp - 1)
    # Forward sends counts, rows and routing weights (and the experts of a row, if it may have
    # several), and returns outputs; backward sends no counts. Ranks that share an expert send one
    # message more.
    return ExpertExchanges(
        inside=inside + (0.0 if apart else gathered),
        between=between + (gathered if apart else 0.0),
        forward=(4 + pays) * (ep - 1) + 5 * (layout.etp - 1),
        backward=3 * (ep - 1) + 3 * (layout.etp - 1),
    )


def _nodes(layout: StageLayout, node_size: int, *axes: Axis) -> set[tuple[int, ...]]:
    """Return the nodes of the ranks of each group along some axes, each combination once."""
    return {tuple([rank // node_size for rank in ranks]) for ranks in layout.ranks(*axes)}


def _near(nodes: Sequence[int]) -> int:
    """Return the number of ranks of a group on the node with fewest of them."""
    return min(Counter(nodes).values())


@lru_cache(maxsize=4096)  # schedules, stages and batches of one mesh ask for the same
def group_link(layout: StageLayout, machine: Machine, *axes: Axis) -> Link:
    """Return the link of the slowest group along some axes."""
    return machine.link(layout.ranks(*axes))


def expert_transfer(
    config: Config,
    works: Sequence[Work],
    layout: StageLayout,
    machine: Machine,
    *,
    tokens: int,
    backward: bool,
    spread: Spread = Spread(),
) -> Transfer:
    """Return the dispatch and combine of tokens in the layers of some stages, in one direction.

    Transfers to other nodes overlap those within a node.
    """
    layers = sum(work.rows for work in works) / max(1, config.model.top_k)
    each = expert_exchanges(config, layout, node_size=machine.node_size, spread=spread)
    messages = layers * (each.backward if backward else each.forward)
    rows = layers * tokens * (1.0 if config.mesh.ep_buffer else spread.load(layout.ep))
    latency = group_link(layout, machine, "ep", "etp").latency
    busy = max(each.inside / machine.bandwidth, each.between / machine.node_bandwidth)
    seconds = rows * busy + messages * latency
    return Transfer("experts", rows * each.bytes, seconds, each.between > 0)


def activation_transfers(
    config: Config,
    works: Sequence[Work],
    layout: StageLayout,
    machine: Machine,
    *,
    tokens: int,
    backward: bool,
) -> list[Transfer]:
    """Return the exchanges of tensor- and context-parallel ranks for some tokens, in one direction.

    Tensor-parallel ranks gather positions in front of layers that are cut and sum behind them; the
    reverse in backward. Context-parallel ranks send q, k, v and the output to the ranks that have
    their heads; gathers of keys and values are priced the same. In forward alone both sum the loads
    of experts, and tensor-parallel ranks two numbers of each token's loss.

    Args:
        config: Configuration of the run.
        works: Modules of one rank.
        layout: Layout of the rank's stage.
        machine: Links of the machine.
        tokens: Number of tokens that attention sees on the rank.
        backward: Whether the direction is backward.
    """
    size = BYTES[config.train.dtype]
    cut, heads = sum(w.gathered + w.summed for w in works), sum(w.heads for w in works)
    layers = sum(w.attentions for w in works)
    losses, balances = (
        (0.0, 0.0)
        if backward
        else (sum(2 * w.losses for w in works), sum(w.balances for w in works))
    )
    sums = cut / config.model.dim + losses + balances
    # The last column: messages to each other rank.
    kinds: tuple[tuple[str, Axis, int, float, float], ...] = (
        ("tensor", "tp", layout.tp, cut, sums),
        ("context", "cp", layout.cp, heads / layout.tp, 4 * layers + balances),
    )
    found = []
    for purpose, axis, ranks, elements, messages in kinds:
        if ranks == 1:
            continue
        sent = (ranks - 1) / ranks * elements * size * tokens
        bandwidth, latency, far = group_link(layout, machine, axis)
        seconds = sent / bandwidth + messages * (ranks - 1) * latency
        found.append(Transfer(purpose, sent, seconds, far))
    return found


def gradient_transfers(
    config: Config, stages: Sequence[Work], layout: StageLayout, machine: Machine
) -> list[Transfer]:
    """Return the sums over replicas at the end of a step, 2 (n - 1) / n of a rank's gradients."""
    transfers = []
    tables = [table for stage in stages if (table := table_of(stage)) is not None]
    if config.model.tie_embeddings and config.mesh.pp > 1 and len(tables) == 1:
        # The other stage with the table is at the other end of the world.
        size = float(local_elements(tables[0], layout) * parameter_bytes(config))
        bandwidth, latency, far = machine.link([(0, config.world_size - 1)])
        transfers.append(Transfer("gradients", size, size / bandwidth + 2 * latency, far))
    kinds: tuple[tuple[bool, Axis, int], ...] = (
        (False, "dp_replicate", layout.dp_replicate),
        (True, "expert_replicate", layout.expert_replicate),
    )
    for is_expert, axis, copies in kinds:
        if copies == 1:
            continue
        elements = sum(stage_elements(stage, layout, is_expert=is_expert) for stage in stages)
        ring = _ring(layout, machine, axis)
        # Reduced and scattered, then gathered.
        size = 2 * (copies - 1) / copies * elements * parameter_bytes(config)
        transfers.append(
            Transfer("gradients", size, size * ring.per_byte + 2 * ring.wait, ring.is_far)
        )
    return transfers


def shard_transfer(
    config: Config,
    stage: Work,
    layout: StageLayout,
    machine: Machine,
    *,
    what: Literal["gathered", "reduced"],
) -> Transfer:
    """Return one gather of a stage's parameters, or one reduction of its gradients, by blocks.

    Ranks that are cores of one machine share memory: after they have waited for each other once, no
    block waits for a message.
    """
    size, seconds, far = 0.0, 0.0, False
    kinds: tuple[tuple[bool, tuple[Axis, ...], int], ...] = (
        (False, ("dp_shard", "cp"), layout.fsdp),
        (True, ("expert_shard",), layout.expert_shard),
    )
    for is_expert, axes, shards in kinds:
        if shards == 1:
            continue
        local = sharded_bytes(config, stage, layout, is_expert=is_expert)
        part = (shards - 1) * getattr(local, what)
        ring = _ring(layout, machine, *axes)
        size, far = size + part, far or ring.is_far
        num_waits = 1 if machine.cores else num_units(stage, is_expert=is_expert)
        seconds += part * ring.per_byte + num_waits * ring.wait
    return Transfer("parameters", size, seconds, far)


class _Ring(NamedTuple):
    """The price of a collective that sends the parts of all ranks of a group to each of them.

    Attributes:
        per_byte: Seconds for each byte that a rank receives.
        wait: Seconds of the latencies of messages.
        is_far: Whether the collective leaves the node.
    """

    per_byte: float
    wait: float
    is_far: bool


@lru_cache(maxsize=4096)
def _ring(layout: StageLayout, machine: Machine, *axes: Axis) -> _Ring:
    """Return the slowest group along some axes; ranks of a node share its incoming bytes."""
    slowest = _Ring(0.0, 0.0, is_far=False)
    for nodes in _nodes(layout, machine.node_size, *axes):
        per_node = Counter(nodes)
        far = len(per_node) > 1
        bandwidth, latency, _ = machine.link_of(between=far)
        if far:
            number, near = len(per_node), min(per_node.values())
            others = (number - 1) / number * len(nodes) / (len(nodes) - 1)
            between = others / near / machine.node_bandwidth
            bandwidth = 1 / max(between, 1 / machine.bandwidth)
        slowest = max(slowest, _Ring(1 / bandwidth, (len(nodes) - 1) * latency, far))
    return slowest


@dataclass(frozen=True, slots=True)
class EdgeLink:
    """The link of activations and gradients between two stages, of any number of ranks each.

    Attributes:
        bytes: Bytes on the busiest link, for one microbatch.
        messages: Number of messages that the busiest rank sends or receives for one microbatch.
        link: The slowest link.
    """

    bytes: int
    messages: int
    link: Link

    @property
    def seconds(self) -> float:
        """Return the seconds of one microbatch, in one direction."""
        return self.messages * self.link.latency + self.bytes / self.link.bandwidth


def edge_link(
    config: Config, layout: Layout, machine: Machine, *, source: int, destination: int
) -> EdgeLink:
    """Price the edge between two pipeline ranks.

    The tensor-parallel ranks of both have consecutive slices of the same positions; those whose
    slices overlap exchange the overlap.
    """
    ends = layout.stages[source], layout.stages[destination]
    messages, link = _meeting(*ends, machine)
    return EdgeLink(
        bytes=max(message_bytes(config, end) for end in ends), messages=messages, link=link
    )


@lru_cache(maxsize=1 << 14)  # schedules and batches of one mesh ask for the same
def _meeting(source: StageLayout, destination: StageLayout, machine: Machine) -> tuple[int, Link]:
    """Return the messages of the busiest rank of two stages for a microbatch, and their link."""
    ends = source, destination
    pairs = [
        (sender, receiver)
        for senders, receivers in zip(*(end.ranks("tp") for end in ends), strict=True)
        for i, sender in enumerate(senders)
        for j, receiver in enumerate(receivers)
        if i * len(receivers) < (j + 1) * len(senders)
        and j * len(senders) < (i + 1) * len(receivers)
    ]
    return max(Counter(rank for pair in pairs for rank in pair).values()), machine.link(pairs)


def pipeline_transfer(
    config: Config, layout: StageLayout, edges: Sequence[EdgeLink], *, num_microbatches: int
) -> Transfer:
    """Return the activations and gradients that a rank sends to other stages.

    Args:
        config: Configuration of the run.
        layout: Layout of the rank's stage.
        edges: Edges on which the rank sends, one for each stage and direction.
        num_microbatches: Number of microbatches in a step.
    """
    return Transfer(
        "pipeline",
        bytes=float(len(edges) * num_microbatches * message_bytes(config, layout)),
        seconds=num_microbatches * sum(edge.seconds for edge in edges),
        between_nodes=any(edge.link.between_nodes for edge in edges),
    )
