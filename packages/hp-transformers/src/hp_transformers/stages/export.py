"""A checkpoint written as a folder that `AutoModelForCausalLM.from_pretrained` loads.

Names and forms of tensors are those of files that transformers itself would write. One whole layer
is in memory at a time.
"""

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hp_base.atomic_write import replace_file
from hp_base.errors import CheckpointError
from hp_checkpoint import Box, Part
from hp_trainer.config import ModelConfig
from hp_trainer.config.transformers_folder import config_of
from hp_transformers.families.files import (
    SHARD_BYTES,
    Before,
    Read,
    cast,
    make_files,
    opened_places,
    places_of,
    write_index,
)
from hp_transformers.stages.conversion import first_names, reverted, saved_tensors
from hp_transformers.stages.model import CausalModel, on_meta
from hp_transformers.stages.outline import Outline, outline_of


def write_folder(
    folder: Path,
    boxes: Mapping[str, list[Box]],
    read: Read,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    settings: bytes | None = None,
    before: Before | None = None,
) -> None:
    """Write a folder from boxes of tensors.

    Args:
        folder: Folder to be made; must have no safetensors files.
        boxes: Boxes that the checkpoint has of each tensor, by global name.
        read: Function that returns the values of one of those boxes.
        model: Model configuration with the folder of the original.
        dtype: Dtype of parameters; buffers keep theirs.
        shard_bytes: Approximate size of a file, in bytes.
        settings: Content of `config.json`; None: the original's, as transformers writes it.
        before: Layout of the model's former files; None: there were none.

    Raises:
        hp_base.errors.ConfigError: When the folder is in use, or the model's is gone.
        hp_base.errors.CheckpointError: When a tensor is missing.
    """
    came = {} if before is None else before.dtype_of
    if came and dtype != torch.float64:
        dtype = torch.float32  # of values, until each has the dtype that it came in
    made, outline = on_meta(model, dtype), outline_of(model)
    if dtype == torch.float64:
        made.double()  # also parameters that a model makes in float32, whatever the dtype
    _require_all(saved_tensors(made), boxes)
    listed = {n: t for part in _parts(made, outline) for n, t in reverted(made, part).items()}
    copies = _copies(made, listed, before)
    listed |= {copy: listed[name] for name, several in copies.items() for copy in several}
    shapes = {name: (came.get(name, t.dtype), tuple(t.shape)) for name, t in listed.items()}
    places = places_of(shapes, shard_bytes, before)
    make_files(folder, places)
    with opened_places(folder, places) as target:
        for part in _parts(made, outline):
            values = {n: _assembled(n, t, boxes[n], read) for n, t in part.items()}
            for first, value in reverted(made, values).items():
                for name in (first, *copies.get(first, ())):
                    written = cast(name, value, places[name].dtype)
                    target(name).write(Part.of(value).box, written.contiguous())
    if settings is not None:
        replace_file(folder / "config.json", settings)
    else:
        # `made.config` may be a part of it, of a type unknown to `AutoModelForCausalLM`.
        config = config_of(model.transformers, trust=model.trust_remote_code)
        config.dtype = dtype
        config.save_pretrained(folder)
    write_index(folder, places, before)


def _copies(
    model: CausalModel, listed: Mapping[str, Tensor], before: Before | None
) -> dict[str, list[str]]:
    """Return further names that files had for a parameter, by the name that it is written under."""
    firsts, found = first_names(model), dict[str, list[str]]()
    for name in () if before is None else before.file_of.keys() - listed.keys():
        if (first := firsts.get(name)) in listed:
            found.setdefault(str(first), []).append(name)
    return found


def _parts(model: CausalModel, outline: Outline) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each layer, then those outside of layers, by global name."""
    tensors = saved_tensors(model)
    for index in (*range(outline.num_layers), None):
        yield {name: t for name, t in tensors.items() if outline.layer_of(name) == index}


def _assembled(name: str, like: Tensor, boxes: list[Box], read: Read) -> Tensor:
    """Read all boxes of a tensor; return the whole tensor, on the CPU."""
    whole = Part.of(torch.empty(like.shape, dtype=like.dtype, device="cpu"))
    for box in boxes:
        values = read(name, box).view(box.sizes)
        whole.local[box.within(whole.box)] = values.to(like.dtype)
    return whole.local


def _require_all(wanted: Mapping[str, Tensor], boxes: Mapping[str, list[Box]]) -> None:
    for name, tensor in wanted.items():
        found = sum(prod(sizes) for _, sizes in boxes.get(name, ()))
        if found != tensor.numel():
            raise CheckpointError(
                f"tensor {name}: elements of the checkpoint ({found}) must be those of the model "
                f"({tensor.numel()})"
            )
