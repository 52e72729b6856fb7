"""What may change when a run is resumed, and what is refused before anything is touched."""

import shutil
from pathlib import Path

import pytest

from hp_base.errors import CheckpointError, ConfigError
from hp_base.folder import Folder
from hp_data import load_tokenizer
from hp_data.preparation import prepare
from hp_train.cli import main
from hp_trainer.config import Config, to_dict
from hp_trainer.config.options import resolve
from hp_trainer.config.schema import fields
from hp_trainer.launch.rundir import write_config
from hp_trainer.training.resuming import require_same_position


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with config and data."""
    text = tmp_path / "text.txt"
    text.write_text("some words in a row\n" * 1000)
    run = tmp_path / "run"
    run.mkdir()
    write_config(Folder.open(run), resolve("quickstart", [("data.paths", [str(text)])], env={}))
    prepare(run / "data", paths=[str(text)], tokenizer=load_tokenizer(""), eval_fraction=0.02)
    return run


def _resume(run: Path, *arguments: str) -> int:
    return main(["train", "--dry-run", "--resume", str(run), *arguments])


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("run.seed", "1", "run.seed (1) must equal run.seed (0) of "),
        ("data.field", "body", 'data.field ("body") must equal data.field ("") of '),
        ("data.seq_len", "64", "data.seq_len (64) must equal data.seq_len (128) of "),
        (
            "data.eval_fraction",
            "0.1",
            "data.eval_fraction (0.1) must equal",
        ),
        ("model.num_heads", "8", "model.num_heads (8) must equal model.num_heads (4) of "),
        (
            "model.rope_theta",
            "5e5",
            "(500000.0) must equal model.rope_theta (10000.0)",
        ),
        ("model.top_k", "1", "model.top_k (1) must equal model.top_k (2) of "),
    ],
)
def test_what_would_be_another_run_is_refused_and_changes_nothing(
    run: Path, capsys: pytest.CaptureFixture[str], key: str, value: str, says: str
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["train", "--resume", str(run), f"--{key}={value}"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert _resume(run) == 0


@pytest.mark.parametrize(
    "argument",
    [
        "--train.global_batch_size=64",
        "--train.steps=999",
        "--train.learning_rate=1e-4",
        "--mesh.dp_replicate=2",
        "--model.dropout=0.1",
        "--run.seed=0",
        "--data.seq_len=128",
        "--launch.hang_seconds=5",
    ],
)
def test_layout_batch_and_settings_of_the_training_may_change(run: Path, argument: str) -> None:
    assert _resume(run, argument) == 0


def test_the_text_may_have_moved_but_not_changed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "elsewhere.txt"
    shutil.move(tmp_path / "text.txt", moved)
    assert _resume(run) == 0
    assert _resume(run, "--data", str(moved)) == 0
    moved.write_text(moved.read_text() + "more\n")
    assert _resume(run, "--data", str(moved)) == 2
    assert "it goes on with the tokens of that text" in capsys.readouterr().err
    shutil.rmtree(run / "data")
    assert _resume(run) == 2
    assert "must exist" in capsys.readouterr().err


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    config = Config()
    require_same_position({"config": to_dict(config)}, config, tmp_path)
    require_same_position({}, config, tmp_path)
    for section, name, value in (
        ("run", "seed", 3),
        ("data", "seq_len", 24),
        ("model", "num_kv_heads", 1),
    ):
        tables = to_dict(config)
        tables[section][name] = value
        with pytest.raises(ConfigError, match=rf"{section}\.{name} .* must equal .* \({value}\)"):
            require_same_position({"config": tables}, config, tmp_path)


@pytest.mark.parametrize("tables", [[], "", 1, {"data": 1}, {"data": []}])
def test_a_checkpoint_with_something_else_for_a_config_is_refused(
    tmp_path: Path, tables: object
) -> None:
    with pytest.raises(CheckpointError, match="must be tables of keys"):
        require_same_position({"config": tables}, Config(), tmp_path)


def test_a_checkpoint_of_an_older_version_need_not_know_every_key(tmp_path: Path) -> None:
    tables = to_dict(Config())
    del tables["model"]["qk_norm"]
    require_same_position({"config": tables | {"old": {"key": 1}}}, Config(), tmp_path)
    assert "model.qk_norm" in fields()
