"""`config.json` of Hugging Face and the `[model]` section of a run, one from the other."""

import json
import re
from pathlib import Path

from msgspec.structs import asdict, replace

from hp_base.errors import ConfigError
from hp_base.messages import shown
from hp_checkpoint.json_file import read_json
from hp_trainer.config import ModelConfig, rules
from hp_trainer.config.options import build
from hp_trainer.config.schema import convert, fields
from hp_transformers.families.family import Family, Json, Keys, Settings, common_keys
from hp_transformers.families.published import FAMILIES

_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float32", "float64": "float64"}
_MOST_BYTES = 4 << 20  # of a config.json
# Keys about training and not about weights: they may differ from those that a family reads back.
_FREE = {"dropout", "balance_coefficient", "correction_rate", "init_std", "mtp_weight"}

# Names in files of the keys that rules are about.
_THEIRS = {
    "dim": ("hidden_size",),
    "head_dim": ("head_dim",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "num_layers": ("num_hidden_layers",),
    "num_dense_layers": ("first_k_dense_replace", "mlp_only_layers"),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok", "experts_per_token"),
    "num_expert_groups": ("n_group",),
    "num_limited_groups": ("topk_group",),
    "rope_head_dim": ("qk_rope_head_dim",),
    "rope_low_factor": ("low_freq_factor",),
    "rope_high_factor": ("high_freq_factor",),
    "rope_beta_slow": ("beta_slow",),
    "rope_beta_fast": ("beta_fast",),
    "rope_factor": ("factor",),
}
_ROPE = {"rope_theta", "rope_scaling", "rope_parameters"}
_EXPERTS = {
    *("num_dense_layers", "num_shared_experts", "num_expert_groups", "num_limited_groups"),
    *("router_score", "router_normalize", "router_scale", "router_bias"),
    *("expert_hidden", "expert_activation", "expert_bias", "top_k", "correction_bias"),
}
_LATENT = {"q_lora_rank", "kv_lora_rank", "nope_head_dim", "rope_head_dim", "v_head_dim"}
_YARN = {
    *("rope_beta_fast", "rope_beta_slow", "rope_truncate", "rope_mscale", "rope_mscale_all_dim"),
}


def read_config(folder: Path) -> dict[str, object]:
    """Parse the `config.json` of a folder.

    Raises:
        hp_base.errors.ConfigError: When it cannot be read.
    """
    return read_json(folder / "config.json", most_bytes=_MOST_BYTES)


def family_of(values: Json) -> Family:
    """Find the family of a `config.json`.

    Raises:
        hp_base.errors.ConfigError: When there is none of that name, or its weights are quantised.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(
            f"config.json: model_type ({shown(model_type)}) must be one of {known}; others are "
            "trained without import: hp train --model.transformers FOLDER"
        )
    quantised = values.get("quantization_config")
    if quantised is not None and quantised != {}:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise ConfigError(
            f"config.json: quantization_config ({shown(method)}) must be absent: quantised "
            "weights are not read, take a copy in bfloat16"
        )
    return FAMILIES[model_type]


def model_config(values: Json) -> ModelConfig:
    """Return the `[model]` section of a run for a `config.json`.

    Raises:
        hp_base.errors.ConfigError: About the first setting that the models here do not have.
    """
    family = family_of(values)
    found = family.read(Settings(values, family.defaults))
    checked = {
        f"model.{key}": convert(fields()[f"model.{key}"], value, strict=True)
        for key, value in found.items()
    }
    model = build(checked).model
    for problem in rules.part_rules(model):
        raise ConfigError(f"config.json: {_in_their_words(problem, values, family)}")
    return model


def _in_their_words(problem: str, values: Json, family: Family) -> str:
    """Return the sentence about a broken rule with keys of `config.json` instead of ours."""

    def theirs(match: re.Match[str]) -> str:
        names = _THEIRS.get(match[1], (match[0],))
        return next((key for key in names if key in values or key in family.defaults), names[0])

    return re.sub(r"model\.([a-z_]+)", theirs, problem)


def train_dtype(values: Json) -> str:
    """Return the `train.dtype` that computes in the dtype of the weights in `config.json`.

    Raises:
        hp_base.errors.ConfigError: When weights cannot have that dtype.
    """
    settings = Settings(values, {"dtype": None})
    key = settings.either("dtype", "torch_dtype")
    given = settings.raw(key, null="float32")
    if not isinstance(given, str) or given not in _DTYPES:
        raise settings.refusal(key, given, " or ".join(_DTYPES))
    return _DTYPES[given]


def hf_config(model: ModelConfig, *, dtype: str) -> dict[str, object]:
    """Return the `config.json` for a model.

    Args:
        model: Configuration of the model, with its vocabulary.
        dtype: Dtype of the weights, such as `bfloat16`.

    Raises:
        hp_base.errors.ConfigError: When no family of Hugging Face has such a model.
    """
    family = _matching(model)
    head = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
    }
    return head | common_keys(model) | family.write(model)


def config_after(theirs: Json, model: ModelConfig, *, dtype: str | None) -> Keys:
    """Return the `config.json` of the original model after training: unchanged keys stay.

    Args:
        theirs: Content of the original file.
        model: Configuration of the model, with its vocabulary.
        dtype: Dtype of the weights; None: that of the original.

    Raises:
        hp_base.errors.ConfigError: When no family of Hugging Face has such a model.
    """
    came, family = model_config(theirs), family_of(theirs)
    before, after = (common_keys(m) | family.write(m) for m in (came, model))
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    if _ROPE & changed.keys():
        changed |= {key: after[key] for key in _ROPE - {"rope_parameters"}}
    kept = {k: v for k, v in theirs.items() if not (k in _ROPE and _ROPE & changed.keys())}
    found = kept | changed
    if _differing(model, model_config(found)):  # such as under two names, or as another family
        found = {**theirs, **hf_config(model, dtype=dtype or train_dtype(theirs))}
    return with_dtype(found, dtype)


def with_dtype(values: Json, dtype: str | None) -> Keys:
    """Return a `config.json` with another dtype, also for parts that had the dtype of the whole.

    Args:
        values: Parsed file.
        dtype: Name of the dtype; None: it stays as it is.
    """
    if dtype is None:
        return dict(values)
    keys = [key for key in ("dtype", "torch_dtype") if key in values] or ["torch_dtype"]
    before = values.get(keys[0])
    parts = {
        key: with_dtype(part, dtype)
        for key, part in values.items()
        if isinstance(part, dict) and before in (part.get("dtype"), part.get("torch_dtype"))
    }
    return {**values, **(parts if before else {}), **dict.fromkeys(keys, dtype)}


def as_text(values: Json) -> bytes:
    """Return the text of a JSON file of a model, as transformers writes it."""
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def _matching(model: ModelConfig) -> Family:
    """Return the family that reads back the same model from the config that it writes."""
    nearest: list[tuple[int, str, str]] = []
    for family in FAMILIES.values():
        values = common_keys(model) | family.write(model)
        try:
            theirs = model_config({"model_type": family.model_type} | values)
        except ConfigError:  # such as no experts in a family that always has some
            continue
        wrong = _differing(model, theirs)
        if not wrong:
            return family
        nearest.append((len(wrong), family.model_type, wrong[0]))
    if not nearest:
        raise ConfigError("model must be what a family of Hugging Face has, and is of none")
    count, name, key = min(nearest)
    raise ConfigError(
        f"model.{key} ({shown(_whole(model)[key])}) must be what a family of Hugging Face has; "
        f"{name} is nearest, with {count} keys that differ"
    )


def _differing(model: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Return the keys in which a model differs from the one read back from its `config.json`."""
    ours, found = _whole(model), asdict(theirs)
    return sorted(k for k in ours.keys() - _unused(model) if found[k] != ours[k])


def _whole(model: ModelConfig) -> Keys:
    """Return all keys of a model, with the width of its heads written out."""
    width = model.head_dim or model.dim // model.num_heads
    return asdict(replace(model, head_dim=width if model.attention == "gqa" else 0))


def _unused(model: ModelConfig) -> set[str]:
    """Return the keys that do not apply to this model, and those about training alone."""
    scaling, gqa = model.rope_scaling, model.attention == "gqa"
    unused = (
        (model.num_experts == 0, _EXPERTS),
        (model.num_experts > 0 and model.num_dense_layers == 0, {"dense_hidden"}),
        (gqa, _LATENT),
        (not gqa, {"num_kv_heads"}),
        (model.expert_activation == "swiglu", {"swiglu_limit", "swiglu_alpha"}),
        (model.num_expert_groups == 1, {"num_limited_groups"}),
        (scaling != "llama3", {"rope_low_factor", "rope_high_factor"}),
        (scaling != "yarn", _YARN),
        (scaling == "none", {"rope_original_positions"}),
    )
    return _FREE.union(*(keys for applies, keys in unused if applies))
