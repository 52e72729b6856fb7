"""Exchanges over shared memory: more of them than slots, lost ranks, nothing left behind."""

from __future__ import annotations

import os
import random
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hp_platform import _internals, set_fsdp_exchanges
from hp_platform.collectives.shared_memory import Channel, Exchange
from hp_platform.testing import run_distributed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs memfd_create")


def connect(num_slots: int = 2, *, seconds: float = 30.0) -> Channel | None:
    group = dist.group.WORLD
    assert group is not None
    return Channel.connect(group, num_slots=num_slots, timeout=timedelta(seconds=seconds))


def post(channel: Channel, number: int, size: int, got: dict[tuple[int, int], list[int]]) -> Any:
    def fill(memory: Tensor) -> None:
        memory.fill_(16 * number + dist.get_rank())

    def read(memories: list[Tensor]) -> None:
        for rank, memory in enumerate(memories):
            got[number, rank] = [len(memory), *memory.unique().tolist()]

    return channel.post(size, fill=fill, read=read)


def many_under_way() -> bool:
    """Seven exchanges of growing and shrinking sizes through two slots, waited for in disorder."""
    channel = connect()
    assert channel is not None
    got: dict[tuple[int, int], list[int]] = {}
    sizes = [10, 5000, 3, 70_000, 70_001, 1, 200_000]
    exchanges: list[Exchange] = []
    for number, size in enumerate(sizes):
        if number % 2 == dist.get_rank() % 2:
            time.sleep(0.01)
        exchanges.append(post(channel, number, size, got))
        if number == 3:
            exchanges[2].wait()
    for exchange in reversed(exchanges):
        exchange.wait()
    wanted = {
        (number, rank): [size, 16 * number + rank]
        for number, size in enumerate(sizes)
        for rank in range(dist.get_world_size())
    }
    return got == wanted


def test_more_exchanges_than_slots_bring_everybodys_bytes() -> None:
    assert run_distributed(many_under_way, world_size=3) == [True] * 3


def of_other_sizes() -> str:
    channel = connect()
    assert channel is not None
    got: dict[tuple[int, int], list[int]] = {}
    post(channel, 0, 5000, got).wait()  # its memory is large enough for what follows
    try:
        post(channel, 1, 40 + 8 * dist.get_rank(), got).wait()
    except RuntimeError as error:
        return str(error)
    return ""


def test_other_sizes_are_refused_and_not_read_as_something_else() -> None:
    first, second = run_distributed(of_other_sizes, world_size=2)
    assert first.startswith("bytes here (40) must equal bytes of rank 1 (48) in an exchange")
    assert second.startswith("bytes here (48) must equal bytes of rank 0 (40) in an exchange")


def without_one_rank(how: str) -> tuple[str, float]:
    channel = connect(seconds=0.5 if how == "late" else 600.0)
    assert channel is not None
    got: dict[tuple[int, int], list[int]] = {}
    post(channel, 0, 4, got).wait()
    message, began = "", time.monotonic()
    if dist.get_rank() == 1 and how == "ended":
        del channel
    elif dist.get_rank() != 1:
        with pytest.raises(RuntimeError) as caught:
            post(channel, 1, 4, got).wait()
        message = str(caught.value)
    seconds = time.monotonic() - began
    dist.barrier()
    return message, seconds


@pytest.mark.parametrize(
    ("how", "why"), [("ended", "it has ended"), ("late", "it did not come within 0:00:00.5")]
)
def test_a_rank_that_does_not_come_is_named(how: str, why: str) -> None:
    found = run_distributed(without_one_rank, how, world_size=3, timeout=300)
    for rank in (0, 2):
        message, seconds = found[rank]
        assert message.startswith("an exchange with rank 1 failed: ")
        assert why in message
        assert seconds < 100  # not the time-out of 600; 0.6 s on a quiet machine


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def connect_and_drop() -> tuple[int, int]:
    connect()  # what Python opens at first use
    before = descriptors()
    channel = connect()
    assert channel is not None
    post(channel, 0, 100, {}).wait()
    assert descriptors() > before
    del channel
    return before, descriptors()


def test_nothing_stays_open() -> None:
    for before, after in run_distributed(connect_and_drop, world_size=2):
        assert after == before


def no_memory(name: str, flags: int) -> int:
    raise OSError(f"{name} cannot be had with {flags}")


def steps_of_fsdp() -> list[list[float]]:
    """Gradients with FSDP's own exchanges, in shared memory, in place, and where that fails."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for how in ("usual", "shared", "in place", "apart"):
        torch.manual_seed(0)
        group = dist.new_group() if how == "apart" else mesh.get_group()
        assert isinstance(group, dist.ProcessGroup)
        layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4))).double()
        modules: list[Any] = [fully_shard(layer, mesh=mesh) for layer in (*layers, layers)]
        for module in modules:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        with pytest.MonkeyPatch.context() as patch:
            if how == "apart" and dist.get_rank() == 1:
                patch.setattr(os, "memfd_create", no_memory)
            for module in modules if how != "usual" else ():
                set_fsdp_exchanges(module, group=group, in_place=how in ("in place", "apart"))
        x = torch.arange(10.0, dtype=torch.float64).view(2, 5) + dist.get_rank()
        for ahead in (False, True):
            for module in modules if ahead else ():
                module.unshard(async_op=True)  # more at once than there are slots
            torch.autograd.backward(layers(x).square().sum())
        gradients = [parameter.grad.full_tensor() for parameter in layers.parameters()]  # type: ignore[union-attr]
        found.append(torch.cat([gradient.flatten() for gradient in gradients]).tolist())
    return found


def test_fsdp_has_the_same_gradients_with_and_without_shared_memory() -> None:
    for usual, shared, in_place, apart in run_distributed(steps_of_fsdp, world_size=3):
        torch.testing.assert_close(shared, usual, rtol=1e-13, atol=0.0)
        assert in_place == apart == shared  # sums are in rank order in all of them
        assert len(set(shared)) > 60


def gathers_of_changing_weights() -> list[float]:
    """Units of uneven sizes, gathered in place again and again by ranks that are early or late."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, wrong = dist.get_rank(), []
    layers = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 300), nn.Linear(300, 2))
    modules: list[Any] = [fully_shard(layer, mesh=mesh) for layer in layers]
    for module in modules:
        module.set_force_sum_reduction_for_comms(True)
        set_fsdp_exchanges(module, group=mesh.get_group(), in_place=True)
    for step in range(40):
        for number, parameter in enumerate(layers.parameters()):
            assert isinstance(parameter, DTensor)
            with torch.no_grad():
                parameter.to_local().fill_(100 * step + number)
        time.sleep(0.002 * (random.Random(7 * step + rank).random() < 0.3))
        for module in modules:
            module.unshard(async_op=step % 3 > 0)
        for module in reversed(modules) if step % 3 == 1 else modules:
            time.sleep(0.002 * (random.Random(5 * step + rank).random() < 0.3))
            module.unshard()
        for number, parameter in enumerate(layers.parameters()):
            wrong += parameter[parameter != 100 * step + number].tolist()
        if step % 2:
            torch.autograd.backward(layers(torch.ones(1, 7)).sum())
        for module in modules:
            module.reshard()
    return wrong


def test_nobody_overwrites_what_another_rank_still_gathers() -> None:
    assert run_distributed(gathers_of_changing_weights, world_size=3) == [[]] * 3


def reduced_before_it_is_copied(waits: bool) -> list[float]:
    """What a late rank copies of a gather that others begin again after gradients were reduced."""
    group, cpu = dist.group.WORLD, torch.device("cpu")
    assert group is not None
    module: Any = fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (group.size(),)))
    set_fsdp_exchanges(module, group=group, in_place=True)
    (params,) = _internals.fsdp_param_groups(module)
    gather, reduce = params._all_gather_comm, params._reduce_scatter_comm
    rank, length, found = group.rank(), 4, []
    for step in range(3):
        gathered = gather.allocate((length * group.size(),), dtype=torch.float32, device=cpu)
        own = gathered[length * rank :][:length].fill_(10.0 * step + rank)
        work = gather(gathered, own, group, async_op=True)
        if waits:
            work.wait()
            found += gathered.tolist()
        given = reduce.allocate((length * group.size(),), dtype=torch.float32, device=cpu).fill_(1)
        reduce(torch.empty(length), given, group, dist.ReduceOp.SUM)
        if not waits:
            work.wait()
            time.sleep(0.1 * (rank == 0))
            found += gathered.tolist()
    return found


@pytest.mark.parametrize("waits", [True, False])
def test_gradients_tell_of_gathers_that_were_waited_for_alone(waits: bool) -> None:
    wanted = [10.0 * step + rank for step in range(3) for rank in range(2) for _ in range(4)]
    assert run_distributed(reduced_before_it_is_copied, waits, world_size=2) == [wanted] * 2


def one_cannot() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(os, "memfd_create", no_memory)
        return connect() is None


def test_all_do_without_where_one_rank_has_to() -> None:
    assert run_distributed(one_cannot, world_size=3) == [True] * 3
