import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from hp_base.errors import ConfigError
from hp_train import __version__
from hp_train.cli import main
from hp_trainer import plugins
from hp_trainer.config.options import split_overrides

# Ends the program at once if anything imports torch.
_WITHOUT_TORCH = """
import sys
class Blocker:
    def find_spec(self, name, *rest):
        if name.partition(".")[0] in ("torch", "hp_platform", "numpy"):
            sys.exit("imported " + name)
sys.meta_path.insert(0, Blocker())
from hp_train.cli import main
sys.argv[0] = "hp"
sys.exit(main())
"""


def hp(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command where importing torch is fatal."""
    search = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    return subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": ":".join(str(Path(p).absolute()) for p in search)},
    )


def test_a_bad_config_is_answered_before_torch_is_imported(tmp_path: Path) -> None:
    end = hp("train", "--mesh.ep", "3", cwd=tmp_path)
    assert (end.returncode, end.stdout) == (2, "")
    assert end.stderr == ("error: mesh.ep (3) must divide mesh.dp_replicate (2); nearest: 2\n")
    assert list(tmp_path.iterdir()) == []


def test_a_good_config_is_checked_without_torch() -> None:
    end = hp("train", "--dry-run", "train.steps=3")
    assert (end.returncode, end.stderr) == (0, "")
    assert "4 processes, pp 2 x dp_replicate 2 (ep 2), 3 steps" in end.stdout


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("import-hf", "nope"), '"nope" must be a folder with a config.json'),
        (("export-hf", "nope", "out"), '("nope") must be a run directory'),
        (("export-dcp", "nope", "out"), '("nope") must be a run directory'),
    ],
)
def test_a_folder_that_is_missing_is_told_before_torch_is_imported(
    command: tuple[str, ...], told: str, tmp_path: Path
) -> None:
    end = hp(*command, cwd=tmp_path)
    assert (end.returncode, end.stdout) == (2, "")
    assert told in end.stderr


def test_a_dry_run_shows_the_sizes_of_all_stages(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["mesh.stage_tp=[1,2]", "mesh.ep=1", "mesh.stage_ep=[1,4]"]
    assert main(["train", "--dry-run", *keys]) == 0
    mesh = "6 processes, pp 2 x dp_replicate 2 x tp [1, 2] (ep [1, 4])"
    assert mesh in capsys.readouterr().out


@pytest.mark.parametrize("what", ["-- python job.py", "--checkpoint a b", "--curves a b"])
def test_what_hp_verify_does_is_told_where_it_is_looked_for(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *what.split()]) == 2
    asked = what.split(maxsplit=1)[0]
    told = f"error: hp verify takes a config: run hp-verify {asked} ...\n"
    assert capsys.readouterr() == ("", told)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train --steps 5", "--steps is not a known option; did you mean --train.steps?"),
        ("train --lr 1", "--lr is not a known option; did you mean --train.learning_rate?"),
        ("train --train.lora_rank 8", "unknown key train.lora_rank: hp train changes all weights"),
        ("train --lora", "--lora is not a known option: hp train changes all weights"),
        ("train --train.ema 1", "unknown key train.ema: hp train keeps no average"),
        ("train --data.weights 1", "unknown key data.weights: all of data.paths is read once"),
        ("train --lr_scheduler x", "--lr_scheduler is not a known option: the rate goes up in"),
        ("train --nodes 2", "--nodes is not a known option: torchrun or Slurm"),
        ("train --train.lion true", "unknown key train.lion: the optimizer is AdamW"),
        ("train --batch_size=8", "did you mean --train.global_batch_size?"),
        ("train --train.lr 1", "unknown key train.lr; did you mean train.learning_rate?"),
        ("train --resum x", "--resum is not a known option; did you mean --resume?"),
        ("train --trian.steps 5", "unknown key trian.steps; did you mean train.steps?"),
        ("train --train.steps", "--train.steps must be followed by a value"),
        ("train quikstart", "did you mean quickstart?"),
        ("train a.toml b.toml", "unrecognized arguments: b.toml"),
        ("tran", "invalid choice: 'tran'"),
        ("", "the following arguments are required: COMMAND"),
        ("train --data", "argument --data: expected at least one argument"),
        ("train --data nowhere", 'data.paths ("nowhere") must exist'),
        ("train --resume nowhere", 'run.resume ("nowhere") must be a run directory'),
        ("train --data x --data.paths y", "data.paths"),
        ("config --json --origins", "not allowed with argument --json"),
        ("doctor --train.steps 5", "hp doctor takes no --train.steps"),
    ],
)
def test_a_wrong_command_line_is_answered_in_one_line(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_wrong_config_is_told_once_per_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["train"]) == 2
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert main(["train"]) == 2
    assert "must equal WORLD_SIZE (8)" in capsys.readouterr().err


@pytest.mark.parametrize("command", [("train", "--dry-run"), ("verify", "quickstart")])
def test_a_package_that_plans_steps_is_missed_before_ranks_start(
    command: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plugins, "entry_points", lambda **_: ())
    plugins._points.cache_clear()
    try:
        planned = ("--data.packing", "planned", "--pipeline.stages_per_rank", "1")
        assert main([*command, *planned]) == 2
    finally:
        plugins._points.cache_clear()
    assert capsys.readouterr().err == (
        'error: data.packing ("planned") needs a package that is not installed: '
        "pip install hp-packing\n"
    )


def test_overrides_are_taken_out_of_a_command_line() -> None:
    arguments = ["train", "--train.steps", "-1", "my.toml", "--mesh.pp=2", "run.name=a=b", "--x"]
    overrides, rest = split_overrides(arguments)
    assert overrides == [("train.steps", "-1"), ("mesh.pp", "2"), ("run.name", "a=b")]
    assert rest == ["train", "my.toml", "--x"]


def test_keys_may_be_written_with_dashes() -> None:
    assert split_overrides(["--train.global-batch-size", "8"])[0] == [
        ("train.global_batch_size", "8")
    ]


def test_a_switch_needs_no_value() -> None:
    overrides, rest = split_overrides(["--run.tensorboard", "--dry-run"])
    assert (overrides, rest) == ([("run.tensorboard", "true")], ["--dry-run"])
    with pytest.raises(ConfigError, match="must be followed by a value"):
        split_overrides(["--train.steps", "--dry-run"])


def test_data_is_short_for_data_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.touch()
    b.touch()
    assert main(["config", "--json", "--data", str(a), str(b)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["config"]["data"]["paths"] == [str(a), str(b)]
    assert content["origins"]["data.paths"] == "command line"


def test_the_printed_config_is_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "train.steps=9"]) == 0
    printed = capsys.readouterr().out
    assert "# Updates of the weights.\nsteps = 9  # command line\n" in printed
    path = tmp_path / "printed.toml"
    path.write_text(printed)
    assert main(["config", str(path), "--origins"]) == 0
    lines = capsys.readouterr().out
    assert f"train.steps = 9  # {path}:" in lines
    assert tomllib.loads(lines) == tomllib.loads(printed)


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"hp {__version__}\n"


def test_the_module_is_the_command() -> None:
    end = subprocess.run(
        [sys.executable, "-m", "hp_train", "config", "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(end.stdout)["config"]["mesh"]["pp"] == 2
