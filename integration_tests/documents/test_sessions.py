"""Sessions install what they say, at pins, and tell what they took with all that they left."""

from __future__ import annotations

import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import pytest
import reaping
from sessions import (
    PACKAGES,
    ROOT,
    constraints,
    editables,
    environment,
    files_of,
    local_closure,
    recorded,
    requirements_of,
    summarize,
    torch_requirement,
    with_extras,
)

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


def test_a_package_comes_with_its_siblings_and_the_extras_that_are_asked_for() -> None:
    assert local_closure("hp-schedule") == {"hp-schedule": set()}
    closure = local_closure("hp-schedule[runtime]", "hp-base")
    assert closure == {"hp-schedule": {"runtime"}, "hp-platform": set(), "hp-base": set()}
    assert editables("hp-platform") == ["-e", "packages/hp-platform"]
    assert {*local_closure(*map(with_extras, PACKAGES))} == {*PACKAGES}
    extras = [extra for name in PACKAGES for extra in local_closure(with_extras(name))[name]]
    assert "runtime" in extras
    assert "transformers" not in extras


def test_a_group_has_what_those_that_it_includes_have() -> None:
    assert {*requirements_of("test")} < {*requirements_of("test-torch")}
    assert not [name for name in requirements_of("test-transformers") if "include" in name]


def test_another_torch_takes_the_place_of_its_pin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HP_TORCH", raising=False)
    assert constraints(torch_requirement()).name == "constraints.txt"
    pins = tmp_path / "own" / "constraints.txt"
    pins.parent.mkdir()
    pins.write_text("# own\nnumpy==1.0\n")
    lines = constraints("torch==2.11.0", pins, folder=tmp_path).read_text().splitlines()
    assert [line for line in lines if line.startswith(("torch==", "numpy=="))] == [
        "numpy==1.0",
        "torch==2.11.0",
    ]
    assert not [line for line in lines if line.startswith("setuptools=")]
    monkeypatch.setenv("HP_TORCH", str(tmp_path / "torch-3-py3-none-any.whl"))
    assert torch_requirement() == f"torch @ file://{tmp_path}/torch-3-py3-none-any.whl"


def test_pip_and_uv_look_in_the_same_places(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HP_TORCH", "UV_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", "/a /b")
    monkeypatch.setenv("HP_TORCH_INDEX", "/c")
    found = environment()
    assert (found["PIP_FIND_LINKS"], found["UV_FIND_LINKS"]) == ("/a /b /c", "/a,/b,/c")
    assert found["PIP_CONSTRAINT"] == found["UV_CONSTRAINT"]


def test_hashes_are_for_uv_and_the_pinned_torch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HP_TORCH", raising=False)
    monkeypatch.setenv("HP_HASHES", "1")
    found = environment()
    assert found["UV_CONSTRAINT"] == str(ROOT / "tools" / "hashes.txt")
    assert found["PIP_CONSTRAINT"] == str(ROOT / "constraints.txt")
    with pytest.raises(ValueError, match="must come without HP_TORCH"):
        environment("torch==2.11.0")


def test_files_are_named_from_the_root_and_each_pattern_names_some() -> None:
    assert "tools/sessions.py" in files_of("tools", ["s*.py", "sessions.py"])
    with pytest.raises(FileNotFoundError, match=r"no file in tools is named lost\.py"):
        files_of("tools", ["s*.py", "lost.py"])


class _EndError(Exception):
    """Ends a session that cannot go on here."""


class _Session:
    """A session that runs nothing and keeps the command lines."""

    posargs: tuple[str, ...] = ()
    venv_backend = "none"

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.env: dict[str, str] = {}
        self.virtualenv = SimpleNamespace(location=str(folder))
        self.lines: list[tuple[str, ...]] = []

    def run(self, *line: str, **_: object) -> None:
        self.lines.append(line)

    run_install = run

    def create_tmp(self) -> str:
        return str(self.folder)

    def error(self, reason: str) -> NoReturn:
        raise _EndError(reason)

    skip = error

    def install(self, *_: str) -> None: ...

    def log(self, _: str) -> None: ...

    def notify(self, _: str) -> None: ...


def sessions_of_noxfile(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, Any]:
    """Execute noxfile.py without nox; name -> function of each session."""
    found: dict[str, Any] = {}

    def session(function: Any = None, *, name: str = "", **_: object) -> Any:
        def keep(given: Any) -> Any:
            return found.setdefault(name or given.__name__, given)

        return keep if function is None else keep(function)

    nox = ModuleType("nox")
    nox.__dict__.update(session=session, Session=_Session, options=SimpleNamespace())
    command = ModuleType("nox.command")
    command.__dict__["CommandFailed"] = _EndError
    monkeypatch.setitem(sys.modules, "nox", nox)
    monkeypatch.setitem(sys.modules, "nox.command", command)
    monkeypatch.setattr("sessions.print_times_at_the_end", lambda: None)
    monkeypatch.setattr("sessions.TIMES", folder / "times")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HP_WHOLE", "")  # a session sets it
    runpy.run_path(str(ROOT / "noxfile.py"))
    return found


def test_every_file_and_program_that_a_session_runs_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named: set[str] = set()
    for name, function in sessions_of_noxfile(monkeypatch, tmp_path).items():
        if name == "build":  # begins by removing dist/
            continue
        session = _Session(name, tmp_path)
        with suppress(_EndError):
            function(session)
        for line in session.lines:
            named |= {word.removeprefix("--ignore=").partition("::")[0] for word in line}
            modules = [after for word, after in pairwise(line) if word == "-m"]
            named |= {m.replace(".", "/") for m in modules if m.startswith("integration_tests")}
    places = ("packages/", "integration_tests/", "tools/", "benchmarks/")
    files = {word for word in named if word.startswith(places)}
    assert len(files) > 150
    assert not {f for f in files if not ((ROOT / f).exists() or (ROOT / f"{f}.py").exists())}
