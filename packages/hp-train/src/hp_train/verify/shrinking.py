"""Make a config small without changing what divides what. No torch."""

import math
from collections.abc import Sequence

from hp_train import rules
from hp_train.config import Config
from hp_train.errors import ConfigError
from hp_train.space import with_keys

_HEAD_DIM, _HIDDEN, _SEQ_LEN = 8, 8, 16


def shrink(configs: Sequence[Config]) -> list[Config]:
    """Make configs of one model small enough to be run in a moment, each in its own layout.

    Widths become the smallest multiple of every mesh axis that splits something of the model. As many key and value heads share a
    query head as before, up to two; layers are dealt out over the stages with the same remainder;
    a pipeline has at least two microbatches per rank.

    Args:
        configs: With the same model and batch.

    Raises:
        ConfigError: When the small config breaks a rule that the large one does not.
    """
    mesh = math.lcm(*(size for config in configs for size in _mesh_sizes(config)))
    stages = math.lcm(*(_num_stages(config) for config in configs))
    unit = math.lcm(*(c.world_size // c.mesh.pp * c.train.microbatch_size for c in configs))
    model, data, train = configs[0].model, configs[0].data, configs[0].train
    kv_heads = mesh * (2 if mesh == 1 and model.num_kv_heads > 1 else 1)
    heads = kv_heads * min(2, model.num_heads // model.num_kv_heads)
    top_k = min(model.top_k, 2)
    layers = stages + model.num_layers % stages
    rounds = max(2 * config.mesh.pp for config in configs)
    small = {
        "model.num_heads": heads,
        "model.num_kv_heads": kv_heads,
        "model.head_dim": _HEAD_DIM,
        "model.dim": _HEAD_DIM * max(heads, 2),
        "model.dense_hidden": _HIDDEN * mesh,
        "model.expert_hidden": _HIDDEN * mesh,
        "model.num_experts": mesh * math.ceil(max(top_k + 1, 4) / mesh),
        "model.top_k": top_k,
        "model.num_layers": max(2, layers),
        "model.num_dense_layers": min(model.num_dense_layers, 1),
        "data.seq_len": min(data.seq_len, math.lcm(_SEQ_LEN, mesh)),
        "train.global_batch_size": min(train.global_batch_size, unit * rounds),
    }
    found = [with_keys(config, small) for config in configs]
    for config in found:
        try:
            rules.check(config)
        except ConfigError as error:
            raise ConfigError(f"the config cannot be shrunk: {error}") from None
    return found


def _mesh_sizes(config: Config) -> list[int]:
    mesh = config.mesh
    return [int(getattr(mesh, name)) for name in mesh.__struct_fields__ if name[:2] not in ("pp", "dp")]


def _num_stages(config: Config) -> int:
    return config.mesh.pp * config.pipeline.stages_per_rank
