"""What several tests of hp-checkpoint rely on."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup


@pytest.fixture
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessGroup]:
    """A world of one rank: this process."""
    store = f"file://{tmp_path_factory.mktemp('store')}/store"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()
