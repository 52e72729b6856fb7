"""A run over experts and stages ends as files that another layout starts from."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from hp_base.folder import Folder
from hp_checkpoint.runs import save_checkpoint
from hp_data import load_tokenizer
from hp_platform import RankInfo, initialize, shutdown
from hp_platform.testing import compare, run_distributed
from hp_train.cli import main
from hp_trainer.config import Config, ModelConfig
from hp_trainer.config.options import resolve, to_toml
from hp_trainer.launch.rundir import write_config
from hp_trainer.model.transformer import model_shapes
from hp_trainer.training.trainer import Trainer
from hp_transformers.families import check_weights, save_weights
from hp_transformers.original import keep_original
from integration_tests.runs import _whole, config_of, train_in, worker_of


def _model(name: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.structs.asdict(resolve(name, env={}).config.model)
    return found


MODEL = _model("debug-deepseek-v3") | {"dropout": 0.0, "correction_rate": 0.05}


def _weights_at_start(encoded: bytes, directory: str, address: str) -> dict[str, torch.Tensor]:
    config = msgspec.json.decode(encoded, type=Config)
    info = RankInfo.from_env()
    assert info is not None
    runtime = initialize(info, device_type="cpu", init_method=address)
    trainer = Trainer(config, worker_of(info, Path(directory)), runtime, load_tokenizer(""))
    trainer.resume()
    whole = _whole(trainer, lambda parameter: parameter.local)
    for stage in trainer.pipeline.modules.values():
        whole |= {name: buffer.clone() for name, buffer in stage.named_buffers()}
    shutdown()
    return whole


def _all_weights(config: Config, directory: Path) -> dict[str, torch.Tensor]:
    """Weights, and biases of every rank's routers, when the training would begin."""
    address = f"file://{directory}/rendezvous-{uuid4().hex}"
    run = partial(_weights_at_start, msgspec.json.encode(config), str(directory), address)
    found: dict[str, torch.Tensor] = {}
    for of_rank in run_distributed(run, world_size=config.world_size, timeout=120):
        found |= of_rank
    return found


def _trained(directory: Path, model: dict[str, Any]) -> tuple[Path, Config]:
    """A run of two steps over experts, with tokens enough to move the biases of all routers."""
    mesh = {"dp_replicate": 2, "ep": 2}
    train = {"steps": 2, "dtype": "bfloat16", "global_batch_size": 16}
    config = config_of(mesh=mesh, model=model, train=train)
    train_in(config, directory, until=2)
    (directory / "config.toml").write_text(to_toml(config))
    return directory, config


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """A run whose routers have biases that move."""
    return _trained(tmp_path_factory.mktemp("trained"), MODEL)


def test_exported_weights_start_another_layout_bit_for_bit(
    trained: tuple[Path, Config], tmp_path: Path
) -> None:
    resumed = _exported_and_started(*trained, tmp_path)
    biases = [value for name, value in resumed.items() if name.endswith("correction_bias")]
    assert biases
    assert all(bool(value.any()) for value in biases), "two steps must have moved the biases"


def test_the_quickstart_is_exported_and_imported_bit_for_bit(tmp_path: Path) -> None:
    (tmp_path / "trained").mkdir()
    _exported_and_started(*_trained(tmp_path / "trained", _model("quickstart")), tmp_path)
    settings = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert settings["architectures"] == ["Qwen3MoeForCausalLM"]


def _exported_and_started(directory: Path, config: Config, folder: Path) -> dict[str, torch.Tensor]:
    """Export a run, start another layout from the files; the weights that both begin with."""
    exported, imported = folder / "exported", folder / "imported.toml"
    assert main(["export-hf", str(directory), str(exported), "--dtype", "float32"]) == 0
    assert check_weights(exported) > 0
    assert main(["import-hf", str(exported), "--out", str(imported)]) == 0
    found = resolve(str(imported), env={}).config
    assert found.run.init_from == str(exported)
    assert found.model.vocab_size == load_tokenizer("").vocab_size
    base = config_of(
        mesh={"pp": 2},
        model=msgspec.structs.asdict(found.model),
        run={"init_from": str(exported)},
        train={"dtype": "float32"},
    )
    (folder / "run").mkdir()
    shutil.copytree(directory / "data", folder / "run" / "data")
    started = _all_weights(base, folder / "run")
    resumed = _all_weights(config, directory)
    comparison = compare(started, resumed)
    assert comparison.ok, comparison
    return resumed


def test_a_run_exports_in_the_dtype_it_computes_in(
    trained: tuple[Path, Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = trained
    assert main(["export-hf", str(directory), str(tmp_path / "out"), "--step", "2"]) == 0
    assert capsys.readouterr().out.endswith("step-00000002, bfloat16\n")
    assert main(["export-hf", str(directory), str(tmp_path / "out")]) == 2
    assert "must have no safetensors files" in capsys.readouterr().err
    assert main(["export-hf", str(directory), str(tmp_path / "new"), "--step", "9"]) == 4
    assert "must have a checkpoint of step 9" in capsys.readouterr().err
    assert main(["export-hf", str(tmp_path), str(tmp_path / "new")]) == 2
    assert main(["import-hf", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_exported(
    trained: tuple[Path, Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, config = trained
    copy = tmp_path / "run"
    source = directory / "checkpoints" / "step-00000002"
    target = copy / "checkpoints" / source.name
    target.mkdir(parents=True)
    (copy / "config.toml").write_text(to_toml(config))
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    path = target / "rank-00000.safetensors"
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        key = next(key for key in header if key.startswith("model."))
        entry = header[key]
        file.seek(8 + length + entry["data_offsets"][0])
        file.write(b"\x7f")
    assert main(["export-hf", str(copy), str(tmp_path / "out")]) == 4
    error = capsys.readouterr().err
    assert f"tensor {key} is not what was saved" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out" / "model.safetensors.index.json").exists()


@pytest.mark.sample("debug-deepseek-v3")
@pytest.mark.parametrize("name", ["debug-deepseek-v3", "debug-gpt-oss"])
def test_a_family_trains_alike_over_stages_and_experts(name: str, tmp_path: Path) -> None:
    model = msgspec.structs.asdict(resolve(name, env={}).config.model) | {"init_std": 0.1}
    train = {"dtype": "float64", "steps": 3}
    alone = train_in(config_of(model=model, train=train), tmp_path / "alone")
    mesh = {"pp": 2, "dp_replicate": 2, "ep": 2}
    pipeline = {"schedule": "1f1b"}
    config = config_of(mesh=mesh, pipeline=pipeline, model=model, train=train)
    spread = train_in(config, tmp_path / "spread")
    comparison = compare(spread.first_gradients, alone.first_gradients, bound=1e-12)
    assert comparison.ok, comparison
    assert spread.losses == pytest.approx(alone.losses, rel=1e-12)
    assert spread.norms == pytest.approx(alone.norms, rel=1e-12)


def _saved_config(encoded: bytes, checkpoints: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    config = msgspec.to_builtins(msgspec.json.decode(encoded, type=Config))
    tensors = {"model.a": torch.zeros(2)}
    save_checkpoint(
        Path(checkpoints), step=1, tensors=tensors, extra={"config": config}, group=group, keep=1
    )


@pytest.mark.parametrize(
    "place", ["outside", "behind a link", "inside", "as a copy", "as an option"]
)
def test_a_strangers_checkpoint_copies_no_file_of_yours(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, run, out = tmp_path / "id_rsa", tmp_path / "run", tmp_path / "out"
    secret.write_text("mine alone")
    run.mkdir()
    named = run / "tokenizer.json" if place in ("behind a link", "inside") else secret
    if place == "behind a link":
        named.symlink_to(secret)
    elif place == "inside":
        named.write_text("{}")
    elif place == "as a copy":
        (run / "tokenizer.json").write_text("{}")
    config = config_of(model=MODEL, data={"tokenizer": str(named)})
    (run / "config.toml").write_text(to_toml(config))
    save = partial(_saved_config, msgspec.json.encode(config), str(run / "checkpoints"))
    run_distributed(save, world_size=1, timeout=60)
    option = ["--tokenizer", str(secret)] if place == "as an option" else []
    # The checkpoint of one tensor is no model: what gets as far as that has passed.
    passes = place in ("inside", "as a copy", "as an option")
    assert main(["export-hf", str(run), str(out), *option]) != 0
    error = capsys.readouterr().err
    assert ("data.tokenizer" not in error) if passes else ("or be given as --tokenizer" in error)
    assert error.count("\n") == 1
    assert passes or not out.exists()


_OTHERS = {
    "generation_config.json": b'{"eos_token_id": [2, 7], "pad_token_id": 3}',
    "tokenizer_config.json": b'{"chat_template": "{{ x }}"}',
    "README.md": b"# mine",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
}


def _source(folder: Path, name: str, dtype: torch.dtype, **keys: Any) -> None:
    """A folder of a model as people publish them, in one file without an index."""
    model = msgspec.convert(_model(name) | {"vocab_size": 256, "max_positions": 64}, ModelConfig)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        tensor: torch.randn(shape, generator=generator).to(dtype).float()
        for tensor, shape in model_shapes(model).items()
    }
    save_weights(folder, tensors, model, dtype=dtype)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(
        json.dumps({"a_key_of_mine": {"deep": [1]}} | json.loads(path.read_text()) | keys)
    )
    for other, content in _OTHERS.items():
        (folder / other).parent.mkdir(exist_ok=True)
        (folder / other).write_bytes(content)


def _files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.sample("debug-qwen3")
@pytest.mark.parametrize("name", ["debug-qwen3", "debug-gpt-oss"])
def test_what_no_step_changes_comes_out_as_it_came_in(name: str, tmp_path: Path) -> None:
    source, imported = tmp_path / "source", tmp_path / "in.toml"
    ids = {"eos_token_id": [2, 7], "bos_token_id": 1, "id2label": {"0": "a"}}
    _source(source, name, torch.bfloat16, **ids)
    assert main(["import-hf", str(source), "--out", str(imported)]) == 0
    keys = {"data.seq_len": 16, "data.eval_fraction": 0.2, "train.steps": 1, "train.eval_every": 0}
    keys |= {"train.global_batch_size": 2, "train.microbatch_size": 2, "train.learning_rate": 0}
    resolved = resolve(str(imported), [*keys.items()], env={})
    run = tmp_path / "run"
    run.mkdir()
    with Folder.open(run) as folder:
        keep_original(folder, resolved)
        write_config(folder, resolved)
    train_in(resolved.config, run, until=1)
    assert main(["export-hf", str(run), str(tmp_path / "out")]) == 0
    ours, theirs = _files(tmp_path / "out"), _files(source)
    assert ours.keys() == theirs.keys()
    weights = "model.safetensors"
    assert load_file(tmp_path / "out" / weights).keys() == load_file(source / weights).keys()
    for tensor, value in load_file(source / weights).items():
        assert torch.equal(load_file(tmp_path / "out" / weights)[tensor], value)
    assert [n for n in theirs if n != weights and ours[n] != theirs[n]] == []
    imported.write_text(imported.read_text().replace(str(source), str(tmp_path / "out")))
    assert main(["import-hf", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("key", ["transformers", "init_from"])
def test_a_strangers_checkpoint_hands_on_no_folder_of_yours(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, run, out = tmp_path / "mine", tmp_path / "run", tmp_path / "out"
    _source(mine, "debug-llama3", torch.float32)
    (mine / "secret.py").write_text("password = 1")
    run.mkdir()
    if key == "transformers":
        config = config_of(model={**MODEL, key: str(mine)})
    else:
        config = config_of(model=MODEL, run={key: str(mine)})
    (run / "config.toml").write_text(to_toml(config))
    save = partial(_saved_config, msgspec.json.encode(config), str(run / "checkpoints"))
    run_distributed(save, world_size=1, timeout=60)
    assert main(["export-hf", str(run), str(out)]) != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert key == "init_from" or "or be given as --original FOLDER" in error
    assert not {*_files(out)} & {*_files(mine)}
