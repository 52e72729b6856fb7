"""Under torchrun nobody reads heartbeats: ranks name the one that hangs themselves."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hp_base.errors import HangError
from integration_tests.reliability.kills import TINY
from integration_tests.runs import write_corpus

pytestmark = pytest.mark.usefixtures("forked_programs")

WORLD, STUCK = 3, 1
SETTINGS: dict[str, object] = {
    "mesh.pp": 1,
    "mesh.dp_replicate": WORLD,
    "mesh.ep": 1,
    "pipeline.stages_per_rank": 1,
    "train.global_batch_size": 12,
    "launch.hang_seconds": 8,
}


@pytest.mark.sample("sleeps")
@pytest.mark.parametrize("how", ["sleeps", "is stopped"])
def test_every_rank_ends_and_names_the_one_that_hangs(how: str, tmp_path: Path) -> None:
    """It says where it stands as well, with its Python stack, unless it is stopped."""
    places = {
        "run.output_dir": tmp_path,
        "run.name": "job",
        "data.paths": write_corpus(tmp_path),
    }
    keys = [f"--{key}={value}" for key, value in (dict(TINY) | SETTINGS | places).items()]
    stuck = STUCK if how == "sleeps" else -1
    job = [
        sys.executable,
        "-m",
        "integration_tests.reliability.stuck_job",
        str(stuck),
        "train",
        *keys,
    ]
    ranks = [_start(job, rank, tmp_path) for rank in range(WORLD)]
    try:
        if how == "is stopped":
            _wait_for_steps(tmp_path / "job" / "metrics.jsonl")
            ranks[STUCK].send_signal(signal.SIGSTOP)
        ends = [rank.wait(timeout=200) for i, rank in enumerate(ranks) if i != STUCK or stuck >= 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = [(tmp_path / f"rank-{rank}.txt").read_text() for rank in range(WORLD)]
    for number in range(WORLD) if how == "sleeps" else (0, 2):
        errors = [line for line in said[number].splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, said[number]
        if how == "sleeps":
            assert errors[0].startswith("error: rank 1, step 3, optimizer: "), said[number]
        else:
            assert errors[0].startswith("error: rank 1: is gone or stopped"), said[number]
    if how == "sleeps":
        assert ends == [HangError.exit_code] * WORLD
        assert "stuck_job.py" in said[0]
        assert "in get_stuck" in said[0]


def _start(job: list[str], rank: int, folder: Path) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    meeting = {"HP_INIT_METHOD": f"file://{folder}/meeting", "GLOO_SOCKET_IFNAME": "lo"}
    env = os.environ | {k: str(v) for k, v in place.items()} | meeting | {"OMP_NUM_THREADS": "1"}
    with (folder / f"rank-{rank}.txt").open("wb") as out:
        return subprocess.Popen(job, env=env, stdout=out, stderr=out)


def _wait_for_steps(metrics: Path) -> None:
    deadline = time.monotonic() + 150
    while not (metrics.exists() and metrics.read_text().count("\n") > 1):
        assert time.monotonic() < deadline
        time.sleep(0.1)
