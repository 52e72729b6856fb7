"""What several tests of hp-train rely on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hp_base.signals import StopFlag
from hp_data import Tokenizer
from hp_platform import RankInfo, Runtime, shutdown
from hp_trainer.config import Config
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.task import Worker
from hp_trainer.training.startup import connect, prepare_data


@pytest.fixture
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroup]:
    """A world of one rank: this process."""
    store = f"file://{tmp_path_factory.mktemp('store')}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


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
