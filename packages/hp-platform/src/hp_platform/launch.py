"""Start and end of the distributed runtime of one process.

Note [No core by waking up]. A thread of Gloo waits for messages. Linux lets a thread that wakes up
take the core of a running thread, here of the thread that is still sending and has the lock of the
connection. Gloo's thread cannot get that lock and asks for the same events again, without a pause,
until its slice of time ends: 11 million calls of `epoll_wait` in 1,000 all-reduces of four ranks on
two cores. Under `SCHED_BATCH` threads have the same shares of the cores, but wait until a core is
free: 0.1 million calls, and a small all-reduce takes 1.8 instead of 6.7 ms
(benchmarks/bench_scheduling.py; calls by `perf stat -a -e syscalls:sys_enter_epoll_wait`).
"""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.rendezvous import rendezvous

from hp_platform import _internals
from hp_platform.collectives.pending import release_completed
from hp_platform.device import (
    allow_shared_devices,
    backend_for,
    local_device,
    ranks_per_device,
    why_no_nccl,
)
from hp_platform.failures.liveness import stop_watching, watch
from hp_platform.groups import agree_on_call, require_members

_log = logging.getLogger("hp_platform")

DEFAULT_TIMEOUT = timedelta(minutes=10)
INIT_METHOD_VARIABLE = "HP_INIT_METHOD"
"""Environment variable with the address where ranks meet; precedes MASTER_ADDR and MASTER_PORT."""


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Ranks of this process in the world and on its machine.

    Attributes:
        rank: Rank of this process among all processes, from 0.
        world_size: Number of processes.
        local_rank: Rank of this process among the processes of this machine, from 0.
        local_world_size: Number of processes of this machine.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    def __post_init__(self) -> None:
        """Check that ranks lie inside their worlds."""
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank ({self.rank}) must be in [0, world_size ({self.world_size}))")
        if not 0 <= self.local_rank < self.local_world_size:
            raise ValueError(
                f"local_rank ({self.local_rank}) must be in "
                f"[0, local_world_size ({self.local_world_size}))"
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> "RankInfo | None":
        """Read the variables of torchrun or Slurm; return None where neither has set them.

        Raises:
            ValueError: If a variable is not a whole number, or variables contradict each other.
        """
        if "RANK" in env and "WORLD_SIZE" in env:
            world = _number(env, "WORLD_SIZE")
            rank = _number(env, "RANK")
            local_world = _number(env, "LOCAL_WORLD_SIZE", default=world)
            local = _number(env, "LOCAL_RANK", default=rank % max(local_world, 1))
            return cls(rank, world, local, local_world)
        if "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
            world = _number(env, "SLURM_NTASKS")
            local = _number(env, "SLURM_LOCALID", default=0)
            # For example "4(x2),3": the variable does not name the node of this task, so the first
            # count is taken for all nodes.
            text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_NTASKS_PER_NODE")
            local_world = world if text is None else int(text.split("(")[0].split(",")[0])
            return cls(_number(env, "SLURM_PROCID"), world, local, max(local_world, local + 1))
        return None


@dataclass(frozen=True, slots=True)
class Runtime:
    """Facts that a process needs after `initialize`.

    Attributes:
        info: Ranks of this process.
        device: Device of this process's tensors, which is the current device.
        backend: Backend of the default group for that device: `"nccl"` or `"gloo"`.
        timeout: Time-out of each collective of the default group and of groups made from it.
        control: Gloo group of all ranks for CPU tensors and objects, besides the default group.
    """

    info: RankInfo
    device: torch.device
    backend: str
    timeout: timedelta
    control: ProcessGroup


def initialize(
    info: RankInfo | None = None,
    *,
    device_type: str = "auto",
    timeout: timedelta = DEFAULT_TIMEOUT,
    init_method: str | None = None,
    backend: str = "auto",
) -> Runtime:
    """Choose the device and backend, and create the default group and the control group.

    An existing default group, for example of a script started by accelerate, is used as it is.
    On a CPU, threads of this process no longer take cores from running threads when they wake up,
    which slows Gloo down (Note [No core by waking up]).

    Args:
        info: Ranks of this process; None: from the environment, else a world of one rank.
        device_type: Same as in `local_device`.
        timeout: Time-out of each collective; not changed in an existing default group.
        init_method: Address as in `torch.distributed.init_process_group`; None: the value of the
            variable `HP_INIT_METHOD`, else `env://`, or no address for a world of one rank.
        backend: `"auto"`: NCCL for GPUs and Gloo for CPUs. `"gloo"`: Gloo for GPUs as well,
            through the host and far slower, for ranks that share a GPU where NCCL cannot.

    Raises:
        ValueError: If the environment, `info` and an existing default group contradict each other,
            or if NCCL cannot serve the GPUs and Gloo was not asked for. It is raised on every rank.
    """
    init_method = init_method or os.environ.get(INIT_METHOD_VARIABLE)
    info = info or RankInfo.from_env() or _existing_world()
    device = local_device(info.local_rank, device_type=device_type)
    if device.type == "cpu":
        schedule_as_batch()
    is_own = not dist.is_initialized()
    if not is_own:
        _require_existing(info)
        timeout = _internals.group_timeout(dist.group.WORLD, device) or timeout
    else:
        _create_default_group(info, device, timeout, init_method, backend=backend)
    world = dist.group.WORLD
    assert world is not None
    with _internals.on_gloo_devices_of(world):
        control = dist.new_group(backend="gloo", timeout=timeout, group_desc="control")
    secret = agree_on_call("initialize", range(world.size())).secret
    for group, name in ((world, "default"), (control, "control")):
        if is_own or group is control:
            require_members(group, secret=secret, name=name)
    served_by = _internals.backend_name(world, device)
    watch()
    if served_by is None:
        raise ValueError(f"the default group ({dist.get_backend()}) must serve device ({device})")
    return Runtime(info, device, served_by, timeout, control)


def shutdown() -> None:
    """Destroy all process groups of this process, if there are any."""
    release_completed(everything=True)
    stop_watching()
    if dist.is_initialized():
        dist.destroy_process_group()


def schedule_as_batch() -> None:
    """Let no thread of this process take a core from another by waking up, on Linux.

    New threads inherit the policy, so call this before process groups are made. Threads with
    another policy than the default keep it, and so do all threads where the system forbids a
    change. See Note [No core by waking up].
    """
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in Path("/proc/self/task").glob("*"):
        thread = int(task.name)
        with suppress(OSError):  # a sandbox, or a thread that has ended meanwhile
            if os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _create_default_group(
    info: RankInfo,
    device: torch.device,
    timeout: timedelta,
    init_method: str | None,
    *,
    backend: str = "auto",
) -> None:
    if init_method is None and info.world_size == 1 and "MASTER_ADDR" not in os.environ:
        store: _internals.Store = _internals.HashStore()
    else:
        address = init_method or "env://"
        store, _, _ = next(rendezvous(address, info.rank, info.world_size, timeout=timeout))
        store.set_timeout(timeout)
    shared = ranks_per_device(device, info.world_size, store)
    backend = _choose(backend, device, shared)
    if backend == "nccl":
        if shared > 1:
            allow_shared_devices()
        # Several lines from every rank at its first send. A group for each directed edge, as
        # pipelines here have them, is the remedy that the warning asks for.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    elif device.type == "cuda" and info.rank == 0:
        _log.warning("backend (gloo) moves what GPUs exchange through the host: far slower")
    dist.init_process_group(
        backend,
        store=_internals.PrefixStore("default_pg", store),
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
        # Naming the device makes NCCL connect now instead of at its first collective.
        device_id=device if backend == "nccl" else None,
    )


def _choose(asked: str, device: torch.device, shared: int) -> str:
    """Return the backend for a device that `shared` ranks share; the same on all ranks."""
    if asked not in ("auto", "gloo", "nccl"):
        raise ValueError(f"backend ({asked}) must be one of auto, gloo, nccl")
    if asked == "gloo" or (asked == "auto" and device.type == "cpu"):
        return "gloo"
    if device.type == "cpu":
        raise ValueError("backend (nccl) must be auto or gloo for device (cpu)")
    if backend_for(device, ranks_per_device=shared) != "nccl":
        # Nobody wants a run at a fiftieth of the speed without having asked for it.
        raise ValueError(
            f"backend ({asked}) must be gloo, through the host and far slower, where "
            f"{why_no_nccl(ranks_per_device=shared)}: give every rank a GPU of its own"
        )
    return "nccl"


def _existing_world() -> RankInfo:
    """Return the ranks in the default group; without a default group, those of a world of one."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return RankInfo(rank, world, rank, world)


def _require_existing(info: RankInfo) -> None:
    if (info.rank, info.world_size) != (dist.get_rank(), dist.get_world_size()):
        raise ValueError(
            f"rank {info.rank} of {info.world_size} must equal that of the existing default group "
            f"(rank {dist.get_rank()} of {dist.get_world_size()})"
        )


def _number(env: Mapping[str, str], name: str, *, default: int = 0) -> int:
    text = env.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} ({text!r}) must be a whole number") from None
