"""Another user of the machine against a run: nothing is executed, nothing listens, numbers stay."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hp_base.errors import PREEMPTED
from integration_tests.reliability.stranger import attack, listeners_of, processes_of
from integration_tests.reliability.test_train_command import TINY, finish, metrics_of, start
from integration_tests.runs import write_corpus

pytestmark = pytest.mark.usefixtures("forked_programs")

_LOOPBACK = ("0100007F", "00000000000000000000000001000000")


def _settings(folder: Path) -> dict[str, object]:
    changed = {
        "mesh.dp_replicate": 1,
        "mesh.ep": 1,
        "train.steps": 100_000,  # until it is asked to stop
        "train.log_every": 1_000,  # or nobody would read what it says
        "train.global_batch_size": 4,
        "train.save_every": 20,
        "train.eval_every": 0,
        "data.paths": str(write_corpus(folder)),
        "run.output_dir": str(folder / "out"),
        "launch.max_restarts": 0,
    }
    return TINY | changed


def _losses(run: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in metrics_of(run)]


def test_another_user_executes_nothing_reaches_nothing_and_changes_no_number(
    tmp_path: Path,
) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    settings = _settings(tmp_path)
    marker = tmp_path / "executed"
    process = start(["--run.name=attacked"], **settings)
    run = tmp_path / "out" / "attacked"
    _wait_for(lambda: _has_steps(run, 2), process)
    done = attack(processes_of(process.pid), "attacked", marker)
    assert process.poll() is None, "the run must last longer than the attack"
    _stop(process)
    assert not marker.exists(), marker.read_text()
    assert done == []
    attacked = _losses(run)
    alone = tmp_path / "out" / "alone"
    process = start(["--run.name=alone"], **settings)
    _wait_for(lambda: _has_steps(alone, len(attacked)), process)
    _stop(process)
    assert _losses(alone)[: len(attacked)] == attacked


def _has_steps(run: Path, least: int) -> bool:
    return (run / "metrics.jsonl").exists() and len(metrics_of(run)) >= least


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    status, output = finish(process)
    assert status == PREEMPTED, output


def test_nothing_listens_beyond_loopback_from_start_to_end(tmp_path: Path) -> None:
    process = start(["--run.name=run"], **_settings(tmp_path) | {"train.steps": 3})
    addresses, names = set(), set()
    while process.poll() is None:
        tcp, unix = listeners_of(processes_of(process.pid))
        addresses |= {address for address, _ in tcp}
        names |= unix
        time.sleep(0.02)
    status, output = finish(process)
    assert status == 0, output
    assert addresses, "Gloo listens"
    assert addresses <= set(_LOOPBACK)
    assert not any(name.startswith("@") for name in names)  # anybody can connect to those


def _wait_for(happened: object, process: object, seconds: float = 120.0) -> None:
    assert callable(happened)
    deadline = time.monotonic() + seconds
    while not happened() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()  # type: ignore[attr-defined]
        time.sleep(0.05)
