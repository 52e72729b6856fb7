"""The settings of rotary embedding in `config.json`, as they are published and as 5.x writes them.

Published files have `rope_theta` and `rope_scaling`; transformers 5 puts both into
`rope_parameters`, and reads either.
"""

from typing import Any

from hp_train.config import ModelConfig
from hp_train.errors import ConfigError
from hp_train.hugging_face.family import Settings
from hp_train.schema import shown

# Ours, theirs, and what an absent one means.
_LLAMA3 = (
    ("rope_factor", "factor", None),
    ("rope_low_factor", "low_freq_factor", None),
    ("rope_high_factor", "high_freq_factor", None),
    ("rope_original_positions", "original_max_position_embeddings", None),
)
_YARN = (
    ("rope_factor", "factor", None),
    ("rope_original_positions", "original_max_position_embeddings", None),
    ("rope_beta_fast", "beta_fast", 32.0),
    ("rope_beta_slow", "beta_slow", 1.0),
    ("rope_truncate", "truncate", True),
    ("rope_mscale", "mscale", 0.0),
    ("rope_mscale_all_dim", "mscale_all_dim", 0.0),
)
_KEYS = {"default": (), "llama3": _LLAMA3, "yarn": _YARN}
_NAMES = {"default": "none", "llama3": "llama3", "yarn": "yarn"}


def read_rope(settings: Settings, *, theta: float = 10000.0) -> dict[str, Any]:
    """Keys of `ModelConfig`.

    Args:
        settings: Of the file.
        theta: What an absent one means in this family.

    Raises:
        ConfigError: For a kind of scaling that is not known, or one that lacks a number.
    """
    given = Settings(settings.get("rope_parameters") or settings.get("rope_scaling") or {})
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _KEYS:
        known = " or ".join(_KEYS)
        raise ConfigError(f"config.json: rope_type ({shown(kind)}) must be {known}")
    given.require("partial_rotary_factor", 1.0)
    found: dict[str, Any] = {
        "rope_theta": float(given.get("rope_theta", settings.get("rope_theta", theta))),
        "rope_scaling": _NAMES[kind],
    }
    for ours, theirs, default in _KEYS[kind]:
        value = given.need(theirs) if default is None else given.get(theirs, default)
        found[ours] = value if isinstance(value, bool) else type_of(ours)(value)
    if given.get("attention_factor") is not None:
        raise ConfigError("config.json: attention_factor of rope must be left to its default")
    return found


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Keys of `config.json`."""
    kind = next(theirs for theirs, ours in _NAMES.items() if ours == model.rope_scaling)
    found: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": None}
    if kind == "default":
        return found
    scaling = {"rope_type": kind}
    for ours, theirs, default in _KEYS[kind]:
        value = getattr(model, ours)
        if default != 0.0 or value:
            scaling[theirs] = value
    return found | {"rope_scaling": scaling}


def type_of(key: str) -> type:
    """Of a key of `ModelConfig` that is a number."""
    return int if key == "rope_original_positions" else float
