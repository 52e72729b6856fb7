"""Ranks that wait for those that prepare the data."""

import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch.distributed as dist

from hp_base.signals import StopFlag
from hp_data.preparation import Progress
from hp_platform import RankInfo, new_group
from hp_platform.testing import run_distributed
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.task import Worker
from hp_trainer.training.startup import Interrupted, Waiting

_TIMEOUT = 3.0  # seconds


class _Ended(NamedTuple):
    """How a rank came out of the wait."""

    stopped: bool
    interrupted: bool


def _wait(folder: Path, stops: bool, fails: bool, seconds: float) -> _Ended:
    """Rank 0 works for so long; rank 1 waits, is asked to stop, or has failed."""
    rank = dist.get_rank()
    stop = StopFlag(passed_on=lambda: stops and rank == 1)
    worker = Worker(RankInfo(rank, 2, rank, 2), folder, Heartbeats.unwatched(), stop)
    group = new_group([range(2)], name="t", backend="gloo", timeout=timedelta(seconds=_TIMEOUT))
    waiting = Waiting(worker, "work", works=rank == 0, group=group, timeout=_TIMEOUT)
    interrupted = False
    until = time.monotonic() + seconds
    while rank == 0 and not interrupted and time.monotonic() < until:
        time.sleep(0.05)
        try:
            waiting.progress()
        except Interrupted:
            interrupted = True
    waiting.finish(has_failed=fails and rank == 1)
    assert worker.heartbeats.slots()[0].sequence > 1
    return _Ended(waiting.stopped, interrupted)


def test_a_wait_may_be_longer_than_the_time_out(tmp_path: Path) -> None:
    seconds = 1.5 * _TIMEOUT
    ended = run_distributed(_wait, tmp_path, False, False, seconds, world_size=2)
    assert ended == [_Ended(stopped=False, interrupted=False)] * 2


@pytest.mark.parametrize("stops", [True, False])
def test_a_stop_or_a_failure_of_who_waits_ends_the_work(tmp_path: Path, stops: bool) -> None:
    ended = run_distributed(_wait, tmp_path, stops, not stops, 50.0, world_size=2)
    assert ended == [_Ended(stops, interrupted=True), _Ended(stops, interrupted=False)]


def test_progress_is_told_every_few_seconds_with_rate_and_rest() -> None:
    told: list[str] = []
    now = 0.0
    progress = Progress(1_000_000_000, told.append, clock=lambda: now)
    for _ in range(100):
        now += 0.5
        progress.add(1_000_000)
    assert len(told) == 10
    assert told[0] == "tokenised 10 of 1000 MB, 2.00 MB/s, 8 min left"
    assert told[-1] == "tokenised 100 of 1000 MB, 2.00 MB/s, 8 min left"
