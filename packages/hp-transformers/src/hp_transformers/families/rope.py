"""The settings of rotary embedding in `config.json`, as they are published and as 5.x writes them.

Published files have `rope_theta` and `rope_scaling`; transformers 5 puts both into
`rope_parameters`, and reads either.
"""

from hp_base.errors import ConfigError
from hp_base.messages import shown
from hp_trainer.config import ModelConfig
from hp_transformers.families.family import Json, Keys, Settings

# Our key, theirs, and the default of theirs; None: it must be given.
_ORIGINAL = ("rope_original_positions", "original_max_position_embeddings", None)
_LLAMA3 = (
    ("rope_factor", "factor", None),
    ("rope_low_factor", "low_freq_factor", None),
    ("rope_high_factor", "high_freq_factor", None),
    _ORIGINAL,
)
_YARN = (
    ("rope_factor", "factor", None),
    _ORIGINAL,
    ("rope_beta_fast", "beta_fast", 32.0),
    ("rope_beta_slow", "beta_slow", 1.0),
    ("rope_truncate", "truncate", True),
    ("rope_mscale", "mscale", 0.0),
    ("rope_mscale_all_dim", "mscale_all_dim", 0.0),
)
_KEYS = {"default": (), "llama3": _LLAMA3, "yarn": _YARN}
_KNOWN = {theirs for keys in _KEYS.values() for _, theirs, _ in keys} | {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "attention_factor", "finetuned"),
}


def read_rope(settings: Settings, *, absent: Json | None = None) -> Keys:
    """Return the keys of `ModelConfig` about rotary embedding.

    Args:
        settings: Settings of the file.
        absent: Scaling of a file with neither `rope_scaling` nor `rope_parameters`.

    Raises:
        ConfigError: When the kind of scaling is unknown, or lacks a number.
    """
    scaling = settings.table("rope_scaling")
    if scaling is None or not scaling.values:
        scaling = settings.table("rope_parameters")
    values = absent or {} if scaling is None or not scaling.values else scaling.values
    where = f"{settings.where}: rope" if scaling is None else scaling.where
    given = Settings(values, _defaults(settings), where=where)
    for key in values:
        if key not in _KNOWN:
            raise ConfigError(f"{where}: {shown(key)[1:-1]} must be absent: it is not known")
    kind = given.raw(given.either("rope_type", "type"))
    if not isinstance(kind, str) or kind not in _KEYS:
        raise given.refusal("rope_type", kind, " or ".join(_KEYS))
    given.require("partial_rotary_factor", 1.0, 1)
    given.require("attention_factor", None)
    return {
        "rope_theta": given.positive("rope_theta"),
        "rope_scaling": "none" if kind == "default" else kind,
        **{ours: _value(given, theirs) for ours, theirs, _ in _KEYS[kind]},
    }


def write_rope(model: ModelConfig, *, is_written: bool = False) -> Keys:
    """Return the keys of `config.json` about rotary embedding.

    Args:
        model: Model configuration.
        is_written: Whether the file has to name the absence of scaling, since without
            `rope_scaling` this family scales.
    """
    kind = "default" if model.rope_scaling == "none" else model.rope_scaling
    scaling: Keys = {"rope_type": kind}
    for ours, theirs, default in _KEYS[kind]:
        value = getattr(model, ours)
        if default != 0.0 or value:
            scaling[theirs] = value
    is_said = is_written or kind != "default"
    return {"rope_theta": model.rope_theta, "rope_scaling": scaling if is_said else None}


def _defaults(settings: Settings) -> Json:
    """Return the values of absent keys of the scaling; some follow from the rest of the file."""
    found = {theirs: value for _, theirs, value in _YARN if value is not None}
    return {
        **found,
        "rope_type": "default",
        "rope_theta": settings.positive("rope_theta"),
        "original_max_position_embeddings": settings.count("max_position_embeddings"),
    }


def _value(given: Settings, key: str) -> float | bool:
    if key == "truncate":
        return given.flag(key)
    if key == "original_max_position_embeddings":
        return given.count(key)
    return given.number(key, least=1.0 if key == "factor" else 0.0)
