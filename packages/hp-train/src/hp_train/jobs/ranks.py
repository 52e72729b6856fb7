"""Which rank of how many this process is: those of its process group, or as its launcher says."""

import os

import torch.distributed as dist


def rank_here() -> int:
    """Rank of this process; 0 where there is one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def ranks_here() -> int:
    """Number of ranks."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
