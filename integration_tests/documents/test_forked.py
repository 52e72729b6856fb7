"""Programs that are forked from a server are to whoever starts them as any others."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import pytest

pytestmark = pytest.mark.usefixtures("forked_programs")

TOLD = """
import json, os, signal, sys
blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "folder": os.getcwd(),
    "argv": sys.argv, "paths": sys.path[:2], "seen": os.environ.get("SEEN"), "blocked": blocked,
    "given": sys.stdin.read(), "interrupt": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
    "is_forked": "torch" in sys.modules,
    "command": open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
}))
"""


def told(*command: str, **settings: Any) -> tuple[dict[str, Any], int]:
    """What a program says of itself, and its process id as its parent knows it."""
    with subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **settings,
    ) as process:
        said, _ = process.communicate("hello", timeout=60)
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(said)
    return found, process.pid


def test_a_program_has_what_it_was_started_with(tmp_path: Path) -> None:
    (tmp_path / "telling.py").write_text(TOLD)
    env = {**os.environ, "SEEN": "yes", "PYTHONPATH": "/nowhere"}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        found, pid = told("-m", "telling", "a", "b", cwd=tmp_path, env=env, start_new_session=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert found == {
        "pid": pid,
        "parent": os.getpid(),
        "session": pid,
        "folder": str(tmp_path),
        "argv": [str(tmp_path / "telling.py"), "a", "b"],
        "paths": [str(tmp_path), "/nowhere"],
        "seen": "yes",
        "blocked": [signal.SIGTERM],
        "given": "hello",
        "interrupt": True,
        "is_forked": True,
        "command": [sys.executable, "-m", "telling", "a", "b"],
    }


@pytest.mark.parametrize("kind", ["code", "file", "module"])
def test_every_kind_of_program_has_its_arguments(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "telling.py"
    file.write_text(TOLD)
    command = {"code": ("-c", TOLD), "file": (str(file),), "module": ("-m", "telling")}[kind]
    found, _ = told(*command, "x", cwd=tmp_path)
    assert found["is_forked"]
    assert found["argv"] == ["-c" if kind == "code" else str(file), "x"]
    assert found["session"] == os.getsid(0)


def test_a_program_runs_the_sitecustomize_that_it_finds(tmp_path: Path) -> None:
    """As `hp verify` reaches jobs; where a program itself is comes later."""
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.found = sys.path[0]")
    code = "import sys; print(sys.found, 'torch' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=env,
    )
    assert done.stdout.split() == [str(tmp_path), "True"]


@pytest.mark.parametrize(
    ("flags", "env"), [(("-s",), {}), ((), {"PYTHONHASHSEED": "7"}), ((), {"OMP_NUM_THREADS": "2"})]
)
def test_what_an_interpreter_reads_at_its_start_has_one_of_its_own(
    flags: tuple[str, ...], env: dict[str, str]
) -> None:
    found, _ = told(*flags, "-c", TOLD, env=os.environ | env)
    assert not found["is_forked"]


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no room')", 1, "no room\n"),
        ("raise MemoryError('no room')", 1, "MemoryError: no room\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
    ],
)
def test_a_program_ends_as_it_would(code: str, status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr.endswith(said)


def test_what_is_left_to_do_at_the_end_is_done() -> None:
    code = """
import atexit, sys, threading, time
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
atexit.register(print, "at exit", end="")
sys.exit(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (3, "thread\nat exit")


def test_a_process_whose_programs_would_not_be_forked_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=2")
    with pytest.raises(RuntimeError, match="GLIBC_TUNABLES"), forked.commands():
        pass


def test_a_program_starts_others_and_the_server_of_ranks() -> None:
    code = """
import multiprocessing, os, subprocess, sys
inner = "import os, sys; print(os.getppid(), 'torch' in sys.modules)"
print(subprocess.run([sys.executable, "-c", inner], capture_output=True, text=True).stdout.split())
multiprocessing.set_forkserver_preload(["queue"])
context = multiprocessing.get_context("forkserver")
ours, theirs = context.Pipe()
process = context.Process(target=theirs.send, args=("sent",))
process.start()
print(ours.recv(), process.join(), process.exitcode, os.getpid())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    inner, rank = done.stdout.splitlines()
    pid = rank.rpartition(" ")[2]
    assert inner == str([pid, "True"])
    assert rank == f"sent None 0 {pid}"


def test_a_program_that_takes_too_long_is_killed() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run(command, timeout=0.5, check=False)
