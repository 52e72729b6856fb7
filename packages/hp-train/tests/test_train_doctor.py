import json

import pytest

from hp_train import doctor
from hp_train.cli import main
from hp_train.doctor import Check


def test_this_machine_can_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "this machine can train"
    found = " ".join(lines)
    for name in ("Python", "torch", "Gloo", "GPU", "CPU cores", "memory", "disk", "tokenizers"):
        assert name in found


def test_the_findings_are_also_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is True
    assert {"name", "status", "value", "advice"} == set(content["checks"][0])


def test_a_missing_extra_comes_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(doctor, "_installed", lambda _name: False)
    checks = {check.name: check for check in doctor.diagnose()}
    assert checks["tokenizers"].status == "optional"
    assert checks["tokenizers"].advice == "pip install 'hp-train[tokenizers]'"


def test_a_machine_that_lacks_something_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = Check("torch", "missing", "not installed", "pip install torch")
    monkeypatch.setattr(doctor, "diagnose", lambda: [check])
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "pip install torch" in out
    assert out.endswith("this machine cannot train yet\n")


def test_a_check_that_breaks_does_not_keep_the_others_from_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaks() -> None:
        raise RuntimeError("no such file")

    monkeypatch.setattr(doctor, "_free_memory", breaks)
    checks = {check.name: check for check in doctor.diagnose()}
    assert checks["machine"].value == "RuntimeError: no such file"
    assert "tensorboard" in checks
