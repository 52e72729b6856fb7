"""FSDP2 can be kept from freeing parameters, and exchange in other ways."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_platform import set_fsdp_exchanges, set_fsdp_frees_parameters
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


def steps_with_and_without_pairs() -> list[list[float]]:
    """Two steps of forward and backward, of which one has its parameters gathered ahead."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for by_pairs in (False, True):
        torch.manual_seed(0)
        module: Any = fully_shard(nn.Linear(5, 7).double(), mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        if by_pairs:
            set_fsdp_exchanges(module, group=mesh.get_group())
        x = torch.arange(10.0, dtype=torch.float64).view(2, 5) + dist.get_rank()
        for ahead in (False, True):
            if ahead:
                module.unshard(async_op=True)
            torch.autograd.backward(module(x).square().sum())
        gradients = [parameter.grad.full_tensor() for parameter in module.parameters()]
        found.append(torch.cat([gradient.flatten() for gradient in gradients]).tolist())
    return found


def test_exchanges_between_pairs_give_the_gradients_of_fsdps_own() -> None:
    for usual, by_pairs in run_distributed(steps_with_and_without_pairs, world_size=3):
        torch.testing.assert_close(by_pairs, usual, rtol=1e-14, atol=0.0)
        assert len(set(by_pairs)) > 30
