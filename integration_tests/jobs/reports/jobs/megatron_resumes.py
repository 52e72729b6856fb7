"""Megatron's sharded checkpoint of a model and its optimizer, written and read."""

import os
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir

import torch.distributed as dist
from megatron.core import dist_checkpointing

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def resume(model, optimizer) -> None:
    """Save a model and its optimizer, and load into them what was saved.

    Without Apex and Transformer Engine, Megatron loads only into an optimizer that has made a step.
    """
    folder = Path(gettempdir()) / f"megatron-{os.getppid()}"  # ranks have one parent
    if dist.get_rank() == 0:
        rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(_state(model, optimizer, is_loading=False), str(folder))
    dist.barrier()
    loaded = dist_checkpointing.load(_state(model, optimizer, is_loading=True), str(folder))
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    dist.barrier()
    rmtree(folder, ignore_errors=True)


def _state(model, optimizer, *, is_loading):
    state = model.sharded_state_dict(metadata=_METADATA)
    optim = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=_METADATA)
    return {"model": state, "optimizer": optim}
