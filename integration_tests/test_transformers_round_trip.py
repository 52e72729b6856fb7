"""A model goes in, and comes out as the model that came in: every file, every key, every id."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import torch

from hp_platform import RankInfo, initialize, shutdown
from hp_platform.testing import run_distributed
from hp_train.base.folder import Folder
from hp_train.cli import main
from hp_train.config import Config
from hp_train.config.options import resolve
from hp_train.data import load_tokenizer
from hp_train.data.prepare import prepare
from hp_train.launch.original import keep_original
from hp_train.launch.rundir import write_config
from hp_train.training.train import Trainer
from integration_tests.layouts import worker_of, write_corpus

pytest.importorskip("transformers", reason="of `nox -s transformers`")
pytest.importorskip("tokenizers", reason="of `nox -s transformers`")
from integration_tests import round_trips  # noqa: E402 - needs tokenizers

pytestmark = pytest.mark.filterwarnings("default")  # of transformers

_MOE = {"num_experts_per_tok": 2, "num_key_value_heads": 2}
_FEW = {"num_key_value_heads": 2}
_GPT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
_MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
}
_NEXT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8}
# Type of the model, its tokenizer, the dtype of its files, and fields of its config.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama2", "bfloat16", _FEW),
    "qwen3": ("qwen", "float32", {**_FEW, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_moe": ("gpt2", "bfloat16", {**_MOE, **_EXPERTS, "shard_bytes": 20_000}),
    "mixtral": ("gemma", "float16", {**_MOE, "num_local_experts": 4, "sliding_window": None}),
    "deepseek_v3": ("llama3", "bfloat16", _MLA | {"num_nextn_predict_layers": 0}),
    "gpt_oss": ("unigram", "bfloat16", {**_MOE, "num_local_experts": 4, "head_dim": 8}),
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama3", "bfloat16", {**_FEW, "shard_bytes": 20_000}),
    "qwen2": ("qwen", "bfloat16", {**_FEW, "tie_word_embeddings": True}),
    "qwen3_moe": ("bert", "float32", {**_MOE, **_EXPERTS}),
    "qwen3_next": ("qwen", "bfloat16", {**_MOE, **_EXPERTS, **_NEXT}),
    "mistral": ("unigram", "float16", _FEW),
    "gemma": ("gemma", "bfloat16", {**_FEW, "head_dim": 8}),
    "gemma2": ("gemma", "float32", {**_FEW, "head_dim": 8, "sliding_window": 8}),
    "gpt2": ("gpt2", "float32", _GPT),
    "gpt_neox": ("gpt2", "float16", {}),
    "phi": ("bert-cased", "bfloat16", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "phi3": ("llama2", "bfloat16", {**_FEW, "pad_token_id": 3, "resid_pdrop": 0.0}),
    "olmo2": ("unigram", "float32", _FEW),
    "granite": ("llama3", "bfloat16", {**_FEW, "shard_bytes": 20_000}),
    "stablelm": ("bert", "bfloat16", _FEW),
    "starcoder2": ("gpt2", "bfloat16", {**_FEW, "residual_dropout": 0.0}),
    "cohere": ("gemma", "bfloat16", _FEW),
}
KEYS = {
    "data.seq_len": 16,
    "data.documents": "joined",
    "data.eval_fraction": 0.2,
    "train.global_batch_size": 2,
    "train.microbatch_size": 1,
    "train.steps": 3,
    "train.learning_rate": 0.01,
    "train.warmup_steps": 0,
    "train.eval_every": 0,
    "train.sample_tokens": 0,
    "train.keep_checkpoints": 3,
}
WEIGHTS = ".safetensors"
FIGURES: list[dict[str, Any]] = []
"""What was compared, by test, for the last one."""


def _two_checkpoints(encoded: bytes, directory: str, address: str) -> None:
    """Load weights, save, train a step, save."""
    torch.set_num_threads(1)
    config = msgspec.json.decode(encoded, type=Config)
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cpu", init_method=address)
    tokenizer = load_tokenizer(config.data.tokenizer)
    trainer = Trainer(config, worker_of(info, Path(directory)), runtime, tokenizer)
    trainer.resume()
    trainer.save()
    trainer.train_step()
    trainer.save()
    shutdown()


def _run_of(name: str | None, keys: dict[str, Any], directory: Path) -> Path:
    """A run directory with checkpoints before and after its first step, made as `hp train` does."""
    directory.mkdir(parents=True)
    paths = [str(write_corpus(directory))]
    given = {**KEYS, "data.paths": paths, **keys}
    resolved = resolve(name, [*given.items()], env={})
    run = directory / "run"
    run.mkdir()
    config = resolved.config
    with Folder.open(run) as folder:
        keep_original(folder, config)
        write_config(folder, resolved)
    tokenizer = load_tokenizer(config.data.tokenizer)
    prepare(run / "data", paths=paths, tokenizer=tokenizer, eval_fraction=0.2)
    address = f"file://{directory}/rendezvous-{uuid4().hex}"
    work = partial(_two_checkpoints, msgspec.json.encode(config), str(run), address)
    run_distributed(work, world_size=1, timeout=300)
    return run


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _tensors(folder: Path) -> dict[str, tuple[str, str, list[int], str]]:
    """File, dtype, shape and hash of every tensor."""
    found = {}
    for path in sorted(folder.glob(f"*{WEIGHTS}")):
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, about in header.items():
            begin, end = (8 + length + offset for offset in about["data_offsets"])
            value = hashlib.sha256(content[begin:end]).hexdigest()
            found[name] = (path.name, about["dtype"], about["shape"], value)
    return found


def _require_same_model(out: Path, source: Path) -> None:
    ours, theirs = _files(out), _files(source)
    assert ours.keys() == theirs.keys()
    others = [name for name in theirs if not name.endswith(WEIGHTS)]
    assert [name for name in others if ours[name] != theirs[name]] == []
    assert _tensors(out) == _tensors(source)
    ids = round_trips.ids_of(source)
    assert round_trips.ids_of(out) == ids
    continued = round_trips.generated(source)
    assert round_trips.generated(out) == continued
    assert any(len(each) < round_trips.MOST for each in continued), "one must stop by itself"
    FIGURES.append(
        {
            "files": len(others),
            "keys": sum(_num_keys(json.loads(theirs[n])) for n in others if n.endswith(".json")),
            "tensors": len(_tensors(source)),
            "ids": sum(map(len, ids)),
            "continued": sum(map(len, continued)),
        }
    )


def _num_keys(values: object) -> int:
    if isinstance(values, list):
        return sum(map(_num_keys, values))
    return sum(1 + _num_keys(v) for v in values.values()) if isinstance(values, dict) else 0


def _require_trained(out: Path, source: Path) -> None:
    """All but the weights is what it was; the weights are others, under the same names."""
    ours, theirs = _files(out), _files(source)
    same_names = {name for name in theirs if not name.endswith(WEIGHTS)} - {"config.json"}
    index = "model.safetensors.index.json"
    assert [n for n in same_names - {index} if ours[n] != theirs[n]] == []
    before, after = (json.loads(files["config.json"]) for files in (theirs, ours))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    assert changed <= {"dtype"}
    trained, came = _tensors(out), _tensors(source)
    assert trained.keys() == came.keys()
    assert any(trained[name][3] != came[name][3] for name in came)
    dtypes = {name: about[1] for name, about in trained.items()}
    assert changed or dtypes == {name: about[1] for name, about in came.items()}
    round_trips.generated(out)


def _exported(run: Path, out: Path, *options: str) -> Path:
    assert main(["export-hf", str(run), str(out), *options]) == 0
    return out


@pytest.mark.sample("qwen3")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_comes_out_as_it_came_in(name: str, tmp_path: Path) -> None:
    tokenizer, dtype, fields = FAMILIES[name]
    source, imported = tmp_path / "source", tmp_path / "in.toml"
    round_trips.write_model(name, source, dtype=dtype, tokenizer=tokenizer, **fields)
    assert main(["import-hf", str(source), "--out", str(imported)]) == 0
    run = _run_of(str(imported), {}, tmp_path / "runs")
    out = _exported(run, tmp_path / "out", "--step", "0")
    _require_same_model(out, source)
    again = tmp_path / "again.toml"
    assert main(["import-hf", str(out), "--out", str(again)]) == 0
    assert (
        again.read_text()
        .replace(str(out), str(source))
        .replace("out/config.json", "source/config.json")
        == imported.read_text()
    )
    _require_trained(_exported(run, tmp_path / "trained"), source)


@pytest.mark.sample("gpt2")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_comes_out_as_it_came_in(name: str, tmp_path: Path) -> None:
    tokenizer, dtype, fields = MODELS[name]
    source = tmp_path / "source"
    round_trips.write_model(name, source, dtype=dtype, tokenizer=tokenizer, **fields)
    keys = {
        "model.transformers": str(source),
        "data.tokenizer": str(source / "tokenizer.json"),
        "train.dtype": {"float16": "float32"}.get(dtype, dtype),
    }
    run = _run_of(None, keys, tmp_path / "runs")
    _require_same_model(_exported(run, tmp_path / "out", "--step", "0"), source)
    _require_trained(_exported(run, tmp_path / "trained"), source)


def test_figures_of_all_round_trips() -> None:
    for key in FIGURES[0] if FIGURES else ():
        print(key, sum(each[key] for each in FIGURES))
    print(len(FIGURES), "models")
