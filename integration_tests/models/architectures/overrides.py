"""What the rule of `shrinking` does not know: fields of tiny configs, by type of model."""

from typing import Any

from integration_tests.models.architectures.shrinking import HIDDEN, VOCAB, WIDTH

_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
_GEMMA3N = {
    "intermediate_size": HIDDEN,
    "activation_sparsity_pattern": [0.5, 0.0],
    "num_kv_shared_layers": 0,
    "laurel_rank": 8,
    "hidden_size_per_layer_input": 8,
}
_KINDS = ("full_attention", "sliding_attention")
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_INDEXER = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
_ZAMBA = {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
}
_DOTS3 = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "per_layer_config": {
        1: {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "head_dim": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        }
    },
}
_UNBALANCED = {"output_router_logits": False}  # what is of no interest, or refused
OVERRIDES: dict[str, dict[str, Any]] = {
    "flint": _UNBALANCED,
    "jetmoe": _UNBALANCED,
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "local"],
        "local_attn_chunk_length": 8,
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [4, 4],
    },
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "bailing_hybrid": {"num_expert_group": 1, "topk_group": 1},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(_KINDS, _ROPE)},
    "dbrx": {
        **_UNBALANCED,
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "zamba": _ZAMBA,
    "zamba2": _ZAMBA,
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
        "audio_config": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH},
    },
    "dots3_note_text": _DOTS3,
    "blt": {
        "encoder_hash_byte_group_vocab": VOCAB,
        "encoder_config": {"hidden_size_global": WIDTH},
        "decoder_config": {"hidden_size_global": WIDTH},
    },
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": 16, "head_dim": 8, "zero_expert_num": 2},
}
_ASSISTANT = "an assistant: it ignores token ids, and reads hidden states and keys of another model"
_MUSIC = "AutoModelForCausalLM makes no model of its config, but of the config of its decoder alone"
WHY_NOT: dict[str, str] = {
    "gemma3n": "its vision tower needs PIL and timm, which are not installed",
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "musicgen": _MUSIC,
    "musicgen_melody": _MUSIC,
}
"""Why some do not train in one process, in words."""
