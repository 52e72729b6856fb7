"""Sessions say what they took, with what outlived the processes they waited for."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import reaping
from session_times import recorded, summarize

# A process that leaves behind another one, which computes for half a second when it is an orphan.
_LEAVES_WORK = """
import os, time
if os.fork() == 0:
    time.sleep(0.2)
    while time.process_time() < 0.5:
        pass
"""


def reaped(code: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, reaping.__file__, "-c", code]
    return subprocess.run(command, check=False, timeout=60)


def test_what_outlives_a_program_is_waited_for_and_counts() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert reaped(_LEAVES_WORK).returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime > 0.5


def test_the_status_is_that_of_the_program() -> None:
    assert reaped("raise SystemExit(3)").returncode == 3
    assert reaped("import os; os.kill(os.getpid(), 9)").returncode == 128 + signal.SIGKILL


def test_a_request_to_stop_is_passed_on(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    process = subprocess.Popen([sys.executable, reaping.__file__, "-c", code])
    while not ready.exists():
        time.sleep(0.01)
    process.terminate()
    assert process.wait(timeout=30) == 128 + signal.SIGTERM


def test_a_table_has_the_sessions_of_this_run_alone(tmp_path: Path) -> None:
    folder = tmp_path / "times"
    with recorded("earlier", folder):
        pass
    os.utime(folder / "earlier.json", (1, 1))
    began = time.time() - 1
    with recorded("busy", folder):
        subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True, timeout=60)
    with recorded("idle", folder):
        pass
    names = [line.split()[0] for line in summarize(folder, since=began).splitlines()]
    assert names == ["session", "busy", "idle", "together"]
    found = json.loads(folder.with_suffix(".json").read_text())
    busy, idle = found["sessions"]
    assert busy["cpu_seconds"] > 0.01 >= idle["cpu_seconds"]
    assert found["together"]["cpu_seconds"] == busy["cpu_seconds"] + idle["cpu_seconds"]


def test_without_sessions_there_is_no_table(tmp_path: Path) -> None:
    assert summarize(tmp_path, since=0.0) == ""
