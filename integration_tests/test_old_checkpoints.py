"""What the packages of commit 41bc79d saved, each in its format of then, still loads."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from hp_expert import load_experts
from hp_platform.testing import run_distributed
from hp_train.checkpoint import load_latest
from hp_vtp import PipelineLayout
from hp_vtp.checkpoint import load_checkpoint, load_optimizer, optimizer_dim
from integration_tests.old_checkpoints.make import (
    EXTRA,
    Experts,
    train_tensors,
    trained,
    vtp_dim,
    vtp_parameters,
)

_OLD = Path(__file__).parent / "old_checkpoints"
_CUTS = {1: [0, 5], 2: [0, 2, 5]}


def _world() -> ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _train(folder: Path) -> None:
    tensors = train_tensors()
    expected = {name: _local(tensor).clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        _local(tensor).zero_()
    loaded = load_latest(folder, tensors=tensors, group=_world())
    assert loaded is not None
    assert (loaded.step, loaded.extra, loaded.skipped) == (3, EXTRA, [])
    for name, tensor in tensors.items():
        assert torch.equal(_local(tensor), expected[name]), name


def _expert(folder: Path) -> None:
    num_local = 4 // dist.get_world_size()
    experts = Experts(num_local * dist.get_rank(), num_local)
    expected = {name: p.detach().clone() for name, p in experts.named_parameters()}
    for parameter in experts.parameters():
        nn.init.zeros_(parameter)
    load_experts(nn.ModuleDict({"experts": experts}), folder, group=_world())
    assert all(torch.equal(p, expected[name]) for name, p in experts.named_parameters())


def _vtp(folder: Path) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = slice(*_CUTS[ranks][rank : rank + 2])
    expected = vtp_parameters(rows)
    then = trained(expected)
    parameters = vtp_parameters(rows)
    for parameter in parameters.values():
        nn.init.zeros_(parameter)
    layout, dim = PipelineLayout.straight([ranks]), optimizer_dim(vtp_dim)
    assert load_checkpoint(folder, parameters, sharded_dim=dim, layout=layout) == EXTRA
    now = torch.optim.AdamW(parameters.values(), lr=0.01)
    load_optimizer(folder, now, parameters, sharded_dim=dim, layout=layout)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, expected[name]), name
        states = now.state[parameter], then.state[expected[name]]
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0]), name


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("which", [_train, _expert, _vtp])
def test_a_checkpoint_of_commit_41bc79d_loads(
    which: Callable[[Path], None], world_size: int, tmp_path: Path
) -> None:
    folder = shutil.copytree(_OLD / which.__name__.strip("_"), tmp_path / "copy")
    run_distributed(which, folder, world_size=world_size)
