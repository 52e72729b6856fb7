"""Mixtral: experts in every layer, called w1, w3 and w2."""

from typing import Any

from hp_train.config import ModelConfig
from hp_train.hugging_face.family import Family, Json, Settings, common, head_dim
from hp_train.hugging_face.rope import read_rope, write_rope


def _read(values: Json) -> dict[str, Any]:
    settings = Settings(values)
    settings.require("router_jitter_noise", 0, 0.0)
    return {
        **common(settings),
        **read_rope(settings, theta=1e6),
        "head_dim": head_dim(settings),
        "sliding_window": settings.get("sliding_window", 0),
        "num_experts": settings.need("num_local_experts"),
        "top_k": settings.need("num_experts_per_tok"),
        "expert_hidden": settings.need("intermediate_size"),
        "balance_coefficient": float(settings.get("router_aux_loss_coef", 0.001)),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_rope(model),
        "head_dim": model.head_dim or model.dim // model.num_heads,
        "sliding_window": model.sliding_window or None,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.top_k,
        "intermediate_size": model.expert_hidden,
        "router_aux_loss_coef": model.balance_coefficient,
        "router_jitter_noise": 0.0,
    }


FAMILY = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=_read,
    write=_write,
    layer_names={"moe.router": "block_sparse_moe.gate"},
    experts="block_sparse_moe.experts",
    projections=("w1", "w3", "w2"),
)
