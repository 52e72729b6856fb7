"""Environments of a machine; a few in every run of the tests, all in `nox -s reliability`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from integration_tests.reliability.environments import environments, meet
from integration_tests.reliability.test_train_command import TINY
from integration_tests.runs import write_corpus

_CASES = {case.name: case for case in environments()}


@pytest.mark.parametrize("name", _CASES)
@pytest.mark.sample(
    "closed-all-config",
    "full-config",
    "local-rank-refusal",
    "rank-of-one-train",
    "slurm-shell-train",
    "triton-open-to-all",
)
def test_a_command_does_its_work_or_ends_in_one_line(name: str, tmp_path: Path) -> None:
    row = meet(_CASES[name], tmp_path)
    if row["status"] is None:
        pytest.skip("this machine does not grant what it needs")
    assert row["problem"] == ""


def _under_torchrun(folder: Path, **settings: object) -> list[str]:
    own: dict[str, object] = {
        "mesh.ep": 1,
        "mesh.pp": 1,
        "pipeline.stages_per_rank": 1,
        "train.eval_every": 0,
    }
    own |= {"data.paths": write_corpus(folder), "run.output_dir": folder / "out", **settings}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    keys = [f"{key}={value}" for key, value in (TINY | own).items()]
    return [*torchrun, "-m", "hp_train", "train", *keys]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        pytest.param({"train.stepz": 3}, "train.stepz", id="an-unknown-key"),
        pytest.param(
            {"data.seq_len": 1_000_000}, "must exceed data.seq_len (1000000)", id="too-little-text"
        ),
        # Ranks have stepped, as nobody sees before that this rate leads nowhere.
        pytest.param(
            {"train.learning_rate": 1e30, "train.steps": 50}, "not finite", id="in-a-step"
        ),
    ],
)
@pytest.mark.sample("an-unknown-key")
@pytest.mark.usefixtures("forked_programs")
def test_under_torchrun_the_last_line_is_why(
    settings: dict[str, object], why: str, tmp_path: Path
) -> None:
    command = _under_torchrun(tmp_path, **settings)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert "ChildFailedError" in done.stderr
    assert lines[-1].startswith("error: ")
    assert why in lines[-1]
    assert any(line.strip() == f"traceback : {lines[-1]}" for line in lines)


def test_the_last_line_is_also_that_of_a_rank_that_ends_before_the_first(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    told = tmp_path / "1" / "error.json"
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(told)}
    hp = [sys.executable, "-m", "hp_train", "train", "--train.stepz", "3"]
    done = subprocess.run(
        # In the place of torchrun, whose end is waited for.
        ["bash", "-c", '"$@"; exit 1', "bash", *hp],
        env=os.environ | rank,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr.startswith("error: ")
    assert "train.stepz" in done.stderr
    assert done.stderr.count("\n") == 1
    assert json.loads(told.read_text())["message"]["message"] == done.stderr.strip()


@pytest.mark.sample
@pytest.mark.usefixtures("forked_programs")
def test_a_job_of_torchrun_that_is_stopped_says_last_how_to_go_on(tmp_path: Path) -> None:
    settings = {"train.steps": 100_000, "train.log_every": 1_000, "run.name": "x"}
    command = _under_torchrun(tmp_path, **settings)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as job:
        deadline = time.monotonic() + 120
        metrics = tmp_path / "out" / "x" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            assert time.monotonic() < deadline
            assert job.poll() is None
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        _, told = job.communicate(timeout=120)
    resume = f"stopped on request; go on with: hp train --resume {tmp_path / 'out' / 'x'}"
    assert told.splitlines()[-1] == resume
