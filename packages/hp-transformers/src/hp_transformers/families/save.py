"""Weights of ours into the files of a Hugging Face model, each rank its own parts.

Which tensor lies where in which file follows from names, shapes and dtype alone. The first rank
makes the files, in full size; then every rank writes the boxes that it has to their places. Nothing
is gathered, and no rank holds more than one of its own tensors twice. The index, or the header of a
file without one, is written last: without it the folder is no model.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.atomic_write import replace_file
from hp_base.dtypes import dtype_name
from hp_base.errors import CheckpointError
from hp_checkpoint import Box, Part
from hp_checkpoint.collective import gathered, is_first
from hp_checkpoint.safetensors import FileTensor
from hp_trainer.config import ModelConfig
from hp_trainer.model.transformer import model_tensors
from hp_transformers.families.config import as_text, hf_config
from hp_transformers.families.family import Family
from hp_transformers.families.files import (
    SHARD_BYTES,
    Before,
    Place,
    Read,
    cast,
    make_files,
    on_all_ranks,
    opened_places,
    places_of,
    write_index,
)
from hp_transformers.families.plan import (
    Stored,
    stacking_of,
    stored_tensors,
    theirs_of,
    to_theirs,
)
from hp_transformers.families.published import FAMILIES

_HEAD: Final = "lm_head.weight"
_EMBEDDING: Final = "embedding.weight"


def save_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    group: ProcessGroup | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that transformers and others can load.

    Args:
        folder: Folder on a file system that all ranks see, without safetensors files; made if it
            is missing.
        tensors: Tensors of this rank, by global name. Of ranks that have the same part, the first
            writes it; a DTensor may be sharded in any way.
        model: Configuration of the model, with its vocabulary and longest sequence.
        dtype: Dtype of the files; correction biases keep fp32.
        group: CPU group of the ranks that call together; None: this rank is alone.
        shard_bytes: Approximate size of a file, in bytes.

    Raises:
        hp_base.errors.ConfigError: On every rank: no family has such a model, or the folder is in
            use.
        hp_base.errors.CheckpointError: When the ranks together do not have every tensor once, or a
            file cannot be written.
        hp_platform.PeerError: When another rank failed for another reason.
    """
    parts = {name: Part.of(tensor) for name, tensor in tensors.items()}
    boxes = {name: [part.box] for name, part in parts.items()}
    write_model(
        folder,
        boxes,
        lambda name, _: parts[name].local,
        model,
        dtype=dtype,
        group=group,
        shard_bytes=shard_bytes,
    )


def write_model(
    folder: Path,
    boxes: Mapping[str, list[Box]],
    read: Read,
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    group: ProcessGroup | None = None,
    shard_bytes: int = SHARD_BYTES,
    settings: bytes | None = None,
    before: Before | None = None,
) -> None:
    """Write a folder from boxes of tensors that are read one at a time; see `save_weights`.

    Args:
        folder: Folder to be made.
        boxes: Boxes of each tensor that this rank has, by global name.
        read: Function that returns the values of one of those boxes.
        model: Configuration of the model, with its vocabulary and longest sequence.
        dtype: Dtype of the files.
        group: CPU group of the ranks that call together.
        shard_bytes: Approximate size of a file, in bytes.
        settings: Content of `config.json`; None: it follows from the model.
        before: Layout of the model's former files; None: there were none.
    """

    def prepare() -> tuple[bytes, list[Stored], dict[str, Place]]:
        text = settings or as_text(hf_config(model, dtype=dtype_name(dtype)))
        listed = _listed(model, FAMILIES[json.loads(text)["model_type"]], before)
        came = {} if before is None else before.dtype_of
        shapes = {s.name: (came.get(s.name, _dtype_of(s, dtype)), s.shape) for s in listed}
        places = places_of(shapes, shard_bytes, before)
        if is_first(group):
            make_files(folder, places)
        return text, listed, places

    def finish() -> None:
        if is_first(group):
            replace_file(folder / "config.json", text)
            write_index(folder, places, before)

    text, listed, places = on_all_ranks(prepare, group=group, where="create the files of a model")
    everyone = gathered(dict(boxes), of=dict[str, list[Box]], group=group)
    mine = on_all_ranks(
        lambda: _mine(listed, everyone, 0 if group is None else group.rank()),
        group=group,
        where="share out the tensors of a model",
    )
    on_all_ranks(
        lambda: _write_boxes(folder, listed, places, mine, read),
        group=group,
        where="write the files of a model",
    )
    on_all_ranks(finish, group=group, where="write the index of a model")


def _listed(model: ModelConfig, family: Family, before: Before | None) -> list[Stored]:
    """Return the tensors of the files; with copies and stacks as in the model's former files."""
    tensors = model_tensors(model)
    if before is None:
        return stored_tensors(tensors, model, family)
    listed = stored_tensors(tensors, model, family, stacking=stacking_of(before.file_of, family))
    found = [s for s in listed if not s.is_copy or s.name in before.file_of]
    if model.tie_embeddings and _HEAD in before.file_of:
        shape = tensors[_EMBEDDING].shape
        found.append(Stored(_HEAD, shape, (_EMBEDDING,), is_copy=True))
    return found


def _dtype_of(stored: Stored, dtype: torch.dtype) -> torch.dtype:
    if stored.parts[0].endswith("correction_bias"):
        return torch.promote_types(dtype, torch.float32)
    return dtype


def _mine(
    listed: Iterable[Stored], everyone: Sequence[Mapping[str, list[Box]]], rank: int
) -> dict[str, list[Box]]:
    """Return the boxes that this rank is the first to have, once all tensors are complete.

    Args:
        listed: Tensors of the files.
        everyone: Boxes of each tensor on each rank.
        rank: Index of this rank.
    """
    owner: dict[str, dict[Box, int]] = {}
    for index, theirs in enumerate(everyone):
        for name, some in theirs.items():
            for box in some:
                owner.setdefault(name, {}).setdefault(box, index)
    for name, wanted in _num_elements(listed).items():
        found = sum(prod(sizes) for _, sizes in owner.get(name, {}))
        if found != wanted:
            raise CheckpointError(
                f"tensor {name}: elements of all ranks ({found}) must be those of the model "
                f"({wanted})"
            )
    return {
        name: [box for box in some if owner[name][box] == rank]
        for name, some in everyone[rank].items()
    }


def _num_elements(listed: Iterable[Stored]) -> Counter[str]:
    """Return the number of elements that each of our tensors must have."""
    found: Counter[str] = Counter()
    for stored in (each for each in listed if not each.is_copy):
        for part in stored.parts:
            found[part] += prod(stored.shape) // len(stored.parts)
    return found


def _write_boxes(
    folder: Path,
    listed: Iterable[Stored],
    places: Mapping[str, Place],
    boxes: Mapping[str, list[Box]],
    read: Read,
) -> None:
    by_parts: dict[tuple[str, ...], list[Stored]] = {}
    for stored in listed:
        by_parts.setdefault(stored.parts, []).append(stored)
    with opened_places(folder, places) as target:
        for parts, inside in by_parts.items():
            _require_alike(parts, boxes)
            for box in boxes.get(parts[0], []):
                values = [read(part, box) for part in parts]
                for stored in inside:
                    dtype = places[stored.name].dtype
                    _write_box(target(stored.name), stored, box, values, dtype)


def _require_alike(parts: tuple[str, ...], boxes: Mapping[str, list[Box]]) -> None:
    """Refuse gate and up projections that are cut differently: files have them as one tensor."""
    for part in parts[1:]:
        if boxes.get(part, []) != boxes.get(parts[0], []):
            raise CheckpointError(f"tensor {part} must be sharded as {parts[0]} is")


def _write_box(
    target: FileTensor, stored: Stored, box: Box, values: list[Tensor], dtype: torch.dtype
) -> None:
    offsets, sizes = box
    if stored.expert is not None:
        if offsets[0] <= stored.expert < offsets[0] + sizes[0]:
            row = values[0][stored.expert - offsets[0]]
            target.write(Box(offsets[1:], sizes[1:]), cast(stored.name, row, dtype))
    elif stored.arrangement == "same":
        target.write(box, cast(stored.name, values[0], dtype))
    else:
        # Expert by expert, so that a stack is never there twice.
        for number in range(sizes[0]):
            one = Box((offsets[0] + number, *offsets[1:]), (1, *sizes[1:]))
            slices = [cast(stored.name, v[number : number + 1], dtype) for v in values]
            target.write(theirs_of(stored, 0, one), to_theirs(stored, slices))
