"""The launcher as a program of its own: signals to its group, its death, ranks of others."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined] # exported, but untyped

from hp_base.errors import ConfigError
from hp_trainer.config.options import resolve
from hp_trainer.launch import external
from hp_trainer.launch.supervise import process_state

pytestmark = pytest.mark.usefixtures("forked_programs")

_PROGRAM = Path(__file__).with_name("train_launch_ranks.py")
_WAIT_SECONDS = 60.0


@contextmanager
def program(
    entry: str,
    folder: Path,
    *overrides: str,
    env: dict[str, str] | None = None,
    flags: tuple[str, ...] = (),
) -> Iterator[subprocess.Popen[str]]:
    """Run the launcher in a session of its own, of which nothing is left afterwards."""
    options = (f"run.output_dir={folder}", "mesh.pp=1", "pipeline.stages_per_rank=1", *overrides)
    with subprocess.Popen(
        [sys.executable, *flags, str(_PROGRAM), entry, *options],
        env=os.environ | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            end_session(process.pid)


def session(leader: int) -> list[int]:
    """Processes of a session that are alive."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and process_state(int(entry.name)) not in ("", "Z", "X"):
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader:
                found.append(int(entry.name))
    return found


def end_session(leader: int) -> None:
    """Kill what is left of a session."""
    for pid in session(leader):
        with suppress(ProcessLookupError):  # it has ended since
            os.kill(pid, signal.SIGKILL)


def wait_until(path: Path) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def assert_nobody_is_left(leader: int) -> None:
    deadline = time.monotonic() + 60
    while session(leader):
        assert time.monotonic() < deadline, session(leader)
        time.sleep(0.05)


def test_ctrl_c_reaches_the_whole_group_and_saves_once(tmp_path: Path) -> None:
    with program("trains", tmp_path, "run.name=x") as launcher:
        wait_until(tmp_path / "x" / "started")
        os.killpg(launcher.pid, signal.SIGINT)
        out, _ = launcher.communicate(timeout=30)
        assert launcher.returncode == 75
        assert out.splitlines() == [
            "stopping: the ranks save after this step; once more to stop at once",
            f"stopped on request; go on with: hp train --resume {tmp_path / 'x'}",
        ]
        assert (tmp_path / "x" / "saved-1").exists()
        assert_nobody_is_left(launcher.pid)


def test_nobody_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with program("trains", tmp_path, "run.name=x") as launcher:
        wait_until(tmp_path / "x" / "started")
        assert len(session(launcher.pid)) >= 4
        launcher.kill()
        launcher.wait()
        assert_nobody_is_left(launcher.pid)


def test_a_server_that_is_killed_is_named_and_no_rank_is_blamed(tmp_path: Path) -> None:
    with program("trains", tmp_path, "run.name=x", "launch.max_restarts=0") as launcher:
        wait_until(tmp_path / "x" / "started")
        rank = int((tmp_path / "x" / "started").read_text())
        server = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(server, signal.SIGKILL)
        out, _ = launcher.communicate(timeout=30)
        assert launcher.returncode == 7
        assert re.fullmatch(
            r"error: the server that ranks are forked from was lost at step \d+ \(\w+\): "
            "killed by SIGKILL\n",
            out,
        )
        assert_nobody_is_left(launcher.pid)


def test_a_rank_that_is_killed_leaves_nothing_that_the_end_of_the_run_warns_of(
    tmp_path: Path,
) -> None:
    keys = ("run.name=SIGKILL", "launch.max_restarts=0")
    with program("draws_a_bar", tmp_path, *keys) as launcher:
        out, _ = launcher.communicate(timeout=60)
        assert (launcher.returncode, len(out.splitlines())) == (7, 1), out
        assert out.startswith("error: rank 1 was lost at step ")


@pytest.mark.sample
def test_a_long_path_for_temporary_files_is_no_reason_to_end(tmp_path: Path) -> None:
    long = tmp_path / ("t" * 100)
    long.mkdir()
    # With a flag it has an interpreter of its own, which reads the variable.
    with program(
        "returns", tmp_path, "run.name=x", env={"TMPDIR": str(long)}, flags=("-s",)
    ) as launcher:
        out, _ = launcher.communicate(timeout=60)
        assert (launcher.returncode, out) == (0, f"{tmp_path / 'x'}\n")
    assert not list(long.glob("pymp-*"))


@pytest.mark.sample
def test_no_file_beside_a_run_is_taken_for_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("multiprocessing", "signal", "socket", "struct"):
        (tmp_path / f"{name}.py").write_text("open('taken', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    # With a flag it has an interpreter of its own, and so has its server.
    with program("returns", tmp_path, "run.name=x", flags=("-s",)) as launcher:
        out, _ = launcher.communicate(timeout=60)
        assert (launcher.returncode, out) == (0, f"{tmp_path / 'x'}\n")
    assert not (tmp_path / "taken").exists()


@pytest.mark.sample
def test_what_the_allocator_has_it_keeps_unless_told_otherwise(tmp_path: Path) -> None:
    for given in ("", "glibc.malloc.arena_max=2"):
        env = {"GLIBC_TUNABLES": given} if given else {}
        folder = tmp_path / (given or "usual")
        # With a flag it has an interpreter of its own, which reads what it is given.
        with program("trains", folder, "run.name=x", env=env, flags=("-s",)) as launcher:
            wait_until(folder / "x" / "started")
            places = [Path(f"/proc/{pid}/environ") for pid in session(launcher.pid)]
            environments = "\0".join(place.read_text() for place in places)
            found = re.findall(r"GLIBC_TUNABLES=([^\0]*)", environments)
            wanted = given or "glibc.malloc.mmap_threshold="
            assert sum(wanted in tunables for tunables in found) >= 3  # the server and two ranks
            launcher.kill()
            launcher.wait()
            assert_nobody_is_left(launcher.pid)


def test_signals_to_the_group_during_imports_leave_one_line_and_nobody(tmp_path: Path) -> None:
    with program("trains", tmp_path, "run.name=x") as launcher:
        wait_until(tmp_path / "x" / "config.toml")
        os.killpg(launcher.pid, signal.SIGINT)
        os.killpg(launcher.pid, signal.SIGTERM)
        out, _ = launcher.communicate(timeout=60)
        assert launcher.returncode == 75
        assert "Traceback" not in out
        assert out.splitlines()[-1].startswith("stopped on request")
        assert_nobody_is_left(launcher.pid)


def test_ranks_that_others_started_share_a_folder_and_stop_together(tmp_path: Path) -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ranks = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    with (
        program("trains", tmp_path, env=ranks[0]) as first,
        program("trains", tmp_path, env=ranks[1]) as second,
    ):
        deadline = time.monotonic() + _WAIT_SECONDS
        while not list(tmp_path.glob("*/started")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        second.send_signal(signal.SIGTERM)
        out, _ = first.communicate(timeout=30)
        assert (first.returncode, second.wait(timeout=30)) == (75, 75)
        (run_dir,) = tmp_path.iterdir()
        assert out == f"stopped on request; go on with: hp train --resume {run_dir}\n"
        assert {path.name for path in run_dir.glob("saved-*")} == {"saved-0", "saved-1"}


def test_a_rank_saves_and_ends_after_its_agent(tmp_path: Path) -> None:
    options = [f"run.output_dir={tmp_path}", "mesh.pp=1", "mesh.dp_replicate=1", "mesh.ep=1"]
    rank = [sys.executable, str(_PROGRAM), "trains", *options, "run.name=x"]
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
    agent = subprocess.Popen(
        ["/bin/sh", "-c", '"$@" & wait', "sh", *rank, "pipeline.stages_per_rank=1"],
        env=os.environ | place | {"MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "job"},
        start_new_session=True,
    )
    try:
        wait_until(tmp_path / "x" / "started")
        agent.kill()
        agent.wait()
        assert_nobody_is_left(agent.pid)
        assert (tmp_path / "x" / "saved-0").exists()
    finally:
        end_session(agent.pid)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "MASTER_ADDR must be set where RANK and WORLD_SIZE are"),
        ({"MASTER_ADDR": "localhost"}, 'MASTER_PORT ("") must be the number of a port'),
        (
            {"MASTER_ADDR": "localhost", "MASTER_PORT": "70000"},
            'MASTER_PORT ("70000") must be the number of a port',
        ),
    ],
)
def test_variables_of_another_job_are_refused_with_what_to_do(
    given: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **given}.items():
        monkeypatch.setenv(name, value)
    keys = [("run.output_dir", str(tmp_path)), ("mesh.pp", 1), ("pipeline.stages_per_rank", 1)]
    with pytest.raises(ConfigError) as caught:
        external.run(resolve(None, keys), entry="nothing:here")
    hint = "; where no torchrun has started this process: unset RANK WORLD_SIZE"
    assert str(caught.value) == said + hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("fault", "status"), [("data-error", 3)])
def test_a_rank_that_others_started_fails_with_its_status(
    fault: str, status: int, tmp_path: Path
) -> None:
    env = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    overrides = ("mesh.dp_replicate=1", "mesh.ep=1", f"run.name={fault}")
    with program("fails_alone", tmp_path, *overrides, env=env) as rank:
        out, _ = rank.communicate(timeout=60)
        assert rank.returncode == status
        assert out.splitlines()[0] == "error: rank 0 failed at step 0 (start): no text"
