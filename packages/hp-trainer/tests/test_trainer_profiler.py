"""What is profiled is written, bounded and packed; what goes wrong with it ends no run."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from hp_base.signals import StopFlag
from hp_platform import RankInfo
from hp_trainer.config import TrainConfig
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.task import Worker
from hp_trainer.training import profiler
from hp_trainer.training.profiler import Profiler

CPU = torch.device("cpu")


def profiler_of(train: TrainConfig, run_dir: Path, told: list[str], *, rank: int = 0) -> Profiler:
    worker = Worker(RankInfo(rank, 2, rank, 2), run_dir, Heartbeats.unwatched(), StopFlag())
    return Profiler(train, worker, CPU, tell=told.append)


def files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.glob("profile/*"))


def test_a_trace_of_the_steps_and_ranks_that_were_asked_for(tmp_path: Path) -> None:
    told: list[str] = []
    train = TrainConfig(profile=(2, 4), profile_ranks=(1,))
    for rank in range(2):
        found = profiler_of(train, tmp_path, told, rank=rank)
        for step in range(1, 5):
            with found.watching(step):
                torch.ones(64, 64).matmul(torch.ones(64, 64))
    assert told == []
    assert files(tmp_path) == [f"step-{step:08d}-rank-1.json.gz" for step in (2, 4)]
    with gzip.open(tmp_path / "profile" / "step-00000002-rank-1.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events]
    assert "aten::mm" in names
    assert "[memory]" in names  # on a CPU allocations are part of the trace


def test_a_trace_that_is_too_large_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "_MOST_BYTES", 100)
    told: list[str] = []
    with profiler_of(TrainConfig(profile=(1,)), tmp_path, told).watching(1):
        torch.ones(2)
    assert files(tmp_path) == []
    [warning] = told
    assert warning.startswith("warning: step 1 of rank 0 was not profiled: step-00000001-rank-0")
    assert warning.endswith("must not exceed 100 bytes")


def test_a_place_where_nothing_can_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("in the way")
    told: list[str] = []
    with profiler_of(TrainConfig(profile=(1,)), tmp_path, told).watching(1):
        torch.ones(2)
    assert len(told) == 1


def test_an_error_of_the_step_is_raised_as_it_is_and_leaves_no_profiler_behind(
    tmp_path: Path,
) -> None:
    told: list[str] = []
    found = profiler_of(TrainConfig(profile=(1, 2)), tmp_path, told)
    with pytest.raises(KeyError), found.watching(1):
        raise KeyError
    with found.watching(2):
        torch.ones(2)
    assert told == []
    assert files(tmp_path) == ["step-00000002-rank-0.json.gz"]
