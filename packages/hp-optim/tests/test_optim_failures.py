"""A rank that dies or does not come while pieces travel: no rank waits forever."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import hp_optim.muon
from hp_optim import Muon, NewtonSchulz
from hp_platform import failing_together, initialize, new_group
from hp_platform.testing import RankError, run_distributed


def optimizer() -> Muon:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = [
        nn.Parameter(distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])) for _ in range(8)
    ]
    made = Muon(parameters, bucket_bytes=1)
    for parameter in parameters:
        parameter.grad = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    return made


def dies() -> None:
    made = optimizer()

    def dying(matrix: Tensor, _settings: NewtonSchulz) -> Tensor:
        if dist.get_rank() == 1:
            os._exit(3)
        return matrix

    with patch.object(hp_optim.muon, "orthogonalize", dying):
        made.step()


def test_a_rank_that_dies_between_exchanges_ends_the_run_naming_it() -> None:
    with pytest.raises(RankError, match="exited with status 3") as caught:
        run_distributed(dies, world_size=2, timeout=20)
    assert caught.value.rank == 1


def of_two_seconds(ranks: Sequence[int], *, name: str) -> dist.ProcessGroup:
    group = new_group([ranks], name=name, timeout=timedelta(seconds=2))
    assert group is not None
    return group


def does_not_come() -> tuple[str, float]:
    """Wait for a rank that never steps, by the group's own time-out."""
    with patch.object(hp_optim.muon, "new_group_of_members", of_two_seconds):
        made = optimizer()
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(6)
        return "", 0.0
    try:
        made.step()
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "nothing", 0.0


def test_a_rank_that_does_not_come_is_a_time_out_and_no_hang() -> None:
    text, seconds = run_distributed(does_not_come, world_size=2, timeout=30)[0]
    assert "imed out" in text or "imeout" in text
    assert 1 < seconds < 10


def fails() -> str:
    initialize()
    made = optimizer()

    def failing(matrix: Tensor, _settings: NewtonSchulz) -> Tensor:
        if dist.get_rank() == 1:
            raise MemoryError("no room")
        return matrix

    try:
        with failing_together("step 2"), patch.object(hp_optim.muon, "orthogonalize", failing):
            made.step()
    except (MemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_an_error_of_one_owner_ends_all_ranks_and_names_it() -> None:
    said = run_distributed(fails, world_size=2, timeout=30)
    assert said[0].startswith("PeerError: rank 1, step 2: MemoryError: no room")
    assert said[1] == "MemoryError: no room"
