"""Make a config small without changing what divides what. No torch."""

import math
from collections.abc import Sequence

from hp_base.errors import ConfigError
from hp_trainer.config import Config, rules
from hp_trainer.config.options import with_keys
from hp_trainer.layout.schedules import count_stages

_HEAD_DIM, _HIDDEN, _SEQ_LEN = 8, 8, 16


def shrink(configs: Sequence[Config]) -> list[Config]:
    """Make configs of one model small enough to be run in a moment, each in its own layout.

    Widths become the smallest multiple of the mesh axes that split them, or as much more than that
    as before. As many query heads share key and value heads as before, up to two; layers are dealt
    out over the stages, and microbatches over the ranks of a pipeline, with the same remainder; a
    pipeline has at least two microbatches per rank; there are as many tokens as the tokenizer has.
    A model of `model.transformers` keeps its shape, which its folder says.

    Args:
        configs: Configs with the same model and batch.

    Raises:
        ConfigError: When the small config breaks a rule that the large one does not.
    """
    splits = math.lcm(*(n for c in configs for n in (*c.mesh.tp_sizes, c.mesh.cp, c.mesh.etp)))
    dealt = math.lcm(*(n for config in configs for n in config.mesh.ep_sizes))
    stages = math.lcm(*(count_stages(config) for config in configs))
    unit = math.lcm(*(config.batch_unit for config in configs))
    model, data, train = configs[0].model, configs[0].data, configs[0].train
    kv_heads = splits * (2 if splits == 1 and model.num_kv_heads > 1 else 1)
    sharing = min(2, model.num_heads // model.num_kv_heads)
    cuts = [tp * config.mesh.cp for config in configs for tp in config.mesh.tp_sizes]
    kv_heads *= _missing(kv_heads * sharing, [cut for cut in cuts if model.num_heads % cut == 0])
    heads = kv_heads * sharing
    top_k = min(model.top_k, 2)
    num_experts = dealt * math.ceil(max(top_k + 1, 4) / dealt) if model.num_experts else 0
    uneven = any(config.pipeline.stage_layers for config in configs)
    layers = stages + (model.num_layers % stages or uneven)
    ranks = math.lcm(*(config.mesh.pp for config in configs))
    at_least = ranks * math.ceil(max(2 * config.mesh.pp for config in configs) / ranks)
    rounds = at_least + train.global_batch_size // unit % ranks
    seq_len = math.lcm(_SEQ_LEN, 2 * splits**2) + data.seq_len % (2 * splits**2)
    small = {
        "model.num_heads": heads,
        "model.num_kv_heads": kv_heads,
        "model.head_dim": _HEAD_DIM,
        "model.dim": _HEAD_DIM * max(heads, 2),
        "model.dense_hidden": _HIDDEN * splits + model.dense_hidden % splits,
        "model.expert_hidden": _HIDDEN * splits,
        "model.num_experts": num_experts,
        "model.top_k": top_k,
        "model.num_expert_groups": min(model.num_expert_groups, 2),
        "model.num_limited_groups": min(model.num_limited_groups, 1),
        "model.q_lora_rank": _even_or_odd(model.q_lora_rank),
        "model.kv_lora_rank": _even_or_odd(model.kv_lora_rank),
        "model.nope_head_dim": _even_or_odd(model.nope_head_dim),
        "model.rope_head_dim": min(model.rope_head_dim, _HEAD_DIM),
        "model.v_head_dim": _even_or_odd(model.v_head_dim),
        "model.sliding_window": min(model.sliding_window, _HEAD_DIM),
        "model.vocab_size": 0,
        "model.num_layers": max(2, layers),
        "model.num_dense_layers": min(model.num_dense_layers, 1),
        "data.seq_len": min(data.seq_len, seq_len),
        "train.global_batch_size": min(train.global_batch_size, unit * rounds),
    }
    if model.transformers:  # whose folder says its shape
        small = {key: value for key, value in small.items() if not key.startswith("model.")}
    else:
        small_layers = [_fewer_layers(config, max(2, layers)) for config in configs]
        configs = list(map(with_keys, configs, small_layers))
    found = [with_keys(config, small) for config in configs]
    for config in found:
        try:
            rules.check(config)
        except ConfigError as error:
            raise ConfigError(f"the config cannot be shrunk: {error}") from None
    return found


def _missing(number: int, divisors: Sequence[int]) -> int:
    """Return the least factor with which a number is a multiple of all divisors."""
    all_of_them = math.lcm(*divisors)
    return all_of_them // math.gcd(number, all_of_them)


def _even_or_odd(width: int) -> int:
    """Return a small width that is even, or odd, as the given one."""
    return min(width, _HIDDEN + width % 2)


def _fewer_layers(config: Config, num_layers: int) -> dict[str, object]:
    """Return one layer for each stage, and the rest for the largest, where a config has sizes."""
    sizes = config.pipeline.stage_layers
    fewer = [1] * len(sizes)
    if sizes:
        fewer[sizes.index(max(sizes))] += num_layers - len(sizes)
    return {"pipeline.stage_layers": tuple(fewer)}
