"""Qwen3, dense and with experts: a norm on every query and key head."""

from hp_trainer.config import ModelConfig
from hp_transformers.families.family import (
    COMMON,
    Family,
    Keys,
    Settings,
    common,
    head_dim,
    num_experts,
)
from hp_transformers.families.rope import read_rope, write_rope


def _read_dense(settings: Settings) -> Keys:
    settings.require("use_sliding_window", False)
    return {
        **common(settings),
        **read_rope(settings),
        "head_dim": head_dim(settings),
        "dense_hidden": settings.count("intermediate_size"),
        "attention_bias": settings.flag("attention_bias"),
        "qk_norm": True,
    }


def _read_moe(settings: Settings) -> Keys:
    settings.require("decoder_sparse_step", 1)
    dense = settings.raw("mlp_only_layers", null=[])
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise settings.refusal("mlp_only_layers", dense, "a list of the first layers")
    return {
        **_read_dense(settings),
        "num_dense_layers": len(dense),
        "num_experts": num_experts(settings, settings.either("num_experts", "num_local_experts")),
        "top_k": settings.count("num_experts_per_tok"),
        "expert_hidden": settings.count("moe_intermediate_size"),
        "router_normalize": settings.flag("norm_topk_prob"),
        "balance_coefficient": settings.number("router_aux_loss_coef"),
    }


def _write_dense(model: ModelConfig) -> Keys:
    return {
        **write_rope(model),
        "head_dim": model.head_dim or model.dim // model.num_heads,
        "intermediate_size": model.dense_hidden,
        "attention_bias": model.attention_bias,
        "use_sliding_window": False,
    }


def _write_moe(model: ModelConfig) -> Keys:
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


_DEFAULTS = COMMON | {"max_position_embeddings": 32768, "attention_bias": False}

DENSE = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read_dense,
    write=_write_dense,
    defaults=_DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
)
MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read_moe,
    write=_write_moe,
    defaults=_DEFAULTS
    | {
        "num_key_value_heads": 4,
        "head_dim": None,
        "mlp_only_layers": None,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
)
