"""Host reads of a layer: one in forward, none in backward."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hp_expert import AllToAllDispatcher, ExpertParallel, GroupedExperts, MoE, TopKRouter
from hp_expert.testing import host_reads
from hp_platform.testing import run_distributed

EXPERTS, DIM, HIDDEN = 8, 4, 6


def reads_of_a_layer(deduplicate: Any, drop: bool) -> list[list[str]]:
    group = dist.group.WORLD
    assert group is not None
    moe = MoE(TopKRouter(DIM, EXPERTS, 2), GroupedExperts(EXPERTS, DIM, HIDDEN)).double()
    ExpertParallel().apply(moe, group)
    if group.size() > 1:
        moe.experts.dispatcher = AllToAllDispatcher(group, EXPERTS, deduplicate)
    found = []
    for count in (9, 14):
        x = torch.randn(count + group.rank(), DIM, dtype=torch.float64, requires_grad=True)
        replay = torch.randint(-1 if drop else 0, EXPERTS, (len(x), 2)) if drop else None
        with host_reads() as forward:
            if replay is None:
                y, _ = moe(x)
            else:
                y = dropping(moe, x, replay)
        with host_reads() as backward:
            y.sum().backward()
        found += [forward, backward]
    return found


def dropping(moe: MoE, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The layer behind the router, for slots some of which go nowhere."""
    dispatcher, weights = moe.experts.dispatcher, torch.ones(experts.shape, requires_grad=True)
    rows, state = dispatcher.launch_dispatch(*dispatcher.prepare(x, experts, weights))
    out = moe.experts(dispatcher.finish_dispatch(rows, state))
    y: torch.Tensor = dispatcher.finish_combine(dispatcher.launch_combine(out, state), state)
    return y


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize(("world_size", "deduplicate"), [(1, False), (2, False), (2, True)])
def test_a_layer_reads_the_host_once(world_size: int, deduplicate: bool, drop: bool) -> None:
    for found in run_distributed(reads_of_a_layer, deduplicate, drop, world_size=world_size):
        assert found == [["tolist"], [], ["tolist"], []]


def test_every_way_to_read_values_is_found() -> None:
    x = torch.arange(4)
    mask = x > 1
    with host_reads() as found:
        x.tolist()
        x.numpy()
        x.cpu()
        np.asarray(x)
    assert found == ["tolist", "numpy", "cpu", "numpy"]
    with host_reads() as found:
        x.sum().item()
        bool(x.sum() > 3)
        float(x.sum())
        range(5)[x[2]]
    assert found == ["_local_scalar_dense"] * 4
    with host_reads() as found:
        x[mask]
        x.masked_select(mask)
        x.nonzero()
        x.unique()
        x.bincount()
        torch.equal(x, x)
        x.repeat_interleave(x)
    assert [name.split(".")[0] for name in found] == [
        "index", "masked_select", "nonzero", "_unique2", "bincount", "equal", "repeat_interleave"
    ]  # fmt: skip


def test_what_needs_no_values_is_not_counted() -> None:
    x = torch.arange(4)
    with host_reads() as found:
        x.repeat_interleave(x, output_size=6)
        x[x]
        x.where(x > 1, 0)
        x.to(torch.float64).sum()
        assert x.shape[0] == x.numel()
    assert found == []
    x.tolist()  # nothing is left in place
    assert found == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_waits_for_a_gpu_are_found_and_copies_that_do_not_wait_are_none() -> None:
    x = torch.arange(4, device="cuda")
    on_host = torch.empty(4, dtype=torch.int64, pin_memory=True)
    with host_reads("cuda") as found:
        on_host.copy_(x, non_blocking=True)
        on_host.tolist()
        torch.arange(3).tolist()
    assert found == []
    with host_reads("cuda") as found:
        torch.cuda.current_stream().synchronize()
        on_host.copy_(x)
        x.sum().item()
    assert found == ["synchronize", "copy_", "_local_scalar_dense"]
