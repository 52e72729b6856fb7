"""A model goes in, and comes out as the model that came in: every file, every key, every id."""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import torch

from hp_base.folder import Folder
from hp_data import load_tokenizer
from hp_data.preparation import prepare
from hp_platform import RankInfo, initialize, shutdown
from hp_platform.testing import run_distributed
from hp_train.cli import main
from hp_trainer.config import Config
from hp_trainer.config.options import resolve
from hp_trainer.launch.rundir import write_config
from hp_trainer.training.trainer import Trainer
from hp_transformers.original import keep_original
from integration_tests.runs import worker_of, write_corpus

transformers = pytest.importorskip("transformers", reason="of `nox -s transformers`")
tokenizers = pytest.importorskip("tokenizers", reason="of `nox -s transformers`")
from integration_tests.models import round_trips  # noqa: E402 - needs tokenizers

pytestmark = pytest.mark.filterwarnings("default")  # of transformers

_MOE = {"num_experts_per_tok": 2, "num_key_value_heads": 2}
_FEW: dict[str, Any] = {"num_key_value_heads": 2}
_GPT = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
_TIED = {"tie_word_embeddings": True, "change": round_trips.repeat_embedding}
_MLA = {
    "num_key_value_heads": 4,
    "change": round_trips.add_prediction,
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
    "llama": ("llama2", "bfloat16", {**_FEW, "change": round_trips.keep_norms}),
    "qwen3": ("qwen", "float32", {**_FEW, **_TIED, "head_dim": 8}),
    "qwen3_moe": ("gpt2", "bfloat16", {**_MOE, **_EXPERTS, "shard_bytes": 20_000}),
    "mixtral": ("gemma", "float16", {**_MOE, "num_local_experts": 4, "sliding_window": None}),
    "deepseek_v3": ("llama3", "bfloat16", _MLA),
    "gpt_oss": ("unigram", "bfloat16", {**_MOE, "num_local_experts": 4, "head_dim": 8}),
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama3", "bfloat16", {**_FEW, "shard_bytes": 20_000}),
    "qwen2": ("qwen", "bfloat16", {**_FEW, **_TIED}),
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
    "stablelm": ("bert", "bfloat16", {**_FEW, "change": round_trips.keep_norms}),
    "starcoder2": ("gpt2", "bfloat16", {**_FEW, "residual_dropout": 0.0, "computed": "float32"}),
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
FIGURES: list[dict[str, int]] = []
"""What was compared of each model."""


@pytest.fixture(scope="module", autouse=True)
def _tell_figures(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    total = {key: sum(each[key] for each in FIGURES) for key in (FIGURES or [{}])[0]}
    captured = request.config.pluginmanager.getplugin("capturemanager")
    with captured.global_and_fixture_disabled():
        sys.stderr.write(f"\nround trips of {len(FIGURES)} models: {total}\n")


def _two_checkpoints(encoded: bytes, directory: str, address: str) -> None:
    """Load weights, save, train a step, save."""
    torch.set_num_threads(1)
    config = msgspec.json.decode(encoded, type=Config)
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cpu", init_method=address)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.separator)
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
        keep_original(folder, resolved)
        write_config(folder, resolved)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.separator)
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


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers_comes_out_as_it_came_in(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, dtype, fields = MODELS[name]
    source = tmp_path / "source"
    fields = dict(fields)
    computed = fields.pop("computed", {"float16": "float32"}.get(dtype, dtype))
    round_trips.write_model(name, source, dtype=dtype, tokenizer=tokenizer, **fields)
    keys = {
        "model.transformers": str(source),
        "data.tokenizer": str(source / "tokenizer.json"),
        "train.dtype": computed,
    }
    run = _run_of(None, keys, tmp_path / "runs")
    _require_same_model(_exported(run, tmp_path / "out", "--step", "0"), source)
    capsys.readouterr()
    _require_trained(_exported(run, tmp_path / "trained"), source)
    told = 'but for dtype ("bfloat16", now "float32": that of the weights)\n'
    is_told = f"config.json as well, {told}" in capsys.readouterr().out
    assert is_told == (name == "starcoder2")


@pytest.mark.parametrize("name", round_trips.TOKENIZERS)
def test_a_model_that_came_from_nothing_stops_where_its_documents_end(
    name: str, tmp_path: Path
) -> None:
    """A tokenizer alone, or with its folder: the export gives its ids and ends at its separator."""
    folder = tmp_path / "tokenizer"
    round_trips.write_tokenizer(name, folder)
    if name in ("gpt2", "unigram"):
        (folder / "tokenizer_config.json").unlink()
    elif name in ("llama3", "bert"):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        del settings["tokenizer_class"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    file = folder / "tokenizer.json"
    shape = {"model.num_layers": 1, "model.vocab_size": round_trips.VOCAB}
    shape["model.tie_embeddings"] = False
    # Of a Qwen without a class of its tokenizer, transformers makes Qwen's, with other ids.
    preset = "debug-qwen3" if name in ("llama3", "bert") else "debug-llama3"
    run = _run_of(preset, {"data.tokenizer": str(file), **shape}, tmp_path / "runs")
    out = _exported(run, tmp_path / "out")
    used = load_tokenizer(str(file))
    settings = json.loads((out / "config.json").read_text())
    assert settings["eos_token_id"] == used.separator
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    texts = [*round_trips.strings()]
    plain = tokenizers.Tokenizer.from_file(str(file))
    expected = [plain.encode(text, add_special_tokens=False).ids for text in texts]
    assert loaded(texts, add_special_tokens=False).input_ids == expected
    made = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert made.generation_config.eos_token_id == used.separator
    assert made.generation_config.bos_token_id == settings["bos_token_id"]
    with torch.no_grad():
        made.lm_head.weight[:] = 0.0
        made.lm_head.weight[used.separator] = made.model(torch.tensor([[5]]))[0][0, -1]
    assert made.generate(torch.tensor([[5]]), max_new_tokens=9).tolist() == [[5, used.separator]]


def test_another_tokenizer_than_the_models_goes_with_its_own_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, other = tmp_path / "source", tmp_path / "other"
    round_trips.write_model("llama", source, dtype="float32", tokenizer="llama2")
    round_trips.add_settings(source, eos_token_id=9)
    round_trips.write_tokenizer("qwen", other)
    keys = {"model.transformers": str(source), "data.tokenizer": str(other / "tokenizer.json")}
    run = _run_of(None, keys, tmp_path / "runs")
    out = _exported(run, tmp_path / "out", "--step", "0")
    used = load_tokenizer(str(other / "tokenizer.json"))
    told = capsys.readouterr().out
    reason = f"now {used.separator}: what ends documents of the run)"
    assert f"config.json as well, but for eos_token_id (9, {reason}\n" in told
    assert "generation_config.json is as it came, but for eos_token_id ([" in told
    assert "tokenizer.model: of the model's own tokenizer, which the run does not use\n" in told
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text())["eos_token_id"] == used.separator
    assert not (out / "tokenizer.model").exists()
    assert (out / "README.md").exists()
    files = _files(other)
    assert {name: content for name, content in _files(out).items() if name in files} == files


def test_a_separator_that_is_named_ends_what_is_generated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    round_trips.write_model("llama", source, dtype="float32", tokenizer="llama2")
    keys = {"model.transformers": str(source), "data.tokenizer": str(source / "tokenizer.json")}
    run = _run_of(None, {**keys, "data.separator": "<|im_end|>"}, tmp_path / "runs")
    out = _exported(run, tmp_path / "out", "--step", "0")
    told = capsys.readouterr().out
    end = transformers.AutoTokenizer.from_pretrained(out).convert_tokens_to_ids("<|im_end|>")
    reason = f"now {end}: what ends documents of the run)"
    assert f"config.json as well, but for eos_token_id (2, {reason}\n" in told
    made = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert made.config.eos_token_id == made.generation_config.eos_token_id == end


def test_an_index_names_no_tensor_that_is_not_written(tmp_path: Path) -> None:
    """A tied model of which the index lists an output matrix that no file has."""
    source = tmp_path / "source"
    fields: dict[str, Any] = {**_FEW, "tie_word_embeddings": True, "shard_bytes": 20_000}
    round_trips.write_model("qwen2", source, dtype="float32", tokenizer="qwen", **fields)
    index = source / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["lm_head.weight"] = listed["weight_map"]["model.embed_tokens.weight"]
    index.write_text(json.dumps(listed))
    keys = {"model.transformers": str(source), "data.tokenizer": str(source / "tokenizer.json")}
    run = _run_of(None, keys, tmp_path / "runs")
    out = _exported(run, tmp_path / "out", "--step", "0")
    written = json.loads((out / index.name).read_text())["weight_map"]
    assert {name: about[0] for name, about in _tensors(out).items()} == written
    assert _tensors(out) == _tensors(source)
    shutil.rmtree(run / "original")
    (run / "original.json").unlink()
    named = _exported(run, tmp_path / "named", "--step", "0", "--original", str(source))
    assert _files(named) == _files(out)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_run_that_read_bytes_exports_them_as_a_tokenizer(tmp_path: Path) -> None:
    shape = {"model.num_layers": 1}
    run = _run_of("debug-qwen3-moe", shape, tmp_path / "runs")
    out, used = _exported(run, tmp_path / "out"), load_tokenizer("")
    loaded = transformers.AutoTokenizer.from_pretrained(out)
    texts = [text.replace("\0", "") for text in round_trips.strings()]
    expected = [used.encode(text).tolist() for text in texts]
    assert loaded(texts).input_ids == expected
    assert loaded.batch_decode(expected) == texts
    assert (loaded.eos_token_id, len(loaded)) == (used.separator, used.vocab_size)
    made = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert made.config.eos_token_id == made.generation_config.eos_token_id == used.separator
    imported = tmp_path / "again.toml"
    assert main(["import-hf", str(out), "--out", str(imported)]) == 0
    assert resolve(str(imported), env={}).config.data.tokenizer == ""
    again = _run_of(str(imported), {"data.seq_len": 16}, tmp_path / "more")
    _require_same_files(_exported(again, tmp_path / "same", "--step", "0"), out)


def _require_same_files(out: Path, source: Path) -> None:
    ours, theirs = _files(out), _files(source)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if ours[name] != theirs[name]] == []


def test_a_run_that_hp_train_made_and_somebody_moved_gives_all_of_it_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Llama with a chat template and added tokens: by the command, moved, without its folder."""
    source, kept, imported = tmp_path / "source", tmp_path / "kept", tmp_path / "in.toml"
    round_trips.write_model("llama", source, dtype="bfloat16", tokenizer="llama2", **_FEW)
    (source / ".cache").mkdir()
    (source / ".cache" / "lock").write_text("")
    shutil.copytree(source, kept, ignore=shutil.ignore_patterns(".cache"))
    assert main(["import-hf", str(source), "--out", str(imported)]) == 0
    given = {**KEYS, "run.output_dir": tmp_path / "runs", "run.name": "run", "mesh.dp_shard": 2}
    flags = [f"{key}={value}" for key, value in given.items()]
    flags += ["--data", str(write_corpus(tmp_path))]
    assert main(["train", str(imported), *flags]) == 0
    (tmp_path / "runs" / "run").rename(tmp_path / "moved")
    shutil.rmtree(source)
    capfd.readouterr()
    out = _exported(tmp_path / "moved", tmp_path / "out")
    told = capfd.readouterr().out
    assert "other files are as they came, config.json too\n" in told
    assert "left out: .cache: of programs, not of the model\n" in told
    _require_trained(out, kept)
    chat = [{"role": "user", "content": "What is 3 squared?"}]
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(each) for each in (out, kept))
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(
        chat, tokenize=False
    )
    assert round_trips.ids_of(out) == round_trips.ids_of(kept)


def test_text_that_was_read_as_bytes_though_there_is_a_tokenizer_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    round_trips.write_model("llama", source, dtype="float32", tokenizer="gemma", **_FEW)
    run = _run_of(None, {"model.transformers": str(source)}, tmp_path / "runs")
    note = f"note: text is read as bytes: data.tokenizer does not name that of {source}\n"
    assert note in capsys.readouterr().err
    _exported(run, tmp_path / "out", "--step", "0")
    told = "the tokenizer is the model's, but the run has read text as bytes (data.tokenizer)\n"
    assert told in capsys.readouterr().out
    _require_same_model(tmp_path / "out", source)


@pytest.fixture
def _code_is_forgotten() -> Iterator[None]:
    """Remove the copies of a model's code that transformers keeps."""
    yield
    kept = Path(transformers.dynamic_module_utils.HF_MODULES_CACHE) / "transformers_modules"
    for name in ("tidal_source", "original"):
        shutil.rmtree(kept / name, ignore_errors=True)


@pytest.mark.usefixtures("_code_is_forgotten")
def test_code_of_a_model_comes_along_and_runs_only_when_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, own = tmp_path / "tidal_source", Path(__file__).parent / "own_architecture"
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    trusted = {"trust_remote_code": True}
    config = transformers.AutoConfig.from_pretrained(own, **trusted, **sizes, **heads)
    transformers.AutoModelForCausalLM.from_config(config, **trusted).save_pretrained(source)
    shutil.copytree(own, source, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.json"))
    path = source / "config.json"
    auto_map = json.loads((own / "config.json").read_text())["auto_map"]
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map}))
    keys = {"model.transformers": str(source), "model.trust_remote_code": True}
    run = _run_of(None, {**keys, "train.dtype": "float32"}, tmp_path / "runs")
    assert main(["export-hf", str(run), str(tmp_path / "out"), "--step", "0"]) == 2
    assert "--trust-remote-code must be given: config.json of the" in capsys.readouterr().err
    out = _exported(run, tmp_path / "out", "--step", "0", "--trust-remote-code")
    ours, theirs = _files(out), _files(source)
    assert {n: c for n, c in ours.items() if not n.endswith(WEIGHTS)} == {
        n: c for n, c in theirs.items() if not n.endswith(WEIGHTS)
    }
    assert _tensors(out) == _tensors(source)
    assert "modeling_tidal.py" in ours
