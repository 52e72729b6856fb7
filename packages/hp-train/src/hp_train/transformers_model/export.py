"""A checkpoint as a folder that `AutoModelForCausalLM.from_pretrained` loads.

Names and forms of tensors are those of files that transformers itself would write. One layer is in
memory at a time, whole.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hp_platform.store import Box
from hp_platform.store.files import created, fsync_directory, write
from hp_platform.store.safetensors import INDEX, FileTensor, index_of, layout_of
from hp_train.base.atomic_write import replace_file
from hp_train.config import ModelConfig
from hp_train.config.transformers_folder import config_of
from hp_train.errors import CheckpointError, ConfigError
from hp_train.transformers_model.conversion import reverted, saved_tensors
from hp_train.transformers_model.made import on_meta
from hp_train.transformers_model.outline import Outline, outline_of

_SHARD_BYTES = 5 * 10**9  # of a file, as transformers cuts them
_COPIED = ("generation_config.json", "*.py")

Read = Callable[[str, Box], Tensor]
"""Gives the values of a box of a tensor, by global name."""


def write_folder(
    folder: Path,
    boxes: Mapping[str, list[Box]],
    read: Read,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write a folder from boxes of tensors.

    Args:
        folder: Folder to be made; must have no safetensors files.
        boxes: What there is of each tensor, by global name.
        read: Gives the values of one of those boxes.
        model: Model configuration with the folder of the original.
        dtype: Dtype of parameters; buffers keep theirs.
        shard_bytes: Approximate size of a file, in bytes.

    Raises:
        hp_train.errors.ConfigError: When the folder is in use, or the model's is gone.
        hp_train.errors.CheckpointError: When a tensor is missing.
    """
    made, outline = on_meta(model, dtype), outline_of(model)
    if dtype == torch.float64:
        made.double()  # what a model keeps in float32, whatever is asked for
    _require_all(saved_tensors(made), boxes)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")) or (folder / INDEX).exists():
        raise ConfigError(f'folder ("{folder}") must have no safetensors files')
    listed = {n: t for part in _parts(made, outline) for n, t in reverted(made, part).items()}
    shards = _shards(listed, shard_bytes)
    file_of = {
        name: f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, shard in enumerate(shards, start=1)
        for name in shard
    }
    opened: dict[str, int] = {}
    begins: dict[str, int] = {}
    try:
        for shard in shards:
            file = file_of[shard[0]]
            header, starts, size = layout_of(
                {n: (listed[n].dtype, tuple(listed[n].shape)) for n in shard}
            )
            begins |= starts
            with created(folder / file) as descriptor:
                os.truncate(descriptor, size)
                write(descriptor, memoryview(header))
            opened[file] = os.open(folder / file, os.O_RDWR)
        for part in _parts(made, outline):
            values = {n: _assembled(n, t, boxes[n], read) for n, t in part.items()}
            for name, value in reverted(made, values).items():
                place = FileTensor(
                    opened[file_of[name]], begins[name], "", tuple(value.shape), file_of[name]
                )
                place.write(Box((0,) * value.ndim, tuple(value.shape)), value.contiguous())
        for descriptor in opened.values():
            os.fsync(descriptor)
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    # Not that of the model: it may be a part, of which `AutoModelForCausalLM` knows nothing.
    config = config_of(model.transformers, trust=model.trust_remote_code)
    config.dtype = dtype
    config.save_pretrained(folder)
    for pattern in _COPIED:
        for path in Path(model.transformers).glob(pattern):
            shutil.copyfile(path, folder / path.name)
    total = sum(prod(t.shape) * t.dtype.itemsize for t in listed.values())
    replace_file(folder / INDEX, index_of(file_of, total))
    fsync_directory(folder)


def _parts(model: Any, outline: Outline) -> Iterator[dict[str, Tensor]]:
    """Tensors of each layer, and of what is outside of layers, by global name."""
    tensors = saved_tensors(model)
    for index in (*range(outline.num_layers), None):
        yield {name: t for name, t in tensors.items() if outline.layer_of(name) == index}


def _shards(listed: Mapping[str, Tensor], most: int) -> list[list[str]]:
    """Names of tensors by file: full files, in the order of the model."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in listed.items():
        nbytes = prod(tensor.shape) * tensor.dtype.itemsize
        if shards[-1] and size + nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    return shards


def _assembled(name: str, like: Tensor, boxes: list[Box], read: Read) -> Tensor:
    """The whole of a tensor from its boxes, on the CPU."""
    whole = torch.empty(like.shape, dtype=like.dtype, device="cpu")
    for box in boxes:
        offsets, sizes = box
        place = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        whole[place] = read(name, box).view(sizes).to(whole.dtype)
    return whole


def _require_all(wanted: Mapping[str, Tensor], boxes: Mapping[str, list[Box]]) -> None:
    for name, tensor in wanted.items():
        found = sum(prod(sizes) for _, sizes in boxes.get(name, ()))
        if found != tensor.numel():
            raise CheckpointError(
                f"tensor {name}: elements of the checkpoint ({found}) must be those of the model "
                f"({tensor.numel()})"
            )
