"""Megatron's sharded checkpoint of a model and its distributed optimizer, written and read."""

import os
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir

import torch.distributed as dist
from megatron.core import dist_checkpointing

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def resumed(model, optimizer, optimizer_of):
    """Save model and optimizer, and return a new optimizer that has loaded what was saved."""
    folder = Path(gettempdir()) / f"megatron-{os.getppid()}"  # ranks have one parent
    if dist.get_rank() == 0:
        rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(_state(model, optimizer, is_loading=False), str(folder))
    dist.barrier()
    again = optimizer_of()
    loaded = dist_checkpointing.load(_state(model, again, is_loading=True), str(folder))
    model.load_state_dict(loaded["model"])
    again.load_state_dict(loaded["optimizer"])
    dist.barrier()
    rmtree(folder, ignore_errors=True)
    return again


def _state(model, optimizer, *, is_loading):
    state = model.sharded_state_dict(metadata=_METADATA)
    optim = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=_METADATA)
    return {"model": state, "optimizer": optim}
