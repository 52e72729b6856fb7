"""Families of Hugging Face models: names and settings, as data.

A family says how its `config.json` reads as a `ModelConfig` and what its files call our tensors.
Nothing here reads a tensor.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hp_base.errors import ConfigError
from hp_base.messages import shown
from hp_trainer.config import LARGEST, MOST_EXPERTS, MOST_LAYERS, ModelConfig

Json = Mapping[str, Any]
Stacking = Literal["none", "interleaved", "concatenated"]
"""How a file has the experts of a layer: `none`, one tensor per projection and expert;
`interleaved`, gpt-oss's [experts, in, out] with gate and up columns in turns; `concatenated`, what
a live model of transformers 5 has, [experts, out, in] with gate rows before up rows."""


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    Attributes:
        model_type: Value of `model_type` in `config.json`.
        architecture: The class in transformers.
        renamed: Paths of modules or parameters of a layer that this family calls otherwise than
            the model has declared -> theirs.
        read: Function that maps `config.json` to keys of `ModelConfig`.
        write: Function that maps a `ModelConfig` to what `config.json` has besides the common keys;
            raises ConfigError for a model that this family does not have.
        stacking: How files have experts.
        projections: What files call gate, up and down of an expert.
        defaults: What a key means that `config.json` does not have: the default of the family's
            config class in transformers 5.23.
    """

    model_type: str
    architecture: str
    read: Callable[["Settings"], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]
    renamed: Mapping[str, str] = field(default_factory=dict)
    stacking: Stacking = "none"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    defaults: Json = field(default_factory=dict)


_MISSING = object()


class Settings:
    """A `config.json`, asked key by key; each answer has its type, or the file is refused.

    Args:
        values: The parsed file.
        defaults: What an absent key means; a key that is in neither must be given.
        where: What messages call the file.
    """

    def __init__(
        self, values: Json, defaults: Json | None = None, *, where: str = "config.json"
    ) -> None:
        self.values, self.where = values, where
        self._defaults = defaults or {}

    def raw(self, key: str, *, null: object = _MISSING) -> Any:
        """A value as it stands, or its default.

        Args:
            key: Key of the file.
            null: What a null means; left out: it is one more value.

        Raises:
            ConfigError: When there is neither.
        """
        value = self.values.get(key, self._defaults.get(key, _MISSING))
        if value is _MISSING:
            raise ConfigError(f"{self.where}: {key} must be given")
        return null if value is None and null is not _MISSING else value

    def count(
        self, key: str, *, least: int = 1, most: int = LARGEST, null: int | None = None
    ) -> int:
        """A whole number.

        Args:
            key: Key of the file.
            least: Smallest that is taken.
            most: Largest that is taken.
            null: What a null means; None: it is refused.
        """
        value = self.raw(key)
        if value is None and null is not None:
            return null
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(key, value, f"an integer of {least} to {most}")
        return value

    def number(self, key: str, *, least: float = 0.0) -> float:
        """A finite number of at least `least`."""
        value = self.raw(key)
        is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
        if not is_number or value < least:
            raise self.refusal(key, value, f"a finite number, at least {least:g}")
        return float(value)

    def positive(self, key: str) -> float:
        """A finite number above 0."""
        value = self.number(key)
        if value == 0.0:
            raise self.refusal(key, self.raw(key), "a finite number above 0")
        return value

    def flag(self, key: str) -> bool:
        """True or false, and nothing that stands for them."""
        value = self.raw(key)
        if type(value) is not bool:
            raise self.refusal(key, value, "true or false")
        return value

    def require(self, key: str, *allowed: object) -> None:
        """Refuse a setting that the models here do not have.

        Args:
            key: May be absent or null.
            allowed: Its only values; the first is what an absent one means.

        Raises:
            ConfigError: When it is another one.
        """
        value = self.values.get(key)
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            raise self.refusal(key, value, " or ".join(shown(a) for a in allowed))

    def table(self, key: str) -> "Settings | None":
        """An object within the file; None where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(key, value, "an object")
        return Settings(value, where=f"{self.where}: {key}")

    def either(self, *keys: str) -> str:
        """The one of some names of a setting that the file has; the first where it has none.

        Raises:
            ConfigError: When two of them say different things.
        """
        given = [key for key in keys if key in self.values]
        for key in given[1:]:
            if self.values[key] != self.values[given[0]]:
                other = f"{given[0]} ({shown(self.values[given[0]])})"
                raise ConfigError(
                    f"{self.where}: {key} ({shown(self.values[key])}) must equal {other}"
                )
        return given[0] if given else keys[0]

    def refusal(self, key: str, value: object, kind: str) -> ConfigError:
        """Return what is raised about a value."""
        return ConfigError(f"{self.where}: {key} ({shown(value)}) must be {kind}")


COMMON: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
"""What absent keys mean in most families: defaults of their config classes in transformers 5.23."""


def common(settings: Settings) -> dict[str, Any]:
    """Keys of `ModelConfig` that every family reads alike."""
    settings.require("hidden_act", "silu")
    settings.require("attention_dropout", 0, 0.0)
    heads = settings.count("num_attention_heads")
    return {
        "vocab_size": settings.count("vocab_size"),
        "max_positions": settings.count("max_position_embeddings"),
        "dim": settings.count("hidden_size"),
        "num_layers": settings.count("num_hidden_layers", most=MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": settings.count("num_key_value_heads", null=heads),
        "norm_eps": settings.positive("rms_norm_eps"),
        "init_std": settings.positive("initializer_range"),
        "tie_embeddings": settings.flag("tie_word_embeddings"),
        "num_experts": 0,
        "num_shared_experts": 0,
        "balance_coefficient": 0.0,
    }


def num_experts(settings: Settings, key: str) -> int:
    """Experts of a layer, as many as can be listed for all layers."""
    layers = settings.count("num_hidden_layers", most=MOST_LAYERS)
    return settings.count(key, most=MOST_EXPERTS // layers)


def head_dim(settings: Settings) -> int:
    """Width of a head of grouped-query attention, written out; null, or absent: what dim leaves."""
    width, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    if settings.raw("head_dim") is None and width < heads:
        raise settings.refusal("hidden_size", width, f"at least num_attention_heads ({heads})")
    return settings.count("head_dim", null=width // heads)


def common_keys(model: ModelConfig) -> dict[str, Any]:
    """Return what every family's `config.json` has."""
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
