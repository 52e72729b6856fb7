"""FSDP2 can be kept from freeing parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_platform import set_fsdp_frees_parameters
from hp_platform.testing import run_distributed


def sharded_after_each_step() -> list[bool]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    module: Any = fully_shard(nn.Linear(2, 2), mesh=mesh)
    found = []
    for frees in (False, True):
        set_fsdp_frees_parameters(module, frees)
        module.unshard()
        module.reshard()
        found.append(isinstance(module.weight, DTensor))
        torch.autograd.backward(module(torch.ones(1, 2)).sum())
        found.append(isinstance(module.weight, DTensor))
    return found


def test_parameters_stay_gathered_until_freeing_is_allowed_again() -> None:
    for found in run_distributed(sharded_after_each_step, world_size=2):
        assert found == [False, False, True, True]
