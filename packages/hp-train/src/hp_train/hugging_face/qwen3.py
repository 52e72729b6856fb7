"""Qwen3, dense and with experts: a norm on every query and key head."""

from typing import Any

from hp_train.config import ModelConfig
from hp_train.errors import ConfigError
from hp_train.hugging_face.family import Family, Json, Settings, common, head_dim
from hp_train.hugging_face.rope import read_rope, write_rope
from hp_train.schema import shown


def _read_dense(values: Json) -> dict[str, Any]:
    settings = Settings(values)
    settings.require("use_sliding_window", False)
    return {
        **common(settings),
        **read_rope(settings),
        "head_dim": head_dim(settings),
        "dense_hidden": settings.need("intermediate_size"),
        "attention_bias": bool(settings.get("attention_bias", False)),
        "qk_norm": True,
    }


def _read_moe(values: Json) -> dict[str, Any]:
    settings = Settings(values)
    settings.require("decoder_sparse_step", 1)
    dense = settings.get("mlp_only_layers", [])
    if dense != list(range(len(dense))):
        raise ConfigError(f"config.json: mlp_only_layers ({shown(dense)}) must be the first layers")
    return {
        **_read_dense(values),
        "num_dense_layers": len(dense),
        "num_experts": settings.get("num_experts") or settings.need("num_local_experts"),
        "top_k": settings.need("num_experts_per_tok"),
        "expert_hidden": settings.need("moe_intermediate_size"),
        "router_normalize": bool(settings.get("norm_topk_prob", False)),
        "balance_coefficient": float(settings.get("router_aux_loss_coef", 0.001)),
    }


def _write_dense(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_rope(model),
        "head_dim": model.head_dim or model.dim // model.num_heads,
        "intermediate_size": model.dense_hidden,
        "attention_bias": model.attention_bias,
        "use_sliding_window": False,
    }


def _write_moe(model: ModelConfig) -> dict[str, Any]:
    return {
        **_write_dense(model),
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.top_k,
        "moe_intermediate_size": model.expert_hidden,
        "norm_topk_prob": model.router_normalize,
        "router_aux_loss_coef": model.balance_coefficient,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(model.num_dense_layers)),
    }


DENSE = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read_dense,
    write=_write_dense,
)
MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read_moe,
    write=_write_moe,
)
