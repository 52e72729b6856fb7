"""`hp import-dcp` and `hp export-dcp`: checkpoints of plain torch, there and back."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dcp_states import blank, same, state, world
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hp_base.errors import CheckpointError
from hp_checkpoint.runs import load_latest, save_checkpoint
from hp_platform.testing import run_distributed
from hp_train.cli import main
from hp_train.dcp_command import export_dcp, import_dcp
from hp_trainer.config import Config, to_dict


def rank_writes_both(folder: Path) -> None:
    """A run directory, and what torch itself writes of the same tensors on two ranks."""
    tensors = state()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors["model.w"] = distribute_tensor(tensors["model.w"], mesh, [Shard(0)])
    extra = {"step": 7, "next_sequence": 56, "data": "d", "config": to_dict(Config())}
    save_checkpoint(
        folder / "run" / "checkpoints", step=7, tensors=tensors, extra=extra, group=world(), keep=1
    )
    save({**tensors, "lr": 0.1, "schedule": {"kind": "cosine"}}, checkpoint_id=folder / "of_torch")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    (folder / "run").mkdir()
    run_distributed(rank_writes_both, folder, world_size=2)
    (folder / "run" / "config.toml").touch()
    return folder


@pytest.fixture
def plain(made: Path, tmp_path: Path) -> Path:
    """A copy of torch's checkpoint to damage."""
    return Path(shutil.copytree(made / "of_torch", tmp_path / "plain"))


@pytest.fixture
def folders(made: Path, plain: Path, tmp_path: Path) -> dict[str, Path]:
    return {"plain": plain, "run": made / "run", "new": tmp_path / "new"}


def rank_loads(run: Path) -> tuple[int, dict[str, Any], bool]:
    tensors = blank(state())
    loaded = load_latest(run / "checkpoints", tensors=tensors, group=world())
    assert loaded is not None
    return loaded.step, loaded.extra, same(tensors, state())


def test_what_torch_wrote_on_two_ranks_comes_back_bit_for_bit(plain: Path, tmp_path: Path) -> None:
    assert main(["import-dcp", str(plain), str(tmp_path / "run"), "debug-llama3", "--step=5"]) == 0
    [(step, extra, is_same)] = run_distributed(rank_loads, tmp_path / "run", world_size=1)
    assert is_same
    assert (step, extra["step"], extra["next_sequence"], extra["skipped"]) == (5, 5, 0, 0)
    assert "debug" not in (tmp_path / "run" / "config.toml").read_text().split("[run]")[0]


def test_an_export_is_read_by_torch_and_imported_as_it_was(made: Path, tmp_path: Path) -> None:
    assert main(["export-dcp", str(made / "run"), str(tmp_path / "plain")]) == 0
    tensors = blank(state())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that there is one rank
        load(tensors, checkpoint_id=tmp_path / "plain", no_dist=True)
    assert same(tensors, state())
    assert main(["import-dcp", str(tmp_path / "plain"), str(tmp_path / "run")]) == 0
    [(step, extra, is_same)] = run_distributed(rank_loads, tmp_path / "run", world_size=1)
    assert is_same
    assert (step, extra["next_sequence"], extra["data"]) == (7, 56, "d")


def test_weights_alone_start_with_moments_of_zero(tmp_path: Path) -> None:
    weights = {"model": {"w": torch.arange(6.0).reshape(2, 3)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(weights, checkpoint_id=tmp_path / "plain", no_dist=True)
    arguments = [str(tmp_path / "plain"), str(tmp_path / "run"), "debug-llama3", "--step=9"]
    assert main(["import-dcp", *arguments]) == 0
    [found] = run_distributed(rank_loads_weights, tmp_path / "run", world_size=1)
    assert found == (9, 9, 0.0, 15.0)


def rank_loads_weights(run: Path) -> tuple[int, int, float, float]:
    names = ("model.w", "optimizer.exp_avg.w", "optimizer.exp_avg_sq.w")
    tensors = {name: torch.ones(2, 3) for name in names}
    loaded = load_latest(run / "checkpoints", tensors=tensors, group=world())
    assert loaded is not None
    moments = float(tensors[names[1]].sum() + tensors[names[2]].sum())
    return loaded.step, loaded.extra["skipped"], moments, float(tensors[names[0]].sum())


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ("import-dcp {plain} {new}", 2, "CONFIG must be given where"),
        ("import-dcp {plain} {plain} debug-llama3", 2, "must be a new folder: File exists"),
        ("import-dcp {new} {new}/run debug-llama3", 4, "the directory is missing"),
        ("import-dcp {plain} {new} debug-llama3 --step=-1", 2, "--step (-1) must be at least 0"),
        ("export-dcp {plain} {new}", 2, "must be a run directory"),
        ("export-dcp {run} {new} --step 3", 4, "must have a checkpoint of step 3"),
        ("export-dcp {run} {plain}", 2, "must be a new folder"),
    ],
)
def test_commands_refuse_in_one_line_and_leave_nothing(
    arguments: str,
    status: int,
    says: str,
    folders: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments.format(**folders).split()) == status
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert not folders["new"].exists()


def test_a_tensor_that_is_no_tensor_comes_with_its_name_left_out(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import-dcp", str(plain), str(tmp_path / "run"), "debug-llama3"]) == 0
    out = capsys.readouterr().out
    assert "left out lr: not a tensor, and pickled\n" in out
    assert "left out schedule.kind: not a tensor, and pickled\n" in out


@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "huge"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "extra.json"])
def test_only_regular_files_of_the_folder_are_opened(
    name: str, kind: str, plain: Path, tmp_path: Path
) -> None:
    file = plain / name
    content = file.read_bytes() if file.exists() else b"{}"
    file.unlink(missing_ok=True)
    if kind == "link":
        (tmp_path / "target").write_bytes(content)
        file.symlink_to(tmp_path / "target")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        file.touch()
        os.truncate(file, 1 << 40)
    with pytest.raises(CheckpointError):
        main_import(plain, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def main_import(plain: Path, run: Path) -> None:
    from hp_trainer.config.options import resolve  # noqa: PLC0415 - next to its only use

    import_dcp(plain, run, resolved=resolve("debug-llama3", env={}), step=None)


def test_a_run_that_does_not_exist_is_not_exported(tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    with pytest.raises(CheckpointError, match="must have a checkpoint"):
        export_dcp(tmp_path, tmp_path / "new", step=None)
