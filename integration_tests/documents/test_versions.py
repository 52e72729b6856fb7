"""`nox -s versions`: the pairs that it tests, what it keeps, and what it leaves out."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import versions
from sessions import TORCH
from versions import Row, main, pairs, passed_in, programs, run_programs


def test_the_corners_are_tested_and_each_python_once() -> None:
    found = pairs()
    assert [python for python, _ in found] == list(versions.PYTHONS)
    assert TORCH == "torch>=2.11,<2.16"
    assert found[0] == ("3.11", "2.11")
    assert found[-1] == ("3.14", "2.15")
    assert pairs("torch>=2.3,<2.5", ("3.1", "3.2")) == [("3.1", "2.3"), ("3.2", "2.4")]


def test_what_has_passed_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = tmp_path / "results.jsonl"
    done = Row("3.12", "2.12", "hp-base", passed=True, found="", seconds=1.0, commit="a")
    failed = Row("3.12", "2.12", "hp-data", passed=False, found="", seconds=1.0, commit="a")
    results.write_text("".join(json.dumps(asdict(row)) + "\n" for row in (done, failed)))
    assert passed_in(results) == {("3.12", "2.12", "hp-base")}
    assert passed_in(tmp_path / "none.jsonl") == set()
    asked: list[tuple[str, str, list[str]]] = []

    def run_pair(python: str, torch: str, packages: list[str], _: Path) -> list[Row]:
        asked.append((python, torch, packages))
        return [done]

    monkeypatch.setattr(versions, "run_pair", run_pair)
    options = ["--results", str(results), "--python", "3.12"]
    assert main([*options, "hp-base", "hp-data"]) == 0
    assert main([*options, "hp-base"]) == 0
    assert main([*options, "--torch", "2.13", "hp-base"]) == 0
    assert asked == [("3.12", "2.12", ["hp-data"]), ("3.12", "2.13", ["hp-base"])]


def test_each_package_has_an_environment_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def make(_folder: Path, _python: str, package: str, _torch: str, _env: object) -> str:
        made.append(package)
        return "no wheel" if package == "hp-data" else ""

    monkeypatch.setattr(versions, "CUDA_BUILD_GIB", 0)
    monkeypatch.setattr(versions, "interpreter", lambda _: "python")
    monkeypatch.setattr(versions, "make", make)
    monkeypatch.setattr(versions, "versions_in", lambda _: "Python 3.12.1")
    monkeypatch.setattr(versions, "run_tests", lambda *_: (True, "9 passed"))
    monkeypatch.setattr(versions, "run_programs", lambda name, *_: (name != "hp-plan", "1 program"))
    wanted = ["hp-data", "hp-base", "hp-plan"]
    rows = versions.run_pair("3.12", "2.12", wanted, tmp_path / "results.jsonl")
    assert made == [row.package for row in rows] == wanted
    assert [row.passed for row in rows] == [False, True, False]
    assert rows[0].found == "no wheel"
    assert rows[1].found == "Python 3.12.1: 9 passed; 1 program"


def test_programs_must_end_with_their_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [status for _, status in programs("hp-verify", tmp_path)] == [0, 0, 0, 8, 0]
    compile((tmp_path / "job.py").read_text(), "job.py", "exec")
    assert len(programs("hp-data", tmp_path)) == 1
    told = ["python", "-c", "print('zoo: 1 of 1'); raise SystemExit(8)"]
    env = dict(os.environ)
    monkeypatch.setattr(versions, "programs", lambda *_: [(told, 8)])
    assert run_programs("hp-data", tmp_path, env) == (True, "programs: 1 (zoo: 1 of 1)")
    monkeypatch.setattr(versions, "programs", lambda *_: [(told, 0), (["no-such-command"], 0)])
    shown, came = run_programs("hp-data", tmp_path, env)
    assert not shown
    assert came.endswith("status 8: zoo: 1 of 1")


def test_an_environment_that_cannot_be_made_is_told_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "interpreter", lambda _: "")
    monkeypatch.setattr(versions, "CUDA_BUILD_GIB", 0)
    results = tmp_path / "results.jsonl"
    assert main(["--results", str(results), "--python", "3.14", "hp-base"]) == 1
    assert "nothing was run: neither uv nor pyenv has Python 3.14" in capsys.readouterr().out
    [row] = [json.loads(line) for line in results.read_text().splitlines()]
    assert (row["python"], row["package"], row["passed"]) == ("3.14", "", False)
    assert [path.name for path in tmp_path.iterdir()] == ["results.jsonl"]


def test_an_unknown_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--results", str(tmp_path / "r"), "hp-gone"])
    assert "no package is called hp-gone" in capsys.readouterr().err
