"""The families that `config.json` is read and written for, each with its names and defaults.

- Llama 2 and 3;
- Qwen3, dense and with experts: a norm on every query and key head;
- Mixtral, which is Llama with experts in every layer, called w1, w3 and w2;
- DeepSeek-V3: latent attention, sigmoid routing in groups, multi-token prediction;
- gpt-oss: attention sinks, a window in every other layer, biases everywhere, clamped experts.
"""

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


def _read_qwen3(settings: Settings) -> Keys:
    settings.require("use_sliding_window", False)
    return {
        **common(settings),
        **read_rope(settings),
        "head_dim": head_dim(settings),
        "dense_hidden": settings.count("intermediate_size"),
        "attention_bias": settings.flag("attention_bias"),
        "qk_norm": True,
    }


def _read_qwen3_moe(settings: Settings) -> Keys:
    settings.require("decoder_sparse_step", 1)
    dense = settings.raw("mlp_only_layers", null=[])
    if not isinstance(dense, list) or dense != list(range(len(dense))):
        raise settings.refusal("mlp_only_layers", dense, "a list of the first layers")
    return {
        **_read_qwen3(settings),
        "num_dense_layers": len(dense),
        "num_experts": num_experts(settings, settings.either("num_experts", "num_local_experts")),
        "top_k": settings.count("num_experts_per_tok"),
        "expert_hidden": settings.count("moe_intermediate_size"),
        "router_normalize": settings.flag("norm_topk_prob"),
        "balance_coefficient": settings.number("router_aux_loss_coef"),
    }


def _write_qwen3(model: ModelConfig) -> Keys:
    return {
        **write_rope(model),
        "head_dim": model.head_dim or model.dim // model.num_heads,
        "intermediate_size": model.dense_hidden,
        "attention_bias": model.attention_bias,
        "use_sliding_window": False,
    }


def _write_qwen3_moe(model: ModelConfig) -> Keys:
    return {
        **_write_qwen3(model),
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.top_k,
        "moe_intermediate_size": model.expert_hidden,
        "norm_topk_prob": model.router_normalize,
        "router_aux_loss_coef": model.balance_coefficient,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(range(model.num_dense_layers)),
    }


_QWEN3 = COMMON | {"max_position_embeddings": 32768, "attention_bias": False}

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    read=_read_qwen3,
    write=_write_qwen3,
    defaults=_QWEN3 | {"num_key_value_heads": 32, "head_dim": 128},
)
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
    defaults=_QWEN3
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


def _read_deepseek(settings: Settings) -> Keys:
    settings.require("attention_bias", False)
    settings.require("scoring_func", "sigmoid")
    settings.require("topk_method", "noaux_tc")
    settings.require("moe_layer_freq", 1)
    settings.require("num_key_value_heads", settings.count("num_attention_heads"))
    ahead = settings.either("num_nextn_predict_layers", "num_mtp_layers")
    return {
        **common(settings),
        **read_rope(settings),
        "attention": "mla",
        "rope_pairs": "neighbours" if settings.flag("rope_interleave") else "halves",
        "q_lora_rank": settings.count("q_lora_rank", null=0),
        "kv_lora_rank": settings.count("kv_lora_rank"),
        "nope_head_dim": settings.count("qk_nope_head_dim"),
        "rope_head_dim": settings.count("qk_rope_head_dim"),
        "v_head_dim": settings.count("v_head_dim"),
        "num_dense_layers": settings.count("first_k_dense_replace", least=0),
        "dense_hidden": settings.count("intermediate_size"),
        "expert_hidden": settings.count("moe_intermediate_size"),
        "num_experts": num_experts(
            settings, settings.either("n_routed_experts", "num_local_experts")
        ),
        "top_k": settings.count("num_experts_per_tok"),
        "num_shared_experts": settings.count("n_shared_experts", least=0),
        "router_score": "sigmoid",
        "router_normalize": settings.flag("norm_topk_prob"),
        "router_scale": settings.positive("routed_scaling_factor"),
        "num_expert_groups": settings.count("n_group"),
        "num_limited_groups": settings.count("topk_group"),
        "correction_bias": True,
        "balance_coefficient": settings.number("aux_loss_alpha"),
        "num_mtp_modules": settings.count(ahead, least=0, most=MOST_LAYERS),
    }


def _write_deepseek(model: ModelConfig) -> Keys:
    return {
        **write_rope(model),
        "rope_interleave": model.rope_pairs == "neighbours",
        "q_lora_rank": model.q_lora_rank or None,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_nope_head_dim": model.nope_head_dim,
        "qk_rope_head_dim": model.rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "num_key_value_heads": model.num_heads,
        "first_k_dense_replace": model.num_dense_layers,
        "intermediate_size": model.dense_hidden,
        "moe_intermediate_size": model.expert_hidden,
        "n_routed_experts": model.num_experts,
        "num_experts_per_tok": model.top_k,
        "n_shared_experts": model.num_shared_experts,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": model.router_normalize,
        "routed_scaling_factor": model.router_scale,
        "n_group": model.num_expert_groups,
        "topk_group": model.num_limited_groups,
        "aux_loss_alpha": model.balance_coefficient,
        "num_nextn_predict_layers": model.num_mtp_modules,
        "moe_layer_freq": 1,
        "attention_bias": False,
    }


DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read_deepseek,
    write=_write_deepseek,
    renamed={"mlp.gate.correction_bias": "mlp.gate.e_score_correction_bias"},
    # Width of heads is that of the parts; `aux_loss_alpha` is of published files, not of the class.
    defaults=COMMON
    | {
        "max_position_embeddings": 4096,
        "num_key_value_heads": None,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "num_nextn_predict_layers": 1,
        "aux_loss_alpha": 0.0001,
    },
)


_GPT_OSS_EVERY = 2
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _layer_types(num_layers: int) -> list[str]:
    return [
        "full_attention" if (i + 1) % _GPT_OSS_EVERY == 0 else "sliding_attention"
        for i in range(num_layers)
    ]


def _read_gpt_oss(settings: Settings) -> Keys:
    expected = _layer_types(settings.count("num_hidden_layers", most=MOST_LAYERS))
    if settings.raw("layer_types", null=expected) != expected:
        raise settings.refusal(
            "layer_types", settings.raw("layer_types"), "sliding and full attention in turns"
        )
    return {
        **common(settings),
        **read_rope(settings, absent=_GPT_OSS_ROPE),
        "head_dim": head_dim(settings),
        "attention_bias": settings.flag("attention_bias"),
        "attention_sinks": True,
        "sliding_window": settings.count("sliding_window"),
        "full_attention_every": _GPT_OSS_EVERY,
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


def _write_gpt_oss(model: ModelConfig) -> Keys:
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


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    read=_read_gpt_oss,
    write=_write_gpt_oss,
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


FAMILIES = {
    family.model_type: family for family in (LLAMA, QWEN3, QWEN3_MOE, MIXTRAL, DEEPSEEK_V3, GPT_OSS)
}
"""By the `model_type` of `config.json`."""
