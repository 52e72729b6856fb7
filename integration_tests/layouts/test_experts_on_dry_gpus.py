"""Experts on GPUs that are not there: what NCCL is asked for, and where the host waits."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from hp_dry import DryDevice, Gpu, active_device, run_ranks
from hp_dry.trace import Collective, Fault, HostWait
from hp_expert import GroupedExperts, LocalDispatcher, MoE, TopKRouter, fully_shard_experts
from hp_platform import initialize

TOKENS, DIM, HIDDEN, EXPERTS, TOP_K = 24, 16, 32, 8, 2


def reduced_by(copies: int, shards: int, dtype: str) -> dict[str, list[str]]:
    """By operation between ranks: the reductions that NCCL would be asked for."""
    initialize(device_type="cuda")
    names = ("copies", "efsdp")
    mesh = init_device_mesh("cuda", (copies, shards), mesh_dim_names=names)
    experts = GroupedExperts(EXPERTS, DIM, HIDDEN, device="cuda", dtype=getattr(torch, dtype))
    fully_shard_experts(
        experts, mesh if copies > 1 else mesh["efsdp"], divide_gradients_by=copies * shards
    )
    x = torch.randn(4, DIM, device="cuda", dtype=experts.w1.dtype)
    chosen = torch.zeros(4, 2, device="cuda", dtype=torch.int64)
    _, batch = LocalDispatcher(EXPERTS).prepare(x, chosen)
    first = len(active_device().trace.events)
    experts(batch).sum().backward()
    found: dict[str, list[str]] = {}
    for event in active_device().trace.events[first:]:
        if isinstance(event, Collective) and event.op != "all_gather":
            found.setdefault(event.op, []).append(event.detail)
    return found


@pytest.mark.parametrize(("copies", "shards"), [(1, 2), (2, 1), (2, 2)])
def test_gradients_of_experts_are_summed_on_gpus_and_scaled_apart(copies: int, shards: int) -> None:
    summed = {"all_reduce": ["sum"]} if copies > 1 else {}
    summed |= {"reduce_scatter": ["sum"]} if shards > 1 else {}
    size = copies * shards
    classes = {0: range(size)}
    run = run_ranks(
        reduced_by, copies, shards, "bfloat16", world_size=size, representatives=classes
    )
    assert run.results[0] == summed


def host_waits(gpu: Gpu, dtype: torch.dtype) -> list[str]:
    """Where the host waits in forward and backward of an MoE layer on a GPU, without one."""
    with DryDevice(gpu=gpu) as device:
        moe: Any = MoE(TopKRouter(DIM, EXPERTS, TOP_K), GroupedExperts(EXPERTS, DIM, HIDDEN))
        moe = moe.to(device="cuda", dtype=dtype)
        x = torch.randn(TOKENS, DIM, device="cuda", dtype=dtype, requires_grad=True)
        before = len(device.trace.events)
        y, _ = moe(x)
        y.sum().backward()
        events = device.trace.events[before:]
        assert not [event for event in events if isinstance(event, Fault)]
        return [event.what for event in events if isinstance(event, HostWait)]


def test_on_an_h100_in_bf16_nothing_waits_for_the_device() -> None:
    assert host_waits(Gpu(), torch.bfloat16) == []


def test_before_sm_90_or_in_fp32_the_counts_are_read_once() -> None:
    assert len(host_waits(Gpu(name="A100", capability=(8, 0)), torch.bfloat16)) == 1
    assert len(host_waits(Gpu(), torch.float32)) == 1
