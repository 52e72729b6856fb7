"""DeepSeek-V3: latent attention, sigmoid routing in groups, multi-token prediction."""

from hp_trainer.config import MOST_LAYERS, ModelConfig
from hp_transformers.families.family import COMMON, Family, Keys, Settings, common, num_experts
from hp_transformers.families.rope import read_rope, write_rope


def _read(settings: Settings) -> Keys:
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


def _write(model: ModelConfig) -> Keys:
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
