"""Tiny configs of transformers' architectures: a rule over names of fields, and what it leaves."""

import re
from collections.abc import Mapping
from typing import Any

VOCAB, WIDTH, HIDDEN, LAYERS, HEADS, HEAD_DIM, LENGTH = 64, 32, 48, 2, 4, 8, 64

_SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_.*)?|vocab_dim", VOCAB),
    (r"num_key_value_heads|num_kv_heads|n_kv_heads|(.*_)?num_key_value_heads", 2),
    (r"(?:.*_)?(?:num_)?(?:attention|attn|kv_shared|linear|global|index)_heads", HEADS),
    (r"n_head|n_heads|num_heads|index_n_heads|(.*_)?num_(key|value)_heads", HEADS),
    (r"(.*_)?num_hidden_layers|n_layers?|num_layers|(en|de)coder_layers|(.*_)?depth", LAYERS),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts", 4),
    (r"num_experts_per_tok(en)?|(moe_)?top_?k|moe_k|num_experts_per_token", 2),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts|moe_num_shared_experts", 1),
    (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
    (r"index_topk", HEAD_DIM),
    (r"(q_lora|kv_lora|o_lora|low)_rank|(.*_)?lora_rank", 16),
    (
        r"(.*_)?(qk_rope|qk_nope|v|qk)_head_dim|(.*_)?head_dim|index_head_dim|kv_channels|d_kv",
        HEAD_DIM,
    ),
    (r"(.*_)?hidden_size|d_model|n_embd|dim|embed_dim|embedding_size|dim_model|emb_dim", WIDTH),
    (
        r"(.*_)?(hidden_dim|width|projection_dim)|lru_width|out_hidden_size|word_embed_proj_dim",
        WIDTH,
    ),
    (r"(.*_)?intermediate_size(_.*)?|(.*_)?ffn_dim|d_ff|ffn_hidden_size|n_inner|dim_ff", HIDDEN),
    (r"(.*_)?d_inner|dff", HIDDEN),
    (r"(.*_)?d_state|state_size|ssm_state_size", 8),
    (r"(max|n)_(position|target|source)?_?(embeddings|positions|length)|n_positions|n_ctx", LENGTH),
    (r"max_seq_len(gth)?|max_target_positions|max_source_positions", LENGTH),
    (r"(.*_)?image_size", 32),
    (r"(.*_)?patch_size", 16),
    (r"sliding_window|attention_chunk_size|window_size|local_attention|attention_window_size", 8),
    (r"(.*_)?chunk_size", 8),
)
"""What fields are called -> what they become, the first that fits; smaller values stay."""
_IS_ZERO = re.compile(r".*(drop(?!less)|jitter).*")
_TOKEN = re.compile(r".*(_token_id|_token_index|_idx|_ids?)$")
_BY_LAYER = re.compile(r"(.*layer_types?|layers_block_type|.*_pattern|.*layers?_list)$")


def shrunk(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Shrink the fields of a config, and of those in it.

    Args:
        fields: A config as JSON has it.

    Returns:
        Fields that change.
    """
    made: dict[str, Any] = {}
    heads = fields.get("num_attention_heads")
    if heads is not None and fields.get("num_key_value_heads") == heads:  # none are shared
        made["num_key_value_heads"] = HEADS
    if "output_router_logits" in fields:  # the loss that balances experts is compared, too
        made["output_router_logits"] = True
    for name, value in fields.items():
        small = _shrunk_one(name, value)
        if small is not None:
            made.setdefault(name, small)
    layers = max((len(v) for n, v in made.items() if n.endswith("layer_types")), default=0)
    for name in ("num_hidden_layers", "n_layer", "num_layers"):
        if layers and name in made:
            made[name] = layers
    return made


def _shrunk_one(name: str, value: Any) -> Any:
    """A field that is shrunk; None: it stays."""
    if name == "per_layer_config" and isinstance(value, Mapping):
        return {key: some for key, some in value.items() if int(key) < LAYERS}
    if isinstance(value, Mapping) and name.endswith("config"):
        return {**value, **shrunk(value)}
    if isinstance(value, int | float) and not isinstance(value, bool):
        if _IS_ZERO.fullmatch(name):
            return type(value)(0)
        return _size(name, value) if isinstance(value, int) else None
    if isinstance(value, list | tuple) and _BY_LAYER.fullmatch(name) and value:
        return _kinds(list(value))
    return None


def _size(name: str, value: int) -> int | None:
    if _TOKEN.fullmatch(name):
        return None if value < VOCAB else min(value, VOCAB - 1)
    for pattern, small in _SIZES:
        if re.fullmatch(pattern, name):
            return min(small, value) if value > 0 else None
    return None


def _kinds(by_layer: list[Any]) -> list[Any]:
    """Two layers, or as many as there are kinds: each kind once, in the order of their first."""
    found: list[Any] = []
    for kind in by_layer:
        if kind not in found:
            found.append(kind)
    while len(found) < LAYERS:
        found.append(found[-1])
    return found
