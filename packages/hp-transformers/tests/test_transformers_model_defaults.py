"""A key that `config.json` does not have means what the config class in transformers says.

The tests need `transformers`, which no session installs by itself (`nox -s transformers`).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from hp_trainer.config.options import resolve
from hp_transformers.families import hf_config, model_config, read_config
from hp_transformers.families.published import FAMILIES

transformers = pytest.importorskip("transformers")

REQUIRED: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,  # which defaults of other keys divide
}
# What this package reads besides the class; and what the class has besides, without a meaning here.
NOT_OF_THE_CLASS = {"aux_loss_alpha", "rope_theta", "layer_types", "mlp_only_layers"}


def written(folder: Path, values: dict[str, Any]) -> Any:
    """The configuration that transformers makes of a file."""
    (folder / "config.json").write_text(json.dumps(values))
    return transformers.AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_default_is_that_of_the_class(name: str) -> None:
    config = transformers.AutoConfig.for_model(name)
    for key, value in FAMILIES[name].defaults.items():
        if key == "rope_theta":
            assert config.rope_parameters["rope_theta"] == value
        elif key not in NOT_OF_THE_CLASS and value is not None:
            assert getattr(config, key) == value, key


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_of_required_keys_alone_is_read_as_transformers_reads_it(
    name: str, tmp_path: Path
) -> None:
    # The class has 128 key/value heads for DeepSeek-V3, whose attention knows no number of its own.
    heads = {"num_key_value_heads": 32} if name == "deepseek_v3" else {}
    config = written(tmp_path, {"model_type": name} | REQUIRED | heads)
    whole = tmp_path / "whole"
    config.save_pretrained(whole)  # with every default written out
    least = model_config(read_config(tmp_path))
    assert model_config(read_config(whole)) == least
    theirs = config.rope_parameters
    assert least.rope_theta == theirs["rope_theta"]
    assert least.rope_factor == theirs.get("factor", 1.0)
    assert least.norm_eps == config.rms_norm_eps
    assert least.tie_embeddings == config.tie_word_embeddings
    if least.attention == "gqa":
        width = getattr(config, "head_dim", None) or config.hidden_size // 32
        assert (least.head_dim, least.num_kv_heads) == (width, config.num_key_value_heads)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_theta": 3.0},
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1.0},
            "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
        },
    ],
)
def test_rotary_settings_are_read_as_transformers_reads_them(
    name: str, rope: dict[str, Any], tmp_path: Path
) -> None:
    config = written(tmp_path, {"model_type": name} | REQUIRED | rope)
    ours, theirs = model_config(read_config(tmp_path)), config.rope_parameters
    assert ours.rope_theta == theirs["rope_theta"]
    assert ours.rope_scaling == {"default": "none"}.get(theirs["rope_type"], theirs["rope_type"])
    if ours.rope_scaling == "yarn":
        assert ours.rope_factor == theirs["factor"]
        assert ours.rope_original_positions == theirs["original_max_position_embeddings"]
        assert ours.rope_truncate == theirs.get("truncate", True)


@pytest.mark.parametrize("name", ["debug-gpt-oss", "debug-llama3", "quickstart"])
def test_no_scaling_is_written_so_that_transformers_reads_none(name: str, tmp_path: Path) -> None:
    # A gpt-oss without settings of its own is stretched 32 times.
    given = {"model.vocab_size": 48, "model.max_positions": 512, "model.rope_scaling": "none"}
    given |= {"model.rope_factor": 1.0}
    model = resolve(name, given.items(), env={}).config.model
    config = written(tmp_path, hf_config(model, dtype="float32"))
    assert config.rope_parameters["rope_type"] == "default"
    assert model_config(read_config(tmp_path)).rope_scaling == "none"
