"""The launcher with two ranks that only pretend to train: see `train_launch_ranks`."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from hp_base.errors import ConfigError
from hp_base.folder import Folder
from hp_trainer.config.options import Resolved, resolve
from hp_trainer.launch import launcher
from hp_trainer.launch.heartbeats import Heartbeats, Slot, State
from hp_trainer.launch.rundir import locked
from hp_trainer.launch.supervise import kill_ranks, process_state

_WAIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _ranks_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)


def resolved(folder: Path, name: str, *overrides: tuple[str, object]) -> Resolved:
    given: dict[str, object] = {
        "run.output_dir": str(folder),
        "run.name": name,
        "mesh.pp": 1,
        "pipeline.stages_per_rank": 1,
        "launch.max_restarts": 0,
    }
    return resolve("quickstart", [*(given | dict(overrides)).items()], env={})


def run(folder: Path, name: str, entry: str = "trains", *overrides: tuple[str, object]) -> int:
    return launcher.run(resolved(folder, name, *overrides), _entry=f"train_launch_ranks:{entry}")


def run_entry(folder: Path, entry: str) -> int:
    """Ranks that have nothing to save."""
    config = resolved(folder, "unused").config
    return launcher.run_entry(config, folder, entry=f"train_launch_ranks:{entry}")


def test_the_launcher_of_a_new_run_does_without_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from hp_trainer.launch import launcher
from hp_trainer.config.options import resolve
given = {{"run.output_dir": {str(tmp_path)!r}, "mesh.pp": 1, "pipeline.stages_per_rank": 1}}
resolved = resolve("quickstart", [*given.items()], env={{}})
status = launcher.run(resolved, _entry="train_launch_ranks:returns")
sys.exit(status or "torch" in sys.modules)
"""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])
    }
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=False)
    assert done.returncode == 0


def test_ranks_share_the_cores_and_collect_garbage(tmp_path: Path) -> None:
    assert run(tmp_path, "shared", "shares_cores", ("launch.threads_per_process", 3)) == 0
    told = [(tmp_path / "shared" / f"rank-{rank}").read_text() for rank in (0, 1)]
    assert told == [f"3 [{int(os.SCHED_BATCH)}] True"] * 2


def when_started(run_dir: Path, act: Callable[[int], None]) -> threading.Thread:
    """Call something with the pid of rank 0 as soon as the ranks are at step 2."""

    def wait() -> None:
        deadline = time.monotonic() + _WAIT_SECONDS
        while not (run_dir / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        act(int((run_dir / "started").read_text()))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def ask_when_started(run_dir: Path, *signals: int, seconds_between: float = 0.8) -> list[int]:
    """Send the launcher signals as soon as the ranks are at step 2; then the pid of rank 0."""
    pids: list[int] = []

    def ask(pid: int) -> None:
        pids.append(pid)
        send(*signals, seconds_between=seconds_between)

    when_started(run_dir, ask)
    return pids


def send(*signals: int, seconds_between: float = 0.8) -> None:
    for number, signum in enumerate(signals):
        if number:
            time.sleep(seconds_between)
        os.kill(os.getpid(), signum)


def test_ranks_that_return_make_a_run_that_succeeds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "new", "good", "returns") == 0
    run_dir = tmp_path / "new" / "good"
    assert [(run_dir / f"rank-{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
    assert tomllib.loads((run_dir / "config.toml").read_text())["mesh"]["dp_replicate"] == 2
    assert not (run_dir / "heartbeat").exists()
    assert not (run_dir / "errors").exists()
    out, err = capfd.readouterr()
    assert (out, err) == (f"{run_dir}\n", "")


@pytest.mark.parametrize(
    ("fault", "status", "line"),
    [
        ("value-error", 1, "rank 1 failed at step 2 (reduce): ValueError: the sum of two lines"),
        ("data-error", 3, "rank 1 failed at step 2 (reduce): corpus.jsonl:3 must be JSON"),
        ("exit", 7, "rank 1 was lost at step 2 (reduce): its process ended with status 9"),
        ("exit-zero", 7, "rank 1 was lost at step 2 (reduce): its process ended without a result"),
        ("SIGKILL", 7, "rank 1 was lost at step 2 (reduce): killed by SIGKILL"),
    ],
)
def test_a_rank_that_fails_ends_the_run_by_its_name(
    fault: str, status: int, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    at: list[float] = []
    when_started(tmp_path / fault, lambda _pid: at.append(time.monotonic()))
    assert run(tmp_path, fault) == status
    assert time.monotonic() - at[0] < 60  # no time-out has passed; 1 s on an idle machine
    err = capfd.readouterr().err.splitlines()
    assert err[0] == f"error: {line}"
    error_file = tmp_path / fault / "errors" / "rank-1.txt"
    if status in (1, 3):
        assert err[1:] == [f"traceback: {error_file}"]
        assert "in _fault" in error_file.read_text()
    else:
        assert len(err) == 1


def test_ranks_that_die_all_at_once_end_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def kill_all(_pid: int) -> None:
        kill_ranks(Heartbeats.attach(tmp_path / "all" / "heartbeat", rank=0).slots())

    when_started(tmp_path / "all", kill_all)
    assert run(tmp_path, "all") == 7
    (line,) = capfd.readouterr().err.splitlines()
    assert "was lost at step" in line


def test_a_process_that_does_not_end_after_its_work_does_not_keep_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "_REAP_SECONDS", 0.3)
    assert run(tmp_path, "done", "leaves_a_thread") == 0


@pytest.mark.parametrize(("fault", "how"), [("SIGSTOP", "is stopped"), ("sleeps", "hangs")])
def test_a_hang_is_named_with_the_place_and_the_stack(
    fault: str, how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Longer than a busy machine takes to connect two ranks.
    assert run(tmp_path, fault, "trains", ("launch.hang_seconds", 5.0)) == 5
    err = capfd.readouterr().err
    assert f"error: rank 1 {how} at step 2 (reduce): no progress of any rank for 5 s\n" in err
    assert ("in _fault" in err) == (fault == "sleeps")


def test_ranks_are_started_again_after_one_is_lost_or_hangs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "faults").write_text("SIGKILL SIGSTOP none")
    keys = (("launch.max_restarts", 2), ("launch.hang_seconds", 5.0))
    assert run(tmp_path, "again", "trains_in_attempts", *keys) == 0
    assert capfd.readouterr().err.splitlines() == [
        "error: rank 1 was lost at step 2 (reduce): killed by SIGKILL",
        "starting again from the beginning (1 of 2)",
        "error: rank 1 is stopped at step 2 (reduce): no progress of any rank for 5 s",
        "starting again from the beginning (2 of 2)",
    ]


def test_restarts_end_where_no_checkpoint_comes_between_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three checkpoints come in all; the fault comes back every time."""
    (tmp_path / "faults").write_text("SIGKILL " * 9)
    assert run(tmp_path, "saving", "trains_in_attempts", ("launch.max_restarts", 1)) == 7
    again = [line for line in capfd.readouterr().err.splitlines() if "again" in line]
    assert again == [f"starting again from step-0000000{n} (1 of 1)" for n in (1, 2, 3)]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_launcher_saves_on_all_ranks_at_one_step(
    signum: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    when_started(tmp_path / "asked", lambda _pid: send(signum))
    assert run(tmp_path, "asked") == 75
    steps = {(tmp_path / "asked" / f"saved-{rank}").read_text() for rank in (0, 1)}
    assert len(steps) == 1
    assert f"hp train --resume {tmp_path / 'asked'}\n" in capfd.readouterr().err


def test_a_signal_to_one_rank_saves_on_all_ranks(tmp_path: Path) -> None:
    when_started(tmp_path / "one", lambda pid: os.kill(pid, signal.SIGTERM))
    assert run(tmp_path, "one") == 75
    assert all((tmp_path / "one" / f"saved-{rank}").exists() for rank in (0, 1))


def test_a_second_signal_ends_everything_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Long enough for the ranks to notice the first, on a busy machine too.
    pids = ask_when_started(tmp_path / "twice", signal.SIGTERM, signal.SIGINT, seconds_between=2.5)
    assert run(tmp_path, "twice", "never_saves") == 130
    assert process_state(pids[0]) == ""
    assert re.search(r"stopped at once, rank [01] was at step 7 \(save\)", capfd.readouterr().err)


def test_ranks_that_do_not_save_in_time_are_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    when_started(tmp_path / "slow", lambda _pid: send(signal.SIGTERM))
    status = run(tmp_path, "slow", "never_saves", ("launch.stop_grace_seconds", 0.5))
    assert status == 128 + signal.SIGTERM
    assert "by force, not done saving after 0.5 s" in capfd.readouterr().err


def test_a_signal_ends_ranks_that_have_nothing_to_save_at_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pids = ask_when_started(tmp_path, signal.SIGTERM)
    assert run_entry(tmp_path, "trains") == 128 + signal.SIGTERM
    assert process_state(pids[0]) == ""
    assert re.search(r"^stopped at once, rank [01] was at step \d+ ", capfd.readouterr().err)


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2])
def test_a_signal_while_ranks_start_ends_those_that_have_nothing_to_save(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        launcher,
        "_start_server",
        lambda _entry: threading.Timer(seconds, send, [signal.SIGTERM]).start(),
    )
    assert run_entry(tmp_path, "trains") == 128 + signal.SIGTERM
    assert not multiprocessing.active_children()


def test_a_signal_that_comes_while_ranks_return_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned = Heartbeats.slots

    def slots(heartbeats: Heartbeats) -> list[Slot]:
        found = returned(heartbeats)
        if all(slot.state is State.RETURNED for slot in found) and not sent:
            sent.append(signal.SIGTERM)
            send(signal.SIGTERM)
        return found

    sent: list[int] = []
    monkeypatch.setattr(Heartbeats, "slots", slots)
    assert run_entry(tmp_path, "returns") == 128 + signal.SIGTERM


def test_a_signal_before_any_process_exists_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "_start_server", lambda _entry: send(signal.SIGTERM))
    assert run(tmp_path, "early") == 75
    assert "before any process was started, nothing to save" in capfd.readouterr().err


@pytest.mark.parametrize("seconds", [0.05, 0.2])
def test_a_signal_while_ranks_start_stops_them_when_they_have(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        launcher,
        "_start_server",
        lambda _entry: threading.Timer(seconds, send, [signal.SIGTERM]).start(),
    )
    assert run(tmp_path, "starting") == 75


def test_the_caller_has_its_handlers_and_variables_after_a_run(tmp_path: Path) -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    variables = dict(os.environ)
    assert run(tmp_path, "good", "returns") == 0
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == before
    assert dict(os.environ) == variables


def test_a_name_is_used_once_and_resumed_by_its_folder(tmp_path: Path) -> None:
    assert run(tmp_path, "named", "returns") == 0
    with pytest.raises(ConfigError, match="must be new in"):
        run(tmp_path, "named", "returns")
    again = resolve(None, [("run.resume", str(tmp_path / "named")), ("run.seed", 3)], env={})
    assert launcher.run(again, _entry="train_launch_ranks:returns") == 0
    saved = tomllib.loads((tmp_path / "named" / "config.toml").read_text())
    assert saved["run"]["seed"] == 3
    assert "resume" not in saved["run"]


def test_runs_without_a_name_get_folders_of_their_own(tmp_path: Path) -> None:
    for _ in range(2):
        assert run(tmp_path, "", "returns") == 0
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert all(name.startswith("quickstart-") for name in names)


def test_a_run_directory_is_used_by_one_launcher(tmp_path: Path) -> None:
    used = pytest.raises(ConfigError, match="in use by another")
    with Folder.open(tmp_path) as folder, locked(folder), used as caught, locked(folder):
        pass
    assert f"process {os.getpid()} of user {os.getuid()} (" in str(caught.value)


def test_a_missing_gpu_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r'launch.device \("cuda"\)'):
        run(tmp_path, "gpu", "returns", ("launch.device", "cuda"))
