"""Llama 2 and 3, and Mixtral, which is Llama with experts in every layer, called w1, w3 and w2."""

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


def _read_llama(settings: Settings) -> Keys:
    settings.require("mlp_bias", False)
    return {
        **common(settings),
        **read_rope(settings),
        "head_dim": head_dim(settings),
        "dense_hidden": settings.count("intermediate_size"),
        "attention_bias": settings.flag("attention_bias"),
    }


def _write_llama(model: ModelConfig) -> Keys:
    return {
        **write_rope(model),
        "head_dim": model.head_dim or model.dim // model.num_heads,
        "intermediate_size": model.dense_hidden,
        "attention_bias": model.attention_bias,
        "mlp_bias": False,
    }


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=_read_llama,
    write=_write_llama,
    defaults=COMMON
    | {
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "head_dim": None,
        "attention_bias": False,
    },
)


def _read_mixtral(settings: Settings) -> Keys:
    settings.require("router_jitter_noise", 0.0)
    return {
        **common(settings),
        **read_rope(settings),
        "head_dim": head_dim(settings),
        "sliding_window": settings.count("sliding_window", null=0),
        "num_experts": num_experts(settings, settings.either("num_local_experts", "num_experts")),
        "top_k": settings.count("num_experts_per_tok"),
        "expert_hidden": settings.count("intermediate_size"),
        "balance_coefficient": settings.number("router_aux_loss_coef"),
    }


def _write_mixtral(model: ModelConfig) -> Keys:
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


MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    read=_read_mixtral,
    write=_write_mixtral,
    renamed={"mlp": "block_sparse_moe"},
    projections=("w1", "w3", "w2"),
    defaults=COMMON
    | {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": None,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
)
