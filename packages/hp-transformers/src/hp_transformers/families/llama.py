"""Llama 2 and 3, dense."""

from typing import Any

from hp_trainer.config import ModelConfig
from hp_transformers.families.family import COMMON, Family, Settings, common, head_dim
from hp_transformers.families.rope import read_rope, write_rope


def _read(settings: Settings) -> dict[str, Any]:
    settings.require("mlp_bias", False)
    return {
        **common(settings),
        **read_rope(settings),
        "head_dim": head_dim(settings),
        "dense_hidden": settings.count("intermediate_size"),
        "attention_bias": settings.flag("attention_bias"),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_rope(model),
        "head_dim": model.head_dim or model.dim // model.num_heads,
        "intermediate_size": model.dense_hidden,
        "attention_bias": model.attention_bias,
        "mlp_bias": False,
    }


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    read=_read,
    write=_write,
    defaults=COMMON
    | {
        "max_position_embeddings": 2048,
        "num_key_value_heads": None,
        "head_dim": None,
        "attention_bias": False,
    },
)
