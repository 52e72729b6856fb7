"""Megatron's sharded checkpoint of a model and its optimizer, written and read."""

import os
import re
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir

import torch.distributed as dist
from megatron.core import dist_checkpointing

_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


def resume(model, optimizer) -> None:
    """Save a model and its optimizer, and load into them what was saved."""
    folder = _saved(model, optimizer)
    loaded = dist_checkpointing.load(_state(model, optimizer, is_loading=True), folder)
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])


def read_weights(model, optimizer) -> None:
    """Save a model and its optimizer, and read the optimizer's own copies of all weights.

    Without Apex and Transformer Engine, Megatron saves a distributed optimizer that is torch's, and
    does not load it.
    """
    plain = dist_checkpointing.load_plain_tensors(_saved(model, optimizer))
    for name, parameter in model.named_parameters():
        before, layer, after = re.fullmatch(r"(?:(.*layers\.)(\d+)\.)?(.*)", name).groups()
        copies = plain.get(f"optimizer.state.param.{before or ''}{after}")
        if copies is not None:  # norms have other names there
            parameter.data.copy_(copies if layer is None else copies[int(layer)])


def _saved(model, optimizer):
    """Return the folder of a checkpoint of all ranks."""
    folder = Path(gettempdir()) / f"megatron-{os.getppid()}"  # ranks have one parent
    if dist.get_rank() == 0:
        rmtree(folder, ignore_errors=True)
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(_state(model, optimizer, is_loading=False), str(folder))
    dist.barrier()
    return str(folder)


def _state(model, optimizer, *, is_loading):
    state = model.sharded_state_dict(metadata=_METADATA)
    optim = optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=_METADATA)
    return {"model": state, "optimizer": optim}
