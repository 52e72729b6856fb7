"""Models of transformers whose positions are mixed outside attention are refused by name.

The families here are tiny, of random weights. The tests need `transformers`
(`nox -s transformers`).
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hp_context import register_attention, shard_batch
from hp_platform.testing import run_distributed

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_local_experts": 4}
MANY = EXPERTS | {"num_experts": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
SHORT = {"head_dim": 8, "sliding_window": 4}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
FULL = "full_attention"

# Each family: what its configuration is given.
GOOD: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "Mistral": SIZES | {"sliding_window": 4},
    "Mixtral": SIZES | {"num_local_experts": 4},
    "Qwen2": SIZES,
    "Qwen2Moe": SIZES | MANY,
    "Qwen3": SIZES,
    "Qwen3Moe": SIZES | MANY,
    "GptOss": SIZES | EXPERTS | SHORT,
    "DeepseekV3": SIZES | MANY | MLA,
    "Glm4Moe": SIZES | MANY | {"head_dim": 8, "first_k_dense_replace": 1},
    "Gemma2": SIZES | SHORT,
    "Gemma3": SIZES | SHORT,
    "Olmo3": SIZES,
    "Olmoe": SIZES | MANY,
    "GPT2": GPT2,
    "GPTNeoX": SIZES,
    "Phi3": SIZES,
    "Cohere2": SIZES | SHORT,
    "Granite": SIZES,
    "SmolLM3": SIZES,
    "SeedOss": SIZES | {"head_dim": 8},
}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "Qwen3Next": (
        SIZES | MANY | {"head_dim": 8},
        r"model.layers.0.linear_attn \(Qwen3NextGatedDeltaNet\)",
    ),
    "Mamba": (
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
        r"backbone.layers.0.mixer \(MambaMixer\)",
    ),
    "Mamba2": (
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8}
        | {"head_dim": 8, "n_groups": 1, "state_size": 8},
        r"backbone.layers.0.mixer \(Mamba2Mixer\)",
    ),
    "FalconMamba": (SIZES, r"layers.0.mixer \(FalconMambaMixer\)"),
    "Rwkv": (
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2},
        r"rwkv.blocks.0.attention.time_shift \(ZeroPad2d\)",
    ),
    "Jamba": (SIZES | MANY, r"model.layers.0.mamba \(JambaMambaMixer\)"),
    "Bamba": (SIZES | SSM | {"attn_layer_indices": [1]}, r"layers.0.mamba \(BambaMixer\)"),
    "Zamba2": (
        SIZES
        | {"num_hidden_layers": 3, "layers_block_type": ["mamba", "mamba", "hybrid"]}
        | {"n_mamba_heads": 8, "mamba_headdim": 8, "attention_head_dim": 16, "mamba_ngroups": 1},
        r"model.layers.0.mamba \(Zamba2MambaMixer\)",
    ),
    "FalconH1": (SIZES, r"model.layers.0.mamba \(FalconH1Mixer\)"),
    "NemotronH": (SIZES, r"model.layers.0.mixer \(NemotronHMamba2Mixer\)"),
    "Lfm2": (SIZES | {"layer_types": ["conv", FULL]}, r"model.layers.0.conv \(Lfm2ShortConv\)"),
    "RecurrentGemma": (SIZES, r"temporal_block \(RecurrentGemmaRecurrentBlock\)"),
    "MiniMax": (SIZES | MANY, r"model.layers.1.self_attn \(MiniMaxLightningAttention\)"),
    # Keys are of blocks of 128 tokens.
    "DeepseekV4": (
        SIZES
        | MANY
        | {"q_lora_rank": 16, "head_dim": 8, "qk_rope_head_dim": 4, "o_groups": 2}
        | {"o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8}
        | {"layer_types": ["heavily_compressed_attention", "sliding_attention"]},
        r"model.layers.0.self_attn \(DeepseekV4Attention\)",
    ),
    # Scores have a bias that is made for positions of a part, or attention is its own.
    "Bloom": ({"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "Bloom"),
    "OpenAIGPT": (GPT2, r"transformer.h.0.attn \(Attention\)"),
    # Takes no position ids, and counts its part from 0.
    "Bart": (
        {"vocab_size": 64, "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 4}
        | {"decoder_ffn_dim": 48, "encoder_layers": 1, "encoder_attention_heads": 4},
        r"model.decoder \(BartDecoder\)",
    ),
}


def build(family: str, given: dict[str, Any], *, attention: str = "hp_context") -> Any:
    torch.manual_seed(0)
    is_text = hasattr(transformers, f"{family}TextConfig")
    config = getattr(transformers, f"{family}{'Text' if is_text else ''}Config")(
        **given, attn_implementation=attention
    )
    name = "OpenAIGPTLMHeadModel" if family == "OpenAIGPT" else f"{family}ForCausalLM"
    return getattr(transformers, {"GPT2ForCausalLM": "GPT2LMHeadModel"}.get(name, name))(config)


def inputs() -> dict[str, Tensor]:
    group = dist.group.WORLD
    assert group is not None
    return shard_batch({"input_ids": torch.arange(16)[None] % 60 + 3}, group)


def answer(action: Callable[[], Any]) -> str:
    try:
        action()
    except ValueError as error:
        return str(error)
    return "ran"


def every_family() -> dict[str, str]:
    group = dist.group.WORLD
    assert group is not None
    register_attention(group)
    given = GOOD | {family: config for family, (config, _) in BAD.items()}
    found = {}
    for family, config in given.items():
        model = build(family, config)
        found[family] = answer(lambda: model(**inputs()))  # noqa: B023 - called at once
    return found


def test_families_are_run_or_refused_by_the_name_of_what_mixes() -> None:
    for found in run_distributed(every_family, world_size=2, timeout=300):
        for family in GOOD:
            assert found[family] == "ran", (family, found[family])
        for family, (_, name) in BAD.items():
            assert found[family] != "ran", family
            assert re.search(name, found[family]), (family, found[family])


class Shifted(nn.Module):
    """A layer with a mixer that nobody knows."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = self.layer(x, *args, **kwargs)
        return out + torch.roll(out, 1, 1)


def when_and_how() -> list[str]:
    group = dist.group.WORLD
    assert group is not None
    early = build("Qwen3Next", BAD["Qwen3Next"][0], attention="sdpa")
    plain = build("Llama", SIZES, attention="sdpa")
    register_attention(group)
    found = [answer(lambda: plain(**inputs()))]  # has not chosen it
    early.set_attn_implementation("hp_context")
    found.append(answer(lambda: early(**inputs())))
    found.append(answer(lambda: early(**inputs())))  # and again
    found.append(answer(lambda: early.model(**inputs())))
    compiled: Any = torch.compile(early, backend="eager")
    found.append(answer(lambda: compiled(**inputs())))
    llama = build("Llama", SIZES)
    llama.model.layers[1] = Shifted(llama.model.layers[1])
    found.append(answer(lambda: llama(**inputs())))
    good = build("Llama", SIZES)
    good(**inputs())
    hooks = [name for name, m in good.named_modules() if m._forward_pre_hooks or m._forward_hooks]
    found.append(f"hooks left: {hooks}")
    return found


def test_a_model_is_tried_whenever_it_was_built_and_however_it_is_called() -> None:
    for found in run_distributed(when_and_how, world_size=2, timeout=300):
        other, first, again, inner, compiled, own, hooks = found
        assert other == "ran"
        for message in (first, again, compiled):
            assert message.startswith("model.layers.0.linear_attn (Qwen3NextGatedDeltaNet) ")
        assert inner.startswith("layers.0.linear_attn (Qwen3NextGatedDeltaNet) ")
        assert own.startswith("model.layers.1 (Shifted) computes for a token what changes")
        assert own.endswith("must treat positions one by one with hp_context")
        assert hooks == "hooks left: []"
