"""Run directories of strangers, that vanish, or that have nothing left to do."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hp_base.errors import CheckpointError, ConfigError, RunDirectoryError
from hp_base.folder import Folder
from hp_checkpoint.files import create_staging
from hp_checkpoint.runs import Loaded
from hp_checkpoint.runs.directory import complete_checkpoints
from hp_train.cli import main
from hp_trainer.config.options import resolve
from hp_trainer.launch import launcher
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.rundir import locked, open_run_directory
from hp_trainer.training.checkpointer import Position
from hp_trainer.training.metrics import MetricsWriter, read_metrics

OURS = b"ours, not to be touched\n" * 9


@pytest.fixture(autouse=True)
def _ranks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    path = tmp_path / "ours"
    path.write_bytes(OURS)
    return path


def new_run(folder: Path, entry: str = "returns") -> tuple[int, Path]:
    keys = {"run.output_dir": str(folder), "run.name": "run", "launch.max_restarts": 0}
    keys |= {"mesh.pp": 1, "pipeline.stages_per_rank": 1}
    resolved = resolve("quickstart", list(keys.items()), env={})
    return launcher.run(resolved, _entry=f"train_launch_ranks:{entry}"), folder / "run"


def resumed(run_dir: Path) -> int:
    resolved = resolve(None, [("run.resume", str(run_dir))], env={})
    return launcher.run(resolved, _entry="train_launch_ranks:returns")


def put_pipe(path: Path, _ours: Path) -> None:
    os.mkfifo(path)


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, ours: path.symlink_to(ours),
    "dangling": lambda path, ours: path.symlink_to(ours.with_name("none")),
    "pipe": put_pipe,
    "folder": lambda path, _: path.mkdir(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", [".lock", "heartbeat", "metrics.jsonl", "loss.svg"])
def test_nothing_but_files_stands_in_place_of_files(
    name: str, kind: str, tmp_path: Path, ours: Path
) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").touch()
    KINDS[kind](run_dir / name, ours)
    with pytest.raises(RunDirectoryError, match=f"{name} must be a regular file"):
        resumed(run_dir)
    assert ours.read_bytes() == OURS
    assert not ours.with_name("none").exists()


@pytest.mark.parametrize("name", ["errors", "data", "checkpoints", "tensorboard"])
@pytest.mark.parametrize("what", ["link", "file", "link inside"])
def test_nothing_but_folders_stands_in_place_of_folders(
    name: str, what: str, tmp_path: Path, ours: Path
) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_dir.mkdir()
    elsewhere.mkdir()
    if what == "link":
        (run_dir / name).symlink_to(elsewhere)
    elif what == "file":
        (run_dir / name).touch()
    else:
        (run_dir / name).mkdir()
        (run_dir / name / "rank-0.txt").symlink_to(ours)
    if (name, what) == ("checkpoints", "link inside"):  # set aside when it is loaded
        open_run_directory(run_dir)
    else:
        with pytest.raises(RunDirectoryError, match=name):
            open_run_directory(run_dir)
    assert not list(elsewhere.iterdir())


def test_another_name_of_somebodys_file_is_never_written_to(tmp_path: Path, ours: Path) -> None:
    status, run_dir = new_run(tmp_path)
    assert status == 0
    for name in (".lock", "heartbeat", "loss.svg"):
        (run_dir / name).unlink(missing_ok=True)
        os.link(ours, run_dir / name)
    before = ours.stat().st_mtime_ns
    assert resumed(run_dir) == 0
    assert (ours.read_bytes(), ours.stat().st_mtime_ns) == (OURS, before)


def test_the_folder_that_a_person_names_may_be_a_link(tmp_path: Path) -> None:
    status, run_dir = new_run(tmp_path)
    assert status == 0
    (tmp_path / "name").symlink_to(run_dir)
    assert resumed(tmp_path / "name") == 0


@pytest.mark.parametrize("how", ["removed", "renamed", "replaced"])
def test_a_run_whose_directory_vanishes_says_so(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from test_trainer_launch import when_started  # noqa: PLC0415

    run_dir = tmp_path / "run"

    def vanish(_pid: int) -> None:
        if how == "removed":
            shutil.rmtree(run_dir)
        else:
            run_dir.rename(tmp_path / "elsewhere")
        if how == "replaced":
            run_dir.mkdir()

    when_started(run_dir, vanish)
    status, _ = new_run(tmp_path, "trains")
    assert status == RunDirectoryError.exit_code == 9
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"error: the run directory ({run_dir}) is gone: it was removed or")
    assert err.count("\n") == 1
    assert run_dir.exists() == (how == "replaced")


@pytest.mark.parametrize(
    "arguments",
    [["--resume", ""], ["--resume="], ["--run.resume="], ["run.resume="], ["{empty}"]],
)
@pytest.mark.parametrize("command", ["train", "config"])
def test_an_empty_name_of_a_run_starts_no_new_one(
    command: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "empty.toml"
    config.write_text('[run]\nresume = ""\n')
    given = [argument.format(empty=config) for argument in arguments]
    assert main([command, *given, *(["--dry-run"] if command == "train" else [])]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert 'run.resume ("") must name a run directory' in err
    assert err.count("\n") == 1


def test_run_directories_of_earlier_versions_name_no_run_and_are_resumed(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[run]\nresume = ""\n')
    assert resolve(None, [("run.resume", str(tmp_path))], env={}).config.run.resume


@pytest.mark.parametrize("content", [b"x" * (2 << 20), b"\xff", b"[train\n"])
def test_a_config_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises((ConfigError, RunDirectoryError), match=r"config\.toml"):
        resolve(None, [("run.resume", str(tmp_path))], env={})


def test_a_pipe_in_place_of_the_config_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.toml")
    with pytest.raises(ConfigError, match="must be a run directory"):
        resolve(None, [("run.resume", str(tmp_path))], env={})


GOOD = {"step": 4, "next_sequence": 32, "skipped": 1, "skipped_in_a_row": 0, "data": None}


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {key: value}
            for key in ("step", "next_sequence", "skipped")
            for value in (-1, True, "4")
        ),
        *({key: 1 << 60} for key in ("step", "next_sequence", "skipped_in_a_row")),
        {"step": 3},
        {"skipped": 5},
        {"skipped_in_a_row": 2},
        {"next_sequence": 4 << 32},
        {"next_sequence": 1.5},
        {"data": 7},
    ],
)
def test_a_position_that_no_run_reaches_is_refused(wrong: dict[str, object]) -> None:
    good = Loaded(4, dict(GOOD), Path("step-00000004"), [])
    assert Position.of(good).next_sequence == 32
    with pytest.raises(CheckpointError, match=r"step-00000004: extra: .*[`(]") as caught:
        Position.of(Loaded(4, GOOD | wrong, Path("step-00000004"), []))
    assert next(iter(wrong)) in str(caught.value)


def test_a_position_needs_all_of_its_numbers() -> None:
    for key in ("step", "next_sequence", "data"):
        extra = {name: value for name, value in GOOD.items() if name != key}
        with pytest.raises(CheckpointError, match=key):
            Position.of(Loaded(4, extra, Path("step-00000004"), []))


def line(**values: object) -> bytes:
    return json.dumps({"step": 1, "loss": 2.0} | values).encode() + b"\n"


@pytest.mark.parametrize(
    "bad",
    [
        b"\n",
        b"[]\n",
        b"\xff\xfe\n",
        b'{"loss": 1.0}\n',
        b'{"step": 2}\n',
        b'{"step": 2, "loss": NaN}\n',
        b'{"step": 2, "loss": 1e999}\n',
        b"[" * 60_000 + b"\n",
        b'{"x": "' + b"y" * 70_000,
        *(line(step=step) for step in (-1, 0, 1, True, "2", 2.0, None, 1 << 60)),
        *(line(step=2, **{key: "1"}) for key in ("loss", "tokens", "lr", "grad_norm")),
        line(step=2, skipped=1),
        line(step=2, tokens=1.5),
    ],
)
def test_lines_that_no_run_writes_are_refused_by_number(bad: bytes, tmp_path: Path) -> None:
    content = line() + bad + line(step=3)
    (tmp_path / "metrics.jsonl").write_bytes(content)
    with Folder.open(tmp_path) as folder:
        with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl:2 must be the JSON of a step"):
            MetricsWriter(folder, resume_step=3, tensorboard=False)
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
        assert (tmp_path / "metrics.jsonl").read_bytes() == content
        # What comes after the checkpoint is done again, whatever it says.
        MetricsWriter(folder, resume_step=1, tensorboard=False).close()
        assert [row["step"] for _, row in read_metrics(folder)] == [1]


def test_an_endless_line_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    os.truncate(tmp_path / "metrics.jsonl", 1 << 40)
    with Folder.open(tmp_path) as folder, pytest.raises(RunDirectoryError, match="jsonl:1 must"):
        list(read_metrics(folder))


def test_a_heartbeat_of_another_size_is_refused(tmp_path: Path) -> None:
    for size in (0, 63, 64, 191, 193):
        (tmp_path / "heartbeat").write_bytes(bytes(size))
        with pytest.raises(RunDirectoryError, match="must have a slot for rank 0"):
            Heartbeats.attach(tmp_path / "heartbeat", rank=0)
    Heartbeats.create(tmp_path / "heartbeat", num_ranks=2)
    with pytest.raises(RunDirectoryError, match="must have a slot for rank 2"):
        Heartbeats.attach(tmp_path / "heartbeat", rank=2)


def test_a_folder_stays_the_one_that_was_opened(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with Folder.open(tmp_path / "a") as folder:
        assert folder.is_here
        (tmp_path / "a").rename(tmp_path / "b")
        assert not folder.is_here
        (tmp_path / "a").mkdir()
        assert not folder.is_here
        folder.replace("file", b"1")
        assert (tmp_path / "b" / "file").read_bytes() == b"1"
        shutil.rmtree(tmp_path / "b")
        with pytest.raises(RunDirectoryError, match="cannot write"):
            folder.replace("file", b"2")
    assert not list((tmp_path / "a").iterdir())


def test_a_file_that_fails_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    with Folder.open(tmp_path) as folder:
        folder.replace("file", b"old")
        with pytest.raises(TypeError), folder.replacing("file") as file:
            file.writelines((b"ne", None))  # type: ignore[arg-type]
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_a_link_to_checkpoints_is_neither_read_nor_written(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "step-00000009").mkdir(parents=True)
    (tmp_path / "checkpoints").symlink_to(elsewhere)
    attempts: list[Callable[[Path], Any]]
    staged = lambda path: create_staging(path, "step-00000003")  # noqa: E731
    attempts = [complete_checkpoints, staged]
    for attempt in attempts:
        with pytest.raises(CheckpointError, match="must be a directory and no symbolic link"):
            attempt(tmp_path / "checkpoints")
    assert [path.name for path in elsewhere.iterdir()] == ["step-00000009"]


@pytest.mark.parametrize(("folder_mode", "mode"), [(0o755, 0o600), (0o775, 0o660)])
def test_who_only_reads_a_run_cannot_lock_it(folder_mode: int, mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(folder_mode)
    lock = tmp_path / ".lock"
    lock.touch(0o644)  # as runs of earlier versions have it
    for _ in range(2):
        with Folder.open(tmp_path) as folder, locked(folder):
            assert lock.stat().st_mode & 0o777 == mode
        lock.unlink(missing_ok=True)


def test_a_name_that_no_folder_can_have_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ([], ["--dry-run"]):
        keys = [f"run.output_dir={tmp_path}", f"run.name={'n' * 300}"]
        assert main(["train", "quickstart", *flags, *keys]) == 2
        assert "must be letters, digits and _ . + - only, 200 at most" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_bytes_of_a_path_that_are_no_text_are_kept_in_the_config_of_a_run(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    status, run_dir = new_run(folder)
    assert status == 0
    saved = resolve(None, [("run.resume", str(run_dir))], env={}).config
    assert saved.run.output_dir == str(folder)
    assert resumed(run_dir) == 0
