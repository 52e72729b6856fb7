"""What a family of Hugging Face models is: names and settings, as data.

A family says how its `config.json` reads as a `ModelConfig` and what its files call our tensors.
Nothing here reads a tensor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hp_train.config import ModelConfig
from hp_train.errors import ConfigError
from hp_train.schema import shown

Json = Mapping[str, Any]
Stacking = Literal["none", "interleaved", "concatenated"]
"""How a file has the experts of a layer: `none`, one tensor per projection and expert;
`interleaved`, gpt-oss's [experts, in, out] with gate and up columns in turns; `concatenated`, what
a live model of transformers 5 has, [experts, out, in] with gate rows before up rows."""


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    Attributes:
        model_type: Of `config.json`.
        architecture: The class in transformers.
        layer_names: What follows `layers.N.` in our names -> in theirs, where it is not in
            `LAYER_NAMES`.
        read: From `config.json` to keys of `ModelConfig`.
        write: From a `ModelConfig` to what `config.json` has besides the common keys; raises
            ConfigError for a model that this family does not have.
        stacking: How files have experts.
        experts: Path of the experts of a layer, after `layers.N.`.
        projections: What files call gate, up and down of an expert.
    """

    model_type: str
    architecture: str
    read: Callable[[Json], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    layer_names: Mapping[str, str] = field(default_factory=dict)
    stacking: Stacking = "none"
    experts: str = "mlp.experts"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "moe.router": "mlp.gate",
}
"""Modules of a layer, as most families call them."""


class Settings:
    """A `config.json`, asked key by key.

    Args:
        values: The parsed file.
    """

    def __init__(self, values: Json) -> None:
        self.values = values

    def get(self, key: str, default: Any = None) -> Any:
        """A value; the default where it is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """A value that must be there.

        Raises:
            ConfigError: When it is not.
        """
        if self.values.get(key) is None:
            raise ConfigError(f"config.json: {key} must be given")
        return self.values[key]

    def require(self, key: str, *allowed: object) -> None:
        """Refuse a setting that the models here do not have.

        Args:
            key: May be absent.
            allowed: Its only values; the first is what an absent one means.

        Raises:
            ConfigError: When it is another one.
        """
        value = self.get(key, allowed[0])
        if value not in allowed:
            names = " or ".join(shown(a) for a in allowed)
            raise ConfigError(f"config.json: {key} ({shown(value)}) must be {names}")


def common(settings: Settings) -> dict[str, Any]:
    """Keys of `ModelConfig` that every family reads alike."""
    settings.require("hidden_act", "silu")
    settings.require("attention_dropout", 0, 0.0)
    return {
        "vocab_size": settings.need("vocab_size"),
        "max_positions": settings.get("max_position_embeddings", 0),
        "dim": settings.need("hidden_size"),
        "num_layers": settings.need("num_hidden_layers"),
        "num_heads": settings.need("num_attention_heads"),
        "num_kv_heads": settings.get("num_key_value_heads", settings.need("num_attention_heads")),
        "norm_eps": float(settings.get("rms_norm_eps", 1e-6)),
        "init_std": float(settings.get("initializer_range", 0.02)),
        "tie_embeddings": bool(settings.get("tie_word_embeddings", False)),
        "num_experts": 0,
        "num_shared_experts": 0,
        "balance_coefficient": 0.0,
    }


def head_dim(settings: Settings) -> int:
    """Width of a head of grouped-query attention, written out."""
    width = settings.get("head_dim") or 0
    return int(width or settings.need("hidden_size") // settings.need("num_attention_heads"))


def common_keys(model: ModelConfig) -> dict[str, Any]:
    """What every family's `config.json` has."""
    return {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_positions,
        "hidden_size": model.dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": model.tie_embeddings,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
    }
