"""Which device this process computes on, and which backend moves its tensors."""

from __future__ import annotations

import os
import socket
from itertools import count

import torch
import torch.distributed as dist

from hp_platform import _internals

_MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
_MULTI_RANK_SINCE = (2, 30)


def local_device(local_rank: int = 0, *, device_type: str = "auto") -> torch.device:
    """Choose the device of this process and make it the current one.

    Args:
        local_rank: Rank of this process on its machine. GPUs are dealt in rounds, so several ranks
            share one when there are more ranks than GPUs.
        device_type: `"cpu"`, `"cuda"` or `"auto"`: CUDA where there is a GPU.

    Raises:
        ValueError: If `device_type` is unknown, or is `"cuda"` where there is no GPU.
    """
    if device_type not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device_type ({device_type}) must be one of auto, cpu, cuda")
    num_devices = 0 if device_type == "cpu" else torch.cuda.device_count()
    if device_type == "cuda" and num_devices == 0:
        raise ValueError("device_type (cuda) must be cpu or auto: this process sees no GPU")
    if num_devices == 0:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % num_devices)
    torch.cuda.set_device(device)
    return device


def ranks_per_device(device: torch.device, world_size: int, store: _internals.Store) -> int:
    """Count the ranks that share the busiest device of the world; 1 where all are CPUs.

    How many devices a process sees does not tell: Slurm shows each task one GPU, all of them by
    the same index, and they may be one GPU or as many as there are tasks. So ranks tell each other
    which one they have. All of them call this together, and all get the same answer.

    Args:
        device: Device of this rank.
        world_size: Number of ranks.
        store: Where they meet.
    """
    if device.type == "cpu":
        return 1
    place = store.add(f"ranks of {socket.gethostname()} {_identity(device)}", 1)
    store.add(f"devices with {place} ranks", 1)
    if store.add("ranks that told their device", 1) == world_size:
        store.set("all devices told", "")
    store.wait(["all devices told"])
    return next(n for n in count(1) if not store.check([f"devices with {n + 1} ranks"]))


def _identity(device: torch.device) -> str:
    """Say what a GPU of a machine is known by in every process, and a part of one (MIG) as well."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    part = visible if visible.startswith("MIG-") else ""
    return f"{torch.cuda.get_device_properties(device).uuid} {part}"


def backend_for(device: torch.device, *, ranks_per_device: int = 1) -> str:
    """Name what can serve tensors on `device`: `"nccl"` or `"gloo"`.

    NCCL refuses two ranks on one GPU before 2.30, and later unless `NCCL_MULTI_RANK_GPU_ENABLE` is
    set (this function does not set it, `initialize` does). What is left is Gloo, which moves CUDA
    tensors through the host; setting the variable to 1 oneself overrules the version check.
    """
    if device.type == "cpu" or not dist.is_nccl_available():
        return "gloo"
    return "nccl" if ranks_per_device <= 1 or nccl_shares_devices() else "gloo"


def nccl_shares_devices() -> bool:
    """Tell whether this NCCL can serve several ranks on one GPU."""
    switch = os.environ.get(_MULTI_RANK)
    return _nccl_version() >= _MULTI_RANK_SINCE if switch is None else switch == "1"


def allow_shared_devices() -> None:
    """Turn on NCCL's switch for several ranks on one GPU; before NCCL is initialised."""
    os.environ.setdefault(_MULTI_RANK, "1")


def why_no_nccl(*, ranks_per_device: int) -> str:
    """Why NCCL cannot serve GPUs that this many ranks share, for a message."""
    if not dist.is_nccl_available():
        return "torch is built without NCCL"
    version = ".".join(map(str, _nccl_version()))
    return f"{ranks_per_device} ranks share a GPU, which NCCL ({version}) cannot serve"


def _nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())
