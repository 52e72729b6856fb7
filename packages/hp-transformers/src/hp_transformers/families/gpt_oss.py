"""gpt-oss: attention sinks, a window in every other layer, biases everywhere, clamped experts."""

from hp_trainer.config import MOST_LAYERS, ModelConfig
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

_EVERY = 2
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _layer_types(num_layers: int) -> list[str]:
    return [
        "full_attention" if (i + 1) % _EVERY == 0 else "sliding_attention"
        for i in range(num_layers)
    ]


def _read(settings: Settings) -> Keys:
    expected = _layer_types(settings.count("num_hidden_layers", most=MOST_LAYERS))
    if settings.raw("layer_types", null=expected) != expected:
        raise settings.refusal(
            "layer_types", settings.raw("layer_types"), "sliding and full attention in turns"
        )
    return {
        **common(settings),
        **read_rope(settings, absent=_ROPE),
        "head_dim": head_dim(settings),
        "attention_bias": settings.flag("attention_bias"),
        "attention_sinks": True,
        "sliding_window": settings.count("sliding_window"),
        "full_attention_every": _EVERY,
        "num_experts": num_experts(settings, settings.either("num_local_experts", "num_experts")),
        "top_k": settings.count(settings.either("num_experts_per_tok", "experts_per_token")),
        "expert_hidden": settings.count("intermediate_size"),
        "expert_activation": "clamped_swiglu",
        "swiglu_limit": settings.positive("swiglu_limit"),
        "swiglu_alpha": settings.positive("swiglu_alpha"),
        "expert_bias": True,
        "router_bias": True,
        "balance_coefficient": settings.number("router_aux_loss_coef"),
    }


def _write(model: ModelConfig) -> Keys:
    return {
        **write_rope(model, is_written=True),
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
    renamed={"mlp.gate": "mlp.router"},
    stacking="interleaved",
    defaults=COMMON
    | {
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "layer_types": None,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
        "router_aux_loss_coef": 0.001,
    },
)
