"""Rank of this process and number of ranks: of its process group, or as its launcher says."""

import os

import torch.distributed as dist


def is_in_group() -> bool:
    """Tell whether this process is one of a process group."""
    return dist.is_available() and dist.is_initialized()


def rank_here() -> int:
    """Rank of this process; 0 where there is one."""
    if is_in_group():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def ranks_here() -> int:
    """Number of ranks."""
    if is_in_group():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
