"""gpt-oss: attention sinks, a window in every other layer, biases everywhere, clamped experts."""

from typing import Any

from hp_train.config import ModelConfig
from hp_train.errors import ConfigError
from hp_train.hugging_face.family import Family, Json, Settings, common, head_dim
from hp_train.hugging_face.rope import read_rope, write_rope

_EVERY = 2


def _layer_types(num_layers: int) -> list[str]:
    return [
        "full_attention" if (i + 1) % _EVERY == 0 else "sliding_attention"
        for i in range(num_layers)
    ]


def _read(values: Json) -> dict[str, Any]:
    settings = Settings(values)
    found = common(settings)
    expected = _layer_types(found["num_layers"])
    if settings.get("layer_types", expected) != expected:
        raise ConfigError("config.json: layer_types must be sliding and full attention in turns")
    return {
        **found,
        **read_rope(settings, theta=150000.0),
        "head_dim": head_dim(settings),
        "attention_bias": bool(settings.get("attention_bias", True)),
        "attention_sinks": True,
        "sliding_window": settings.need("sliding_window"),
        "full_attention_every": _EVERY,
        "num_experts": settings.need("num_local_experts"),
        "top_k": settings.get("num_experts_per_tok") or settings.need("experts_per_token"),
        "expert_hidden": settings.need("intermediate_size"),
        "expert_activation": "clamped_swiglu",
        "swiglu_limit": float(settings.get("swiglu_limit", 7.0)),
        "swiglu_alpha": float(settings.get("swiglu_alpha", 1.702)),
        "expert_bias": True,
        "router_bias": True,
        "balance_coefficient": float(settings.get("router_aux_loss_coef", 0.001)),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
    return {
        **write_rope(model),
        "head_dim": model.head_dim or model.dim // model.num_heads,
        "attention_bias": model.attention_bias,
        "sliding_window": model.sliding_window,
        "layer_types": _layer_types(model.num_layers),
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.top_k,
        "experts_per_token": model.top_k,
        "intermediate_size": model.expert_hidden,
        "swiglu_limit": model.swiglu_limit,
        "swiglu_alpha": model.swiglu_alpha,
        "router_aux_loss_coef": model.balance_coefficient,
    }


FAMILY = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    read=_read,
    write=_write,
    layer_names={"moe.router": "mlp.router", "attention.core.sinks": "self_attn.sinks"},
    stacking="interleaved",
)
