"""Which device this process computes on, and which backend moves its tensors."""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist

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
    count = 0 if device_type == "cpu" else torch.cuda.device_count()
    if device_type == "cuda" and count == 0:
        raise ValueError("device_type (cuda) must be cpu or auto: this process sees no GPU")
    if count == 0:
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device


def ranks_per_device(device: torch.device, local_world_size: int) -> int:
    """How many ranks share the busiest device of this machine; 1 on a CPU."""
    if device.type == "cpu":
        return 1
    return math.ceil(local_world_size / torch.cuda.device_count())


def backend_for(device: torch.device, *, ranks_per_device: int = 1) -> str:
    """Choose `"nccl"` or `"gloo"` for tensors on `device`.

    NCCL refuses two ranks on one GPU before 2.30, and later unless `NCCL_MULTI_RANK_GPU_ENABLE` is
    set (this function does not set it, `initialize` does). Gloo then moves CUDA tensors through the
    host; setting the variable to 1 oneself overrules the version check.
    """
    if device.type == "cpu" or not dist.is_nccl_available():
        return "gloo"
    if ranks_per_device > 1 and not nccl_shares_devices():
        return "gloo"
    return "nccl"


def nccl_shares_devices() -> bool:
    """Whether this NCCL can serve several ranks on one GPU."""
    switch = os.environ.get(_MULTI_RANK)
    if switch is not None:
        return switch == "1"
    return dist.is_nccl_available() and _nccl_version() >= _MULTI_RANK_SINCE


def allow_shared_devices() -> None:
    """Turn on NCCL's switch for several ranks on one GPU; before NCCL is initialised."""
    os.environ.setdefault(_MULTI_RANK, "1")


def _nccl_version() -> tuple[int, ...]:
    return tuple(torch.cuda.nccl.version())
