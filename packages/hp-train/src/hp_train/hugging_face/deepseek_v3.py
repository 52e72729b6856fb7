"""DeepSeek-V3: latent attention, sigmoid routing in groups, multi-token prediction."""

from typing import Any

from hp_train.config import ModelConfig
from hp_train.hugging_face.family import Family, Json, Settings, common
from hp_train.hugging_face.rope import read_rope, write_rope


def _read(values: Json) -> dict[str, Any]:
    settings = Settings(values)
    settings.require("attention_bias", False)
    settings.require("scoring_func", "sigmoid")
    settings.require("topk_method", "noaux_tc")
    settings.require("moe_layer_freq", 1)
    pairs = "neighbours" if settings.get("rope_interleave", True) else "halves"
    return {
        **common(settings),
        **read_rope(settings),
        "attention": "mla",
        "rope_pairs": pairs,
        "q_lora_rank": settings.get("q_lora_rank", 0),
        "kv_lora_rank": settings.need("kv_lora_rank"),
        "nope_head_dim": settings.need("qk_nope_head_dim"),
        "rope_head_dim": settings.need("qk_rope_head_dim"),
        "v_head_dim": settings.need("v_head_dim"),
        "num_dense_layers": settings.get("first_k_dense_replace", 0),
        "dense_hidden": settings.need("intermediate_size"),
        "expert_hidden": settings.need("moe_intermediate_size"),
        "num_experts": settings.get("n_routed_experts") or settings.need("num_local_experts"),
        "top_k": settings.need("num_experts_per_tok"),
        "num_shared_experts": settings.get("n_shared_experts", 0),
        "router_score": "sigmoid",
        "router_normalize": bool(settings.get("norm_topk_prob", True)),
        "router_scale": float(settings.get("routed_scaling_factor", 1.0)),
        "num_expert_groups": settings.get("n_group", 1),
        "num_limited_groups": settings.get("topk_group", 1),
        "correction_bias": True,
        "balance_coefficient": float(settings.get("aux_loss_alpha", 0.0001)),
        "num_mtp_modules": settings.get(
            "num_nextn_predict_layers", settings.get("num_mtp_layers", 0)
        ),
    }


def _write(model: ModelConfig) -> dict[str, Any]:
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


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    read=_read,
    write=_write,
    layer_names={
        "attention.wq_a": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.wq_b": "self_attn.q_b_proj",
        "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
        "moe.router.correction_bias": "mlp.gate.e_score_correction_bias",
        "moe.shared.w1": "mlp.shared_experts.gate_proj",
        "moe.shared.w3": "mlp.shared_experts.up_proj",
        "moe.shared.w2": "mlp.shared_experts.down_proj",
    },
)
