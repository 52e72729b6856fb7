"""DCP and torch's state dicts: saved in one layout, loaded in another."""

import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from integration_tests.jobs.search.cases import Case, Errors
from integration_tests.jobs.search.networks import Network, batch_of, differences, loss_of, weights
from integration_tests.jobs.search.tensors import error_of, normal

Places = tuple[Placement, ...]
LAYOUTS: dict[str, tuple[tuple[int, ...], Places]] = {
    "plain": ((), ()),
    "replicated": ((4,), (Replicate(),)),
    "rows": ((4,), (Shard(0),)),
    "columns": ((4,), (Shard(1),)),
    "2x2-rows-columns": ((2, 2), (Shard(0), Shard(1))),
    "2x2-columns-rows": ((2, 2), (Shard(1), Shard(0))),
    "2x2-rows-rows": ((2, 2), (Shard(0), Shard(0))),
    "2x2-replicas-rows": ((2, 2), (Replicate(), Shard(0))),
    "2x2-columns-replicas": ((2, 2), (Shard(1), Replicate())),
    "strided": ((2, 2), ()),
}
"""Name -> sizes of the mesh, placements. `strided` is what FSDP makes of rows that TP has cut."""
_SHAPES = ((8, 12), (7, 5), (1, 3), (3, 1), (9, 2))
_MODELS = ("plain", "fsdp", "fsdp-2x2", "hsdp", "tp", "fsdp-tp")
_OPTIONS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "whole": {"full_state_dict": True},
    "broadcast": {"full_state_dict": True, "broadcast_from_rank0": True},
    "offloaded": {"cpu_offload": True},
}


def cases() -> Iterator[Case]:
    """Return layouts of tensors, and of models with optimizers, each to each."""
    for source, target in product(LAYOUTS, LAYOUTS):
        yield Case(f"tensors {source} to {target}", partial(_tensors, source, target), 4)
    for how in ("asynchronous", "safetensors", "one-file"):
        for source, target in product(("rows", "strided", "columns", "plain"), repeat=2):
            yield Case(
                f"tensors {source} to {target}, {how}", partial(_tensors, source, target, how), 4
            )
    for source, target, kind in product(
        _MODELS, _MODELS, ("plain", "uneven", "tied", "frozen table", "unused")
    ):
        for option in ("sharded", "flat"):
            told = f"model {source} to {target}, {kind}, {option}"
            yield Case(told, partial(_trained, source, target, kind, option), 4)
    for model, option, kind in product(
        _MODELS, _OPTIONS, ("plain", "uneven", "tied", "frozen table")
    ):
        told = f"state_dict {model}, {kind}, {option}"
        yield Case(told, partial(_in_memory, model, kind, option), 4)


def _laid_out(name: str, tensor: Tensor) -> Tensor:
    sizes, places = LAYOUTS[name]
    if not sizes:
        return tensor.clone()
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("x", "y")[: len(sizes)])
    if name != "strided":
        return distribute_tensor(tensor, mesh, places)
    module = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
    module.weight = nn.Parameter(distribute_tensor(tensor, mesh["y"], [Shard(0)]))
    fully_shard(module, mesh=mesh["x"])
    return module.weight.detach()


def _shared_folder() -> Path:
    """Return a new folder that all ranks know."""
    found: list[object] = [tempfile.mkdtemp(dir=Path.cwd()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    return Path(str(found[0]))


def _tensors(source: str, target: str, how: str = "") -> Errors:
    plain = {f"{shape}": normal(*shape, seed=i) for i, shape in enumerate(_SHAPES)}
    plain["number"] = torch.tensor(3.5)
    saved = {n: _laid_out(source, t) if t.ndim else t for n, t in plain.items()}
    asked = {
        n: _laid_out(target, torch.zeros_like(t)) if t.ndim else t * 0 for n, t in plain.items()
    }
    folder = _shared_folder()
    if how == "asynchronous":
        waited = async_save(saved, checkpoint_id=folder)
        assert isinstance(waited, Future)
        waited.result()
        dist.barrier()
        load(asked, checkpoint_id=folder)
    elif how == "safetensors":
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(saved, storage_writer=writer)
        load(asked, storage_reader=HuggingFaceStorageReader(str(folder)))
    elif how == "one-file":
        save(saved, storage_writer=FileSystemWriter(folder, single_file_per_rank=False))
        load(asked, storage_reader=FileSystemReader(folder))
    else:
        save(saved, checkpoint_id=folder)
        load(asked, checkpoint_id=folder)
    return {name: error_of(asked[name], tensor) for name, tensor in plain.items()}


def _model(layout: str, kind: str) -> Network:
    torch.set_default_dtype(torch.float64)
    model = Network(kind)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    if "tp" in layout:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], styles)
    shards: dict[str, DeviceMesh] = {
        "fsdp": mesh["data", "tensor"]._flatten("all"),
        "fsdp-2x2": mesh["tensor"],
        "hsdp": mesh,
        "fsdp-tp": mesh["data"],
    }
    if layout in shards:
        for block in model.blocks:
            fully_shard(block, mesh=shards[layout])
        fully_shard(model, mesh=shards[layout])
    return model


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    some = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in some if p.ndim > 1]
    others = [p for p in some if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.03}]
    return torch.optim.AdamW(groups, 0.1, eps=1e-3)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train on batches that all ranks have: every layout computes the same."""
    for step in steps:
        loss_of(model, batch_of(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _trained(source: str, target: str, kind: str, option: str) -> Errors:
    """Train in a layout, save, load in another and train on, beside one that goes on."""
    options = StateDictOptions(**_OPTIONS[option])
    first = _model(source, kind)
    optimizer = _optimizer(first)
    _train(first, optimizer, range(2))
    folder = _shared_folder()
    model_state, optimizer_state = get_state_dict(first, optimizer, options=options)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    second = _model(target, kind)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(0.5)
    other = _optimizer(second)
    model_state, optimizer_state = get_state_dict(second, other, options=options)
    loaded: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
    load(loaded, checkpoint_id=folder)
    set_state_dict(
        second,
        other,
        model_state_dict=loaded["model"],
        optim_state_dict=loaded["optimizer"],
        options=options,
    )
    plain = _model("plain", kind)
    one = _optimizer(plain)
    _train(plain, one, range(2))
    errors = {f"loaded {n}": e for n, e in differences([weights(second)], [weights(plain)]).items()}
    _train(second, other, range(2, 4))
    _train(plain, one, range(2, 4))
    return {**errors, **differences([weights(second)], [weights(plain)])}


def _in_memory(layout: str, kind: str, option: str) -> Errors:
    """Take state dicts of a trained model and give them to a new one, which trains on."""
    options = StateDictOptions(**_OPTIONS[option])
    first = _model(layout, kind)
    optimizer = _optimizer(first)
    _train(first, optimizer, range(2))
    model_state = get_model_state_dict(first, options=options)
    optimizer_state = get_optimizer_state_dict(first, optimizer, options=options)
    second = _model(layout, kind)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(0.5)
    other = _optimizer(second)
    set_model_state_dict(second, model_state, options=options)
    set_optimizer_state_dict(second, other, optimizer_state, options=options)
    plain = _model("plain", kind)
    one = _optimizer(plain)
    _train(plain, one, range(2))
    errors = {f"loaded {n}": e for n, e in differences([weights(second)], [weights(plain)]).items()}
    _train(second, other, range(2, 4))
    _train(plain, one, range(2, 4))
    return {**errors, **differences([weights(second)], [weights(plain)])}
