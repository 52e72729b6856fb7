"""FSDP2 can be kept from freeing parameters, and exchange in other ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hp_platform import (
    linear,
    set_fsdp_exchanges,
    set_fsdp_frees_parameters,
    set_fsdp_gather_dtype,
    set_fsdp_hooks,
)
from hp_platform.testing import record_exchanges, run_distributed


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


def with_and_without_hooks() -> list[object]:
    """Whether weights are gathered in a forward and the gradient is reduced, by policy."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: list[object] = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        module: Any = fully_shard(nn.Linear(2, 2, bias=False), mesh=mesh, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)
        for active in (True, False, True):
            set_fsdp_hooks(module, active=active)
            module.unshard()
            y = module(torch.ones(1, 2))
            module.set_modules_to_backward_prefetch([module])
            torch.autograd.backward(y.sum())
            is_gathered = not isinstance(module.weight, DTensor)
            found += [is_gathered, module.weight.grad is not None, y.dtype]
            module.reshard()
    return found


def test_without_hooks_parameters_stay_and_gradients_wait_unless_something_is_cast() -> None:
    usual = [False, True, torch.float32]
    cast = [False, True, torch.bfloat16]
    silent = [True, True, torch.float32]  # the gradient of the gathered weight
    for found in run_distributed(with_and_without_hooks, world_size=2):
        assert found == [*usual, *silent, *usual, *cast, *cast, *cast]


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


class Mixed(nn.Module):
    """A table and a matrix that are cast, and a norm that is not; nothing divides by three."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.matrix = nn.Embedding(7, 5), nn.Linear(5, 4)
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.table(ids).to(torch.bfloat16)
        scaled = (rows * self.norm).to(torch.bfloat16)
        y: Tensor = linear(scaled, self.matrix.weight, self.matrix.bias, dtype=torch.bfloat16)
        return y


def steps_gathered_wide_and_narrow() -> list[tuple[list[Tensor], int]]:
    """Gradients of three backwards that are reduced once, and the bytes of a gather."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for narrow in (False, True):
        torch.manual_seed(0)
        module: Any = fully_shard(Mixed(), mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        if narrow:
            cast = [*module.table.parameters(), *module.matrix.parameters()]
            set_fsdp_gather_dtype(cast, torch.bfloat16)
            set_fsdp_gather_dtype([module.norm], torch.float32)  # which it has
        for step in range(3):
            module.set_requires_gradient_sync(step == 2)
            ids = (torch.arange(6) * (step + 1) + dist.get_rank()) % 7
            torch.autograd.backward(module(ids).float().square().sum())
        with record_exchanges() as exchanges:
            module.unshard()
        if narrow:
            with pytest.raises(ValueError, match="must be cast to that"):
                torch.relu(module.matrix.weight)
            assert F.linear(torch.ones(5).bfloat16(), module.matrix.weight.bfloat16()).shape == (4,)
            assert module.matrix.weight.dtype == torch.float32
            assert "float32" in repr(module.table.weight)
        module.reshard()
        gradients = [parameter.grad.full_tensor() for parameter in module.parameters()]
        found.append((gradients, sum(exchange.num_bytes for exchange in exchanges)))
    return found


def test_a_parameter_is_gathered_in_the_dtype_it_is_cast_to() -> None:
    for (wide, wide_bytes), (narrow, narrow_bytes) in run_distributed(
        steps_gathered_wide_and_narrow, world_size=3
    ):
        for one, other in zip(wide, narrow, strict=True):
            assert other.dtype == torch.float32
            assert torch.equal(one, other)
            assert one.abs().sum() > 0
        # Shards are padded: 3 of 7 rows, 2 of 4 rows and elements; 2 of 5 elements stay wide.
        cast = 3 * 5 + 2 * 5 + 2
        assert wide_bytes == 2 * 4 * (cast + 2)
        assert narrow_bytes == 2 * (2 * cast + 4 * 2)


def test_a_parameter_that_is_not_sharded_is_gathered_in_no_dtype() -> None:
    with pytest.raises(TypeError, match=r"parameter of shape \(2, 3\) must be sharded"):
        set_fsdp_gather_dtype([nn.Parameter(torch.zeros(2, 3))], torch.bfloat16)
