"""Where a process learns its place and device, and how it starts and stops."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from hp_platform import RankInfo, backend_for, initialize, local_device, new_group, shutdown
from hp_platform import device as device_module
from hp_platform import launch as launch_module
from hp_platform._internals import HashStore
from hp_platform.launch import _create_default_group
from hp_platform.testing import run_distributed

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SWITCH = "NCCL_MULTI_RANK_GPU_ENABLE"


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """No default group before or after, and no launcher in the environment."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", SWITCH)
    for name in (*names, "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    yield monkeypatch
    shutdown()


def test_torchrun_is_read() -> None:
    env = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert RankInfo.from_env(env) == RankInfo(5, 8, 1, 4)


def test_one_machine_is_assumed_without_local_ranks() -> None:
    assert RankInfo.from_env({"RANK": "1", "WORLD_SIZE": "2"}) == RankInfo(1, 2, 1, 2)


@pytest.mark.parametrize(
    ("tasks", "local_world"), [("4(x2)", 4), ("4", 4), ("4,3", 4), (None, 8), ("1(x8)", 2)]
)
def test_slurm_is_read(tasks: str | None, local_world: int) -> None:
    env = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}
    if tasks is not None:
        env["SLURM_STEP_TASKS_PER_NODE"] = tasks
    assert RankInfo.from_env(env) == RankInfo(5, 8, 1, local_world)


def test_without_a_launcher_there_is_no_place() -> None:
    assert RankInfo.from_env({}) is None
    assert RankInfo.from_env({"RANK": "0"}) is None


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "two", "WORLD_SIZE": "2"}, r"RANK \('two'\) must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"rank \(2\) must be in \[0, world_size \(2\)\)"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "2"},
            r"local_rank \(4\) must be in \[0, local_world_size \(2\)\)",
        ),
    ],
)
def test_contradictions_are_refused(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankInfo.from_env(env)


@pytest.mark.usefixtures("clean")
def test_a_lone_process_is_a_world_of_one() -> None:
    runtime = initialize(timeout=timedelta(seconds=9))
    assert runtime.info == RankInfo(0, 1, 0, 1)
    assert (runtime.device, runtime.backend) == (CPU, "gloo")
    assert runtime.timeout == timedelta(seconds=9)
    assert runtime.control is not dist.group.WORLD
    group = new_group([[0]], name="x")
    assert group is not None
    assert group._get_backend(CPU).options._timeout == timedelta(seconds=9)
    shutdown()
    assert not dist.is_initialized()
    shutdown()


@pytest.mark.parametrize("backend", [None, "cpu:gloo", "gloo"])
@pytest.mark.usefixtures("clean")
def test_a_default_group_of_someone_else_is_described_as_it_is(backend: str | None) -> None:
    dist.init_process_group(
        backend, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=8)
    )
    runtime = initialize()
    assert (runtime.backend, runtime.timeout) == ("gloo", timedelta(seconds=8))
    group = new_group([[0]], name="x")
    assert group is not None
    assert group._get_backend(CPU).options._timeout == timedelta(seconds=8)


@pytest.mark.usefixtures("clean")
def test_an_existing_default_group_is_kept_and_checked() -> None:
    initialize()
    world = dist.group.WORLD
    assert initialize().info == RankInfo(0, 1, 0, 1)
    assert dist.group.WORLD is world
    with pytest.raises(ValueError, match="rank 1 of 2 must equal that of the existing default"):
        initialize(RankInfo(1, 2, 1, 2))


def _controls() -> tuple[bool, bool, list[str | None]]:
    runtime = initialize()
    objects: list[str | None] = [None, None]
    dist.all_gather_object(objects, f"rank {runtime.info.rank}", group=runtime.control)
    return runtime.control is dist.group.WORLD, runtime.device == CPU, objects


def test_control_traffic_has_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    expected = (False, True, ["rank 0", "rank 1"])
    assert run_distributed(_controls, world_size=2) == [expected] * 2


def _initialize_by_address(address: str) -> tuple[int, int]:
    rank = dist.get_rank()
    shutdown()
    runtime = initialize(RankInfo(rank, 2, rank, 2), init_method=address, device_type="cpu")
    return runtime.info.rank, dist.get_world_size()


def test_an_address_may_be_given(tmp_path_factory: pytest.TempPathFactory) -> None:
    address = f"file://{tmp_path_factory.mktemp('rendezvous') / 'file'}"
    assert run_distributed(_initialize_by_address, address, world_size=2) == [(0, 2), (1, 2)]


@pytest.fixture
def two_gpus(clean: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that seems to have two GPUs and NCCL 2.29."""
    clean.setenv("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    clean.setattr(torch.cuda, "device_count", lambda: 2)
    clean.setattr(torch.cuda, "set_device", lambda _: None)
    clean.setattr(dist, "is_nccl_available", lambda: True)
    clean.setattr(device_module, "_nccl_version", lambda: (2, 29, 7))
    return clean


@pytest.mark.usefixtures("two_gpus")
def test_gpus_are_dealt_in_rounds() -> None:
    devices = [local_device(rank) for rank in range(4)]
    assert [device.index for device in devices] == [0, 1, 0, 1]
    assert local_device(3, device_type="cpu") == CPU


@pytest.mark.usefixtures("clean")
def test_a_missing_gpu_and_an_unknown_device_are_refused() -> None:
    assert local_device() == CPU
    with pytest.raises(ValueError, match=r"device_type \(cuda\) must be cpu or auto"):
        local_device(device_type="cuda")
    with pytest.raises(ValueError, match=r"device_type \(tpu\) must be one of"):
        local_device(device_type="tpu")


def test_ranks_that_share_a_gpu_need_a_new_nccl(two_gpus: pytest.MonkeyPatch) -> None:
    assert backend_for(CPU) == "gloo"
    assert backend_for(GPU) == "nccl"
    assert backend_for(GPU, ranks_per_device=2) == "gloo"
    two_gpus.setenv(SWITCH, "1")  # the library in use may be newer than the one torch was built for
    assert backend_for(GPU, ranks_per_device=2) == "nccl"
    two_gpus.setenv(SWITCH, "0")
    two_gpus.setattr(device_module, "_nccl_version", lambda: (2, 30, 7))
    assert backend_for(GPU, ranks_per_device=2) == "gloo"
    two_gpus.delenv(SWITCH)
    assert backend_for(GPU, ranks_per_device=2) == "nccl"


@dataclass
class Task:
    """A process of a fake machine: what CUDA tells it of the device that it has."""

    rank: int
    host: str
    gpu: str
    visible: str = "0"


def machine(
    tasks: list[Task], monkeypatch: pytest.MonkeyPatch, **choice: str
) -> list[tuple[str, object]]:
    """What each task starts: backend and device, or the error.

    Every task is a thread that sees one device, `cuda:0`, as under `srun --gpus-per-task=1`.
    """
    store, here = HashStore(), threading.local()
    started: list[tuple[str, object]] = [("", None)] * len(tasks)

    def begin(backend: str, **arguments: object) -> None:
        started[here.task.rank] = (backend, arguments["device_id"])

    def meet(_address: str, rank: int, size: int, **_: object) -> Iterator[tuple[object, int, int]]:
        yield store, rank, size

    properties = lambda _device: SimpleNamespace(uuid=here.task.gpu)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(socket, "gethostname", lambda: here.task.host)
    monkeypatch.setattr(dist, "init_process_group", begin)
    monkeypatch.setattr(launch_module, "rendezvous", meet)

    def run(task: Task) -> None:
        here.task = task
        info = RankInfo(task.rank, len(tasks), task.rank % 2, 2)
        device = local_device(info.local_rank)
        try:
            _create_default_group(info, device, timedelta(seconds=30), None, **choice)
        except ValueError as error:
            started[task.rank] = ("error", str(error))

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return started


TWO_NODES = [Task(rank, f"node{rank // 2}", f"gpu-{rank}") for rank in range(4)]
SHARED = [Task(rank, f"node{rank // 2}", f"gpu-{max(rank, 1)}") for rank in range(4)]


def test_tasks_that_see_one_gpu_each_use_nccl_where_it_is_their_own(
    two_gpus: pytest.MonkeyPatch,
) -> None:
    assert machine(TWO_NODES, two_gpus) == [("nccl", GPU)] * 4
    assert SWITCH not in os.environ


def test_hosts_may_number_their_gpus_alike(two_gpus: pytest.MonkeyPatch) -> None:
    tasks = [Task(rank, f"node{rank // 2}", f"gpu-{rank % 2}") for rank in range(4)]
    assert machine(tasks, two_gpus) == [("nccl", GPU)] * 4


def test_parts_of_one_gpu_are_devices_of_their_own(two_gpus: pytest.MonkeyPatch) -> None:
    store = HashStore()
    two_gpus.setattr(
        torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(uuid="gpu-0")
    )
    for part in ("MIG-1", "MIG-2"):
        two_gpus.setenv("CUDA_VISIBLE_DEVICES", part)
        assert device_module.ranks_per_device(GPU, 1, store) == 1


def test_a_gpu_that_is_shared_is_no_reason_to_take_gloo_in_silence(
    two_gpus: pytest.MonkeyPatch,
) -> None:
    message = (
        "backend (auto) must be gloo, through the host and far slower, where 2 ranks share a GPU, "
        "which NCCL (2.29.7) cannot serve: give every rank a GPU of its own"
    )
    assert machine(SHARED, two_gpus) == [("error", message)] * 4  # also where no GPU is shared


def test_torch_without_nccl_is_no_reason_either(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setattr(dist, "is_nccl_available", lambda: False)
    for kind, text in machine(TWO_NODES, two_gpus):
        assert kind == "error"
        assert "torch is built without NCCL" in str(text)


def test_gloo_for_gpus_is_a_choice_that_is_said_once(
    two_gpus: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="hp_platform"):
        assert machine(SHARED, two_gpus, backend="gloo") == [("gloo", None)] * 4
    (notice,) = caplog.messages
    assert notice == "backend (gloo) moves what GPUs exchange through the host: far slower"


@pytest.mark.usefixtures("clean")
def test_an_unknown_backend_and_nccl_for_cpus_are_refused() -> None:
    with pytest.raises(ValueError, match=r"backend \(mpi\) must be one of auto, gloo, nccl"):
        initialize(backend="mpi")
    with pytest.raises(ValueError, match=r"backend \(nccl\) must be auto or gloo for device"):
        initialize(backend="nccl")


@pytest.mark.parametrize("wanted", [None, "true"])
def test_sends_on_groups_of_their_own_are_not_warned_of(
    two_gpus: pytest.MonkeyPatch, wanted: str | None
) -> None:
    name = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
    two_gpus.setenv(name, wanted or "")
    if wanted is None:
        two_gpus.delenv(name)
    machine(TWO_NODES, two_gpus)
    assert os.environ[name] == (wanted or "false")


def test_sharing_through_nccl_turns_its_switch_on(two_gpus: pytest.MonkeyPatch) -> None:
    two_gpus.setenv(SWITCH, "")
    two_gpus.delenv(SWITCH)
    two_gpus.setattr(device_module, "_nccl_version", lambda: (2, 30, 7))
    assert machine(SHARED, two_gpus) == [("nccl", GPU)] * 4
    assert os.environ[SWITCH] == "1"
