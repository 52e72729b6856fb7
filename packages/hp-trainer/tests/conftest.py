"""What several tests of hp-trainer rely on."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hp_base.signals import StopFlag
from hp_data import Tokenizer
from hp_platform import RankInfo, Runtime, shutdown
from hp_trainer.config import Config
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.task import Worker
from hp_trainer.training.startup import connect, prepare_data


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    """One rank of a run, alone; a module may have one of its own."""
    (tmp_path / "run").mkdir()
    heartbeats = Heartbeats.create(tmp_path / "heartbeats", num_ranks=1)
    info = RankInfo(rank=0, world_size=1, local_rank=0, local_world_size=1)
    return Worker(info=info, run_dir=tmp_path / "run", heartbeats=heartbeats, stop=StopFlag())


@pytest.fixture
def started(config: Config, worker: Worker) -> Iterator[tuple[Runtime, Tokenizer]]:
    """What a trainer of the module's `config` begins with."""
    runtime = connect(config, worker)
    yield runtime, prepare_data(config, worker, runtime)
    shutdown()
