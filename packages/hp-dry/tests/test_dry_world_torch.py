"""Loops of torch's own, FSDP2 and pipelining, run in a dry world and are proven to fit."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import hp_platform
from hp_dry import prove, run_ranks
from hp_dry.trace import Collective, Trace

TIMEOUT = 120.0


def operations(trace: Trace) -> list[tuple[str, str]]:
    """Operations on the device and their reductions."""
    return [(e.op, e.detail) for e in trace.events if isinstance(e, Collective)]


def sharded_loop() -> None:
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks).cuda()
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("classes", [{0: range(8)}, {0: range(4), 4: range(4, 8)}])
def test_fsdp2_is_proven_for_all_ranks(classes: dict[int, Sequence[int]]) -> None:
    ran = run_ranks(sharded_loop, world_size=8, representatives=classes, timeout=TIMEOUT)
    assert prove(ran.traces, classes=ran.classes) == []
    for trace in ran.traces.values():
        found = operations(trace)
        assert found.count(("all_gather", "")) == 2 * (3 + 3)  # forward and backward
        assert found.count(("reduce_scatter", "avg")) == 2 * 3


def pipeline_loop() -> None:
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    stage = PipelineStage(nn.Linear(8, 8).cuda(), rank, size, device)
    schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
    x = torch.randn(8, 8, device="cuda")
    for _ in range(2):
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=x)
        else:
            schedule.step()


def test_torchs_pipelining_is_proven() -> None:
    """Stages tell each other shapes as objects over NCCL, then send activations and gradients."""
    ran = run_ranks(pipeline_loop, world_size=3, timeout=TIMEOUT)
    assert prove(ran.traces) == []
    sent = [
        event
        for event in ran.traces[0].events
        if isinstance(event, Collective) and event.op == "send" and event.inputs[0][0] == (2, 8)
    ]
    assert len(sent) == 2 * 4
    assert {event.peer for event in sent} == {1}


def messages() -> list[float]:
    runtime = hp_platform.initialize(device_type="cuda")
    size, rank = dist.get_world_size(), dist.get_rank()
    group = hp_platform.new_group([list(range(size))], name="ring")
    assert group is not None
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    x, y = torch.ones(3, device="cuda"), torch.empty(3, device="cuda")
    hp_platform.isend_irecv([(x, ahead)], [(y, behind)], group=group).wait()
    host = torch.full((2,), float(rank))
    received = hp_platform.irecv(torch.empty(2), behind, group=runtime.control)
    hp_platform.isend(host, ahead, group=runtime.control).wait()
    hp_platform.launch_all_to_all(torch.ones(size, 2, device="cuda"), group=group).wait()
    hp_platform.shutdown()
    return received.wait().tolist()


@pytest.mark.parametrize("classes", [None, {0: range(4)}])
def test_messages_of_this_package_go_around(classes: dict[int, Sequence[int]] | None) -> None:
    ran = run_ranks(messages, world_size=4, representatives=classes, timeout=TIMEOUT)
    speaks = ran.classes.representative
    for rank, found in ran.results.items():
        assert found == [float(speaks[(rank - 1) % 4])] * 2
    assert prove(ran.traces, classes=ran.classes) == []
