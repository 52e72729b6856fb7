"""The shape of a model of transformers, as the `config.json` of its folder says it, in our keys."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hp_base.errors import ConfigError, told
from hp_base.messages import shown
from hp_trainer.config.schema import convert, fields

_NAMES: dict[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "max_seq_len", "max_sequence_length"),
    "dim": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k"),
    "expert_hidden": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
}
"""Our key -> what configs of transformers call it, the first that one has."""
_NEEDED = ("vocab_size", "dim", "num_layers")
_ABSENT = {"max_positions": 0, "num_heads": 1, "num_kv_heads": 1, "num_experts": 0, "top_k": 1}
_FIXED: dict[str, Any] = {
    "num_shared_experts": 0,
    "num_mtp_modules": 0,
    "balance_coefficient": 0.0,
    "dropout": 0.0,
}
"""What is the model's own matter, or not there."""


def config_of(folder: str, *, trust: bool) -> Any:
    """Read the config of a folder with transformers.

    Args:
        folder: Folder with a `config.json`.
        trust: Whether Python files of the folder may run.

    Raises:
        ConfigError: When transformers is not installed, or refuses the config.
    """
    if not (Path(folder) / "config.json").is_file():  # it would look for it on a hub
        raise ConfigError(f"model.transformers ({shown(folder)}) must be a folder with config.json")
    try:
        from transformers import AutoConfig  # noqa: PLC0415 - of those who have it

        return AutoConfig.from_pretrained(folder, trust_remote_code=trust, local_files_only=True)
    except ImportError:
        raise ConfigError(
            "model.transformers needs the extra transformers: pip install 'hp-train[transformers]'"
        ) from None
    except Exception as error:
        raise ConfigError(_refused(folder, error, trust=trust)) from error


def text_config_of(config: Any) -> Any:
    """Return the part of a config that is about the decoder of text."""
    return config.get_text_config(decoder=True)


def shape_of_folder(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Return keys of `[model]` that follow from `model.transformers`, with their values and origin.

    Args:
        values: Keys that are given, with their values.

    Raises:
        ConfigError: When one of them is given otherwise, or the folder does not say one.
    """
    folder = values.get("model.transformers", "")
    if not folder:
        return
    origin = f"{folder}/config.json"
    found = _shape(folder, trust=bool(values.get("model.trust_remote_code")))
    for name, value in found.items():
        key = f"model.{name}"
        try:
            convert(fields()[key], value, strict=True)
        except ConfigError as error:
            raise ConfigError(f"{origin}: {error}") from None
        given = values.get(key, value)
        if given != value:
            raise ConfigError(
                f"{key} ({shown(given)}) must be {shown(value)}, as {origin} says, or be left out"
            )
        yield key, value, origin


def _shape(folder: str, *, trust: bool) -> dict[str, Any]:
    config = config_of(folder, trust=trust)
    text = text_config_of(config)
    found = dict(_FIXED)
    for name, theirs in _NAMES.items():
        value = next((v for n in theirs if (v := _number(getattr(text, n, None))) > 0), 0)
        if name in _NEEDED and not value:
            raise ConfigError(
                f"{folder}/config.json ({config.model_type}) must say {theirs[0]}, which is how "
                "a model is cut into stages"
            )
        found[name] = value or _ABSENT.get(name, fields()[f"model.{name}"].default)
    found["tie_embeddings"] = bool(getattr(config, "tie_word_embeddings", False))
    return found


def _number(value: Any) -> int:
    """Return a number, or the largest of those of all layers; 0: none is said."""
    if isinstance(value, list | tuple) and value:
        return max(map(_number, value))
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _refused(folder: str, error: Exception, *, trust: bool) -> str:
    if not trust and "trust_remote_code" in str(error):
        return (
            f"model.trust_remote_code (false) must be true with model.transformers "
            f"({shown(folder)}): its config.json names Python files of that folder"
        )
    return (
        f"model.transformers ({shown(folder)}) must be a model of transformers: {told(error, 300)}"
    )
