"""Families of Hugging Face models: names and settings, as data.

A family maps its `config.json` to a `ModelConfig` and back, and our names of tensors to those in
its files. Nothing here reads a tensor.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from hp_base.errors import ConfigError
from hp_base.messages import shown
from hp_trainer.config import LARGEST, MOST_EXPERTS, MOST_LAYERS, ModelConfig

Json: TypeAlias = Mapping[str, object]
"""An object of a JSON file."""
Keys: TypeAlias = dict[str, object]
"""Keys of `config.json` or of `ModelConfig`, with their values."""
Stacking = Literal["none", "interleaved", "concatenated"]
"""Form of the experts of a layer in files: `none`, one tensor per projection and expert;
`interleaved`, gpt-oss's [experts, in, out] with gate and up columns in turns; `concatenated`, the
form of a live model of transformers 5, [experts, out, in] with gate rows before up rows."""


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type`.

    Attributes:
        model_type: Value of `model_type` in `config.json`.
        architecture: Name of the class in transformers.
        renamed: Names of modules or parameters of a layer in files of this family, by the published
            names that the model has declared.
        read: Function that maps `config.json` to keys of `ModelConfig`.
        write: Function that maps a `ModelConfig` to the keys of `config.json` besides the common
            ones; raises ConfigError for a model that this family does not have.
        stacking: Form of experts in files.
        projections: Names of gate, up and down of an expert in files.
        defaults: Values of keys that `config.json` does not have: the defaults of the family's
            config class in transformers 5.23.
    """

    model_type: str
    architecture: str
    read: Callable[["Settings"], Keys]
    write: Callable[[ModelConfig], Keys]
    renamed: Mapping[str, str] = field(default_factory=dict)
    stacking: Stacking = "none"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    defaults: Json = field(default_factory=dict)


_MISSING = object()


class Settings:
    """A `config.json`, read key by key; a value of another type than asked for is refused.

    Args:
        values: Parsed file.
        defaults: Values of absent keys; a key that is in neither must be given.
        where: Name of the file in messages.
    """

    def __init__(
        self, values: Json, defaults: Json | None = None, *, where: str = "config.json"
    ) -> None:
        self.values, self.where = values, where
        self._defaults = defaults or {}

    def raw(self, key: str, *, null: object = _MISSING) -> object:
        """Return a value of any type, or its default.

        Args:
            key: Key of the file.
            null: Value that replaces a null; left out: null is returned.

        Raises:
            ConfigError: When the key has neither a value nor a default.
        """
        value = self.values.get(key, self._defaults.get(key, _MISSING))
        if value is _MISSING:
            raise ConfigError(f"{self.where}: {key} must be given")
        return null if value is None and null is not _MISSING else value

    def count(
        self, key: str, *, least: int = 1, most: int = LARGEST, null: int | None = None
    ) -> int:
        """Return a whole number.

        Args:
            key: Key of the file.
            least: Smallest valid value.
            most: Largest valid value.
            null: Value that replaces a null; None: null is refused.
        """
        value = self.raw(key)
        if value is None and null is not None:
            return null
        if type(value) is not int or not least <= value <= most:
            raise self.refusal(key, value, f"an integer of {least} to {most}")
        return value

    def number(self, key: str, *, least: float = 0.0) -> float:
        """Return a finite number of at least `least`."""
        value = self.raw(key)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not least <= value <= sys.float_info.max
        ):
            raise self.refusal(key, value, f"a finite number, at least {least:g}")
        return float(value)

    def positive(self, key: str) -> float:
        """Return a finite number above 0."""
        value = self.number(key)
        if value == 0.0:
            raise self.refusal(key, self.raw(key), "a finite number above 0")
        return value

    def flag(self, key: str) -> bool:
        """Return true or false; no other value stands for them."""
        value = self.raw(key)
        if type(value) is not bool:
            raise self.refusal(key, value, "true or false")
        return value

    def require(self, key: str, *allowed: object) -> None:
        """Refuse a setting that the models here do not have.

        Args:
            key: Key of the file, which may be absent or null.
            allowed: Valid values; an absent key means the first.

        Raises:
            ConfigError: When it has another value.
        """
        value = self.values.get(key)
        if value is not None and not any(type(value) is type(a) and value == a for a in allowed):
            raise self.refusal(key, value, " or ".join(shown(a) for a in allowed))

    def table(self, key: str) -> "Settings | None":
        """Return an object within the file; None if it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(key, value, "an object")
        return Settings(value, where=f"{self.where}: {key}")

    def either(self, *keys: str) -> str:
        """Return the name under which the file has a setting; the first if it has none.

        Args:
            keys: Names that the setting has had.

        Raises:
            ConfigError: When the values of two of them differ.
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
        """Return the error to raise about a value."""
        return ConfigError(f"{self.where}: {key} ({shown(value)}) must be {kind}")


COMMON: Keys = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
"""Defaults of most families: those of their config classes in transformers 5.23."""


def common(settings: Settings) -> Keys:
    """Return the keys of `ModelConfig` that every family reads alike."""
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
    """Return the number of experts of a layer; those of all layers are at most `MOST_EXPERTS`."""
    layers = settings.count("num_hidden_layers", most=MOST_LAYERS)
    return settings.count(key, most=MOST_EXPERTS // layers)


def head_dim(settings: Settings) -> int:
    """Return the width of a head of grouped-query attention; null: the share of a head in dim."""
    width, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    if settings.raw("head_dim") is None and width < heads:
        raise settings.refusal("hidden_size", width, f"at least num_attention_heads ({heads})")
    return settings.count("head_dim", null=width // heads)


def common_keys(model: ModelConfig) -> Keys:
    """Return the keys of `config.json` that every family writes alike."""
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
