"""Costs of stages, learned by a run of the model without memory (`hp_plan.costs`).

Kernels are priced one by one, as `hp plan` does: attention proper by pairs of a query and a key,
all others by tokens. The host's seconds to launch a stage are its minimum.
"""

from collections import Counter

from msgspec.structs import replace

from hp_base.dtypes import BYTES
from hp_packing.costs import Seconds, StageCosts, StepCosts
from hp_plan.costs import modules
from hp_plan.costs.machine import Machine
from hp_plan.costs.memory import padding
from hp_plan.costs.work import Kernels, Work
from hp_plan.price.prices import aligned, exchanges
from hp_plan.price.rates import Routed, rates_of
from hp_plan.price.traffic import edge_link
from hp_trainer.config import Config, ModelConfig
from hp_trainer.layout.ranks import Layout, StageLayout
from hp_trainer.layout.schedules import count_stages, layers_of_stages, placement

_MANY = 1 << 16
"""Tokens at which kernels take as long as their products or bytes."""
_NO_TIME = 1e30
"""Bytes per second of a memory that takes no time."""
_BACKWARD = 2.0
"""Backward of attention proper, divided by its forward, where it is priced as products."""


def learned_costs(config: Config, machine: Machine, *, vocab_size: int) -> StepCosts:
    """Return the costs of the stages of a layout on a machine.

    Args:
        config: Configuration of the layout.
        machine: Rates and links of the machine.
        vocab_size: Tokens of the vocabulary, the rows of the embedding.
    """
    model, num = config.model, count_stages(config)
    works = modules.stages(config, vocab_size, num_stages=num)
    kernels = modules.kernels(config, vocab_size, num_stages=num)
    layout = Layout.of(config.mesh)
    ranks = [aligned(stage, machine.node_size) for stage in layout.stages]
    places = [ranks[rank] for rank in placement(config.pipeline, num_ranks=layout.pp)]
    known: dict[object, StageCosts] = {}
    stages = []
    for work, mine, place, layers in zip(
        works, kernels, places, layers_of_stages(config), strict=True
    ):
        key = id(work), place, len(layers)
        if key not in known:
            seen = sum(_seen(model, layer, config.data.seq_len) for layer in layers) / len(layers)
            known[key] = _stage(config, machine, work, mine, place, seen=seen, layers=len(layers))
        stages.append(known[key])
    message = 0.0
    if layout.pp > 1:
        link = edge_link(config, layout, machine, source=0, destination=1)
        message = link.bytes / link.link.bandwidth / config.microbatch_tokens
    return StepCosts(tuple(stages), node=machine.node_size, message=message, windows=model.windows)


def step_layout(config: Config, *, stages: int, ranks: int) -> Config:
    """Return a config with a mesh of stages of a number of ranks, which share documents.

    Experts are shared by `mesh.ep` ranks, or if that is 1, by as many ranks as divide them.

    Args:
        config: Config that gives everything but the mesh.
        stages: Number of stages of the pipeline, one on each rank.
        ranks: Number of ranks of a stage.
    """
    model, ep = config.model, config.mesh.ep
    if model.has_experts and (ep == 1 or ranks % ep):
        ep = max(n for n in range(1, ranks + 1) if ranks % n == model.num_experts % n == 0)
    mesh = replace(
        config.mesh,
        pp=stages,
        dp_replicate=1,
        dp_shard=ranks,
        cp=1,
        tp=1,
        ep=ep if model.has_experts else 1,
        etp=1,
        stage_tp=(),
        stage_ep=(),
    )
    pipeline = replace(config.pipeline, schedule="1f1b", stages_per_rank=1)
    return replace(config, mesh=mesh, pipeline=pipeline)


def _seen(model: ModelConfig, layer: int, seq_len: int) -> float:
    """Return the positions that a query sees on average in a layer, as `seen_positions` does."""
    return float(min(model.sliding_window, seq_len)) if model.has_window(layer) else seq_len / 2


def _stage(
    config: Config,
    machine: Machine,
    work: Work,
    kernels: Kernels,
    place: StageLayout,
    *,
    seen: float,
    layers: int,
) -> StageCosts:
    model, size, tp = config.model, BYTES[config.train.dtype], place.tp
    rate = machine.flops
    again = work.again.scores if work.again else 0.0
    flops = Seconds(work.scores, _BACKWARD * work.scores + again)
    if machine.launch_seconds:
        token, microbatch, least = _of_kernels(config, machine, kernels, place)
        proper = [
            sum(times * kernel.flops for kernel, times in way.items() if kernel.kind == "attention")
            for way in kernels
        ]
        if any(proper):
            rate = machine.attention_flops or rate
            flops = Seconds(proper[0], proper[1] + proper[2])
        else:  # in some dtypes it is products like others
            token = Seconds(*(t - f / tp / rate for t, f in zip(token, flops, strict=True)))
    else:
        token, microbatch, least = _of_products(machine, work, tp, layers)
    for backward in (False, True):
        waits, many = (
            sum(
                each.seconds
                for each in exchanges(
                    config, [work], place, machine, backward=backward, tokens=tokens
                )
                if each.purpose != "context"  # documents are dealt out by themselves
            )
            for tokens in (0, _MANY)
        )
        added = (many - waits) / _MANY
        token += Seconds(0.0, added) if backward else Seconds(added)
        microbatch += Seconds(0.0, waits) if backward else Seconds(waits)
    kv = model.num_heads if model.attention == "mla" else model.num_kv_heads
    exchanged = work.heads * size / tp
    keys = exchanged * kv / (model.num_heads + kv)
    return StageCosts(
        token=token,
        pair=Seconds(*(each / tp / seen / rate for each in flops)),
        microbatch=microbatch,
        least=least,
        key=keys / machine.bandwidth,
        far_key=keys / machine.node_bandwidth,
        heads=exchanged / machine.bandwidth,
        kept=work.kept_bytes(1, tp=tp, padded=padding(config, place)),
    )


def _of_kernels(
    config: Config, machine: Machine, kernels: Kernels, place: StageLayout
) -> tuple[Seconds, Seconds, Seconds]:
    """Price kernels without attention proper: seconds per token, per microbatch, and minimum."""
    routed, is_compiled = Routed(padded=padding(config, place)), config.train.compile != "none"
    other = Kernels(
        *(Counter({k: n for k, n in way.items() if k.kind != "attention"}) for way in kernels)
    )

    def seconds(machine: Machine, which: Kernels, tokens: float) -> Seconds:
        rates = rates_of(machine, is_compiled=is_compiled, slowed=1.0)
        found = rates.compute(which, tokens / place.tp, place, routed=routed)
        return Seconds(found.forward, found.input_grad + found.again, found.weight_grad)

    few, many = (seconds(machine, other, tokens) for tokens in (_MANY, 2 * _MANY))
    token = Seconds(*((b - a) / _MANY for a, b in zip(few, many, strict=True)))
    forward, input_grad, weight_grad = (
        max(0.0, a - _MANY * each) for a, each in zip(few, token, strict=True)
    )
    # The bytes that backward moves whatever the tokens are gradients of weights.
    microbatch = Seconds(forward, 0.0, input_grad + weight_grad)
    host = machine.with_values(memory_bandwidth=_NO_TIME)
    return token, microbatch, seconds(host, kernels, 0)


def _of_products(
    machine: Machine, work: Work, tp: int, layers: int
) -> tuple[Seconds, Seconds, Seconds]:
    """Price layers by operations and fixed seconds, with the same result as `_of_kernels`."""
    again = work.again.flops - work.again.scores if work.again else 0.0
    linear, repeated = ((f / machine.flops / tp) for f in (work.flops - work.scores, again))
    alone = layers * machine.layer_seconds
    return Seconds(linear, linear + repeated, linear), Seconds(alone, alone, alone), Seconds()
