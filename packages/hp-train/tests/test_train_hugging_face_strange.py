"""Folders of models whose files or numbers do not go together: refused in one line, or alike."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from torch import Tensor

from hp_base.errors import ConfigError
from hp_train.cli import main
from hp_trainer.config import ModelConfig
from hp_trainer.config.options import resolve
from hp_trainer.model.rotary import inverse_frequencies
from hp_trainer.model.transformer import model_shapes
from hp_transformers.families import (
    check_weights,
    hf_config,
    load_weights,
    model_config,
    save_weights,
)
from hp_transformers.families.copies import are_equal
from hp_transformers.families.load import opened_files

pytestmark = pytest.mark.usefixtures("one_thread")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FREQUENCIES = "model.layers.0.self_attn.rotary_emb.inv_freq"


def _model(name: str, **changed: Any) -> ModelConfig:
    model = resolve(name, env={}).config.model
    return replace(model, vocab_size=40, max_positions=64, **changed)


def _weights(model: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {n: torch.randn(s, generator=generator) for n, s in model_shapes(model).items()}


def _folder(folder: Path, model: ModelConfig, *, shard_bytes: int = 1 << 30) -> Path:
    save_weights(folder, _weights(model), model, dtype=torch.float32, shard_bytes=shard_bytes)
    return folder


def _single(folder: Path, model: ModelConfig) -> dict[str, Tensor]:
    """Write a folder with one file and no index; returns what is in it."""
    [file] = _folder(folder, model).glob("*.safetensors")
    tensors = load_file(file)
    file.unlink()
    (folder / INDEX).unlink()
    save_file(tensors, folder / SINGLE)
    return tensors


def _configured(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


@pytest.mark.parametrize("name", ["debug-llama3", "debug-mixtral", "debug-deepseek-v3"])
def test_an_output_matrix_that_is_not_the_tied_embedding_is_refused(
    name: str, tmp_path: Path
) -> None:
    model = _model(name, tie_embeddings=True)
    tensors = _single(tmp_path, model)
    table = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": table.clone()}, tmp_path / SINGLE)
    check_weights(tmp_path)
    for other in (table + 1e-3, table[:-1].clone(), table.bfloat16()):
        save_file({**tensors, "lm_head.weight": other}, tmp_path / SINGLE)
        with pytest.raises(
            ConfigError, match=r"tensor lm_head.weight must equal model.embed_.*tie"
        ):
            check_weights(tmp_path)
        found = {"norm.weight": torch.full((model.dim,), torch.nan)}
        with pytest.raises(ConfigError, match="lm_head"):
            load_weights(tmp_path, found)
        assert found["norm.weight"].isnan().all()


def test_ranks_share_the_rows_that_are_compared(tmp_path: Path) -> None:
    x = torch.arange(50.0).view(10, 5)
    save_file({"x": x, "y": x.clone().index_fill(0, torch.tensor([6]), 0.0)}, tmp_path / SINGLE)
    with opened_files(tmp_path) as files:
        found = [are_equal(files["x"], files["y"], share=(rank, 4)) for rank in range(4)]
    assert found == [True, True, False, True]  # rows 5 and 6 are those of the third


@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_a_copy_of_a_module_of_prediction_must_be_one(name: str, tmp_path: Path) -> None:
    model = _model("debug-deepseek-v3")
    tensors = _single(tmp_path, model)
    copy = f"model.layers.{model.num_layers}.{name}"
    save_file({**tensors, copy: tensors[copy] * 1.5}, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match=rf"tensor {copy} must equal (model.embed|lm_head).*out"):
        check_weights(tmp_path)
    del tensors[copy]
    save_file(tensors, tmp_path / SINGLE)
    check_weights(tmp_path)


def test_frequencies_of_old_files_are_those_of_the_config(tmp_path: Path) -> None:
    model = _model("debug-llama3")
    tensors = _single(tmp_path, model)
    right = inverse_frequencies(model)
    for good in (right.float(), right.bfloat16()):
        save_file({**tensors, FREQUENCIES: good}, tmp_path / SINGLE)
        check_weights(tmp_path)
    for bad in (right.float() * 1.1, right.float()[:-1], right.float()[None]):
        save_file({**tensors, FREQUENCIES: bad.contiguous()}, tmp_path / SINGLE)
        with pytest.raises(ConfigError, match=rf"tensor {FREQUENCIES} must be what config.json"):
            check_weights(tmp_path)


def test_a_stale_index_beside_a_newer_file_is_refused(tmp_path: Path) -> None:
    model = _model("debug-llama3")
    folder = _folder(tmp_path / "model", model, shard_bytes=30_000)
    check_weights(folder)
    save_file(_single(tmp_path / "other", model), folder / SINGLE)
    with pytest.raises(ConfigError, match=r"must have one set of weights: model.safetensors.index"):
        check_weights(folder)


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        ("model-00009-of-00009.safetensors", "model-00009-of-00009.safetensors is there too"),
        ("adapter_model.safetensors", "adapter_model.safetensors is there too"),
        ("model.fp16.safetensors", "model.fp16.safetensors is there too"),
        ("adapter_config.json", "adapter_config.json.* must be absent: adapters are not read"),
        ("consolidated.safetensors", ""),
        ("pytorch_model.bin", ""),
    ],
)
def test_other_files_of_weights_are_refused_or_told(
    name: str, refusal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _folder(tmp_path / "model", _model("debug-llama3"), shard_bytes=30_000)
    save_file({"x": torch.ones(1)}, folder / name)
    if refusal:
        with pytest.raises(ConfigError, match=refusal):
            check_weights(folder)
    else:
        assert main(["import-hf", str(folder), "--out", str(tmp_path / "out.toml")]) == 0
        assert f"note: {name} is not read" in capsys.readouterr().err


def test_files_that_no_index_names_are_no_model(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "model", _model("debug-llama3"), shard_bytes=30_000)
    (folder / INDEX).unlink()
    with pytest.raises(ConfigError, match=r"must have model.safetensors or model.*it has model-0"):
        check_weights(folder)


def test_an_index_may_list_the_output_matrix_that_is_tied(tmp_path: Path) -> None:
    folder = _folder(tmp_path, _model("debug-llama3", tie_embeddings=True), shard_bytes=30_000)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = index["weight_map"]["model.norm.weight"]
    (folder / INDEX).write_text(json.dumps(index))
    check_weights(folder)


def test_weights_by_a_key_of_the_config_are_refused(tmp_path: Path) -> None:
    tensors = _single(tmp_path, _model("debug-llama3"))
    _configured(tmp_path, transformers_weights=SINGLE)
    check_weights(tmp_path)
    save_file(tensors, tmp_path / "other.bin")
    _configured(tmp_path, transformers_weights="other.bin")
    with pytest.raises(ConfigError, match=r'transformers_weights \("other.bin"\) must be absent'):
        check_weights(tmp_path)


def test_a_model_saved_without_its_module_of_prediction_is_told_what_to_do(tmp_path: Path) -> None:
    model = _model("debug-deepseek-v3")
    tensors = _single(tmp_path, model)
    beyond = f"model.layers.{model.num_layers}."
    save_file({n: t for n, t in tensors.items() if not n.startswith(beyond)}, tmp_path / SINGLE)
    with pytest.raises(ConfigError, match=r"make num_nextn_predict_layers \(1\) 0 in config.json"):
        check_weights(tmp_path)
    _configured(tmp_path, num_nextn_predict_layers=0)
    check_weights(tmp_path)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        (
            "debug-deepseek-v3",
            {"n_group": 3},
            "n_group (3) must divide n_routed_experts (16); nearest: 2 or 4",
        ),
        (
            "debug-deepseek-v3",
            {"topk_group": 5, "n_group": 4},
            "topk_group (5) must be at most n_group (4)",
        ),
        (
            "debug-deepseek-v3",
            {"first_k_dense_replace": 9},
            "first_k_dense_replace (9) must be at most num_hidden_layers (3)",
        ),
        ("debug-deepseek-v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim (7) must be even"),
        (
            "debug-qwen3-moe",
            {"num_experts_per_tok": 17},
            "num_experts_per_tok (17) must be at most num_experts (16)",
        ),
        (
            "debug-qwen3-moe",
            {"mlp_only_layers": [0, 1, 2, 3, 4]},
            "mlp_only_layers (5) must be at most num_hidden_layers (2)",
        ),
        (
            "debug-mixtral",
            {"num_experts_per_tok": 9},
            "num_experts_per_tok (9) must be at most num_local_experts (8)",
        ),
        (
            "debug-gpt-oss",
            {"num_experts_per_tok": 17, "experts_per_token": 17},
            "num_experts_per_tok (17) must be at most num_local_experts (8)",
        ),
        (
            "debug-llama3",
            {"num_key_value_heads": 3},
            "num_key_value_heads (3) must divide num_attention_heads (4); nearest: 2 or 4",
        ),
        ("debug-qwen3", {"head_dim": 7}, "head_dim (7) must be even"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused_before_weights(
    name: str, changed: dict[str, Any], message: str
) -> None:
    values = hf_config(_model(name), dtype="float32") | changed
    with pytest.raises(ConfigError) as caught:
        model_config(values)
    assert str(caught.value) == f"config.json: {message}"


def test_a_model_of_no_family_is_told_of_the_other_door() -> None:
    values = hf_config(_model("debug-llama3"), dtype="float32") | {"model_type": "gemma3_text"}
    with pytest.raises(ConfigError, match=r"hp train --model.transformers FOLDER"):
        model_config(values)
