"""Weights of ours into the files of a Hugging Face model, each rank its own parts.

Note [Files that many ranks write]. Which tensor lies where in which file follows from names, shapes
and dtype alone. The first rank makes the files, in full size; then every rank writes the boxes that
it has to their places. Nothing is gathered, and no rank holds more than one of its own tensors
twice. The index is written last: without it the folder is no model.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_platform import all_gather_json
from hp_platform.store import Box, Part
from hp_platform.store.files import created, fsync_directory, write
from hp_platform.store.safetensors import INDEX, FileTensor, index_of, layout_of
from hp_train.base.atomic_write import replace_file
from hp_train.config import ModelConfig
from hp_train.errors import CheckpointError, ConfigError
from hp_train.hugging_face.all_ranks import on_all_ranks
from hp_train.hugging_face.config import FAMILIES, hf_config
from hp_train.hugging_face.plan import Stored, stored_tensors, theirs_of, to_theirs
from hp_train.model.shapes import model_tensors

_SHARD_BYTES = 5 * 10**9  # of a file, as transformers cuts them

Read = Callable[[str, Box], Tensor]
"""Gives the values of a box of one of our tensors."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A stored tensor in the files to come."""

    stored: Stored
    file: str
    begin: int
    dtype: torch.dtype


def save_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    group: ProcessGroup | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write a folder that transformers and others can load.

    Args:
        folder: Made if it is missing; must have no safetensors files. All ranks see it.
        tensors: What this rank has, by global name. Of ranks that have the same part, the first
            writes it; a DTensor may be sharded in any way.
        model: Configuration of the model, with its vocabulary and longest sequence.
        dtype: Dtype of the files; correction biases keep fp32.
        group: CPU group of the ranks that call together; None: this rank is alone.
        shard_bytes: Approximate size of a file, in bytes.

    Raises:
        hp_train.errors.ConfigError: On every rank: no family has such a model, or the folder is in
            use.
        hp_train.errors.CheckpointError: When the ranks together do not have every tensor once, or a
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
    shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Write a folder from boxes of tensors that are read one at a time; see `save_weights`.

    Args:
        folder: Folder to be made.
        boxes: What this rank has of each tensor, by global name.
        read: Gives the values of one of those boxes.
        model: Configuration of the model, with its vocabulary and longest sequence.
        dtype: Dtype of the files.
        group: CPU group of the ranks that call together.
        shard_bytes: Approximate size of a file, in bytes.
    """
    is_first = group is None or group.rank() == 0

    def prepare() -> list[_Place]:
        places = _places(model, dtype, shard_bytes)
        if is_first:
            _make_files(folder, places)
        return places

    def finish() -> None:
        if is_first:
            config = hf_config(model, dtype=_name_of(dtype))
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            replace_file(folder / "config.json", text.encode())
            total = sum(prod(p.stored.shape) * p.dtype.itemsize for p in places)
            replace_file(folder / INDEX, index_of({p.stored.name: p.file for p in places}, total))
            fsync_directory(folder)

    places = on_all_ranks(prepare, group=group, where="create the files of a model")
    everyone = _boxes_of_all(boxes, group)
    mine = on_all_ranks(
        lambda: _mine(places, everyone, 0 if group is None else group.rank()),
        group=group,
        where="share out the tensors of a model",
    )
    on_all_ranks(
        lambda: _write_boxes(folder, places, mine, read),
        group=group,
        where="write the files of a model",
    )
    on_all_ranks(finish, group=group, where="write the index of a model")


def _places(model: ModelConfig, dtype: torch.dtype, shard_bytes: int) -> list[_Place]:
    """Where every stored tensor goes: full files, in the order of the model."""
    family = FAMILIES[hf_config(model, dtype=_name_of(dtype))["model_type"]]
    listed = stored_tensors(model_tensors(model), model, family)
    shards: list[list[Stored]] = [[]]
    size = 0
    for stored in listed:
        nbytes = prod(stored.shape) * dtype.itemsize
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(stored)
        size += nbytes
    places = []
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        dtypes = {s.name: _dtype_of(s, dtype) for s in shard}
        _, begins, _ = layout_of({s.name: (dtypes[s.name], s.shape) for s in shard})
        places += [_Place(s, file, begins[s.name], dtypes[s.name]) for s in shard]
    return places


def _dtype_of(stored: Stored, dtype: torch.dtype) -> torch.dtype:
    if stored.parts[0].endswith("correction_bias"):
        return torch.promote_types(dtype, torch.float32)
    return dtype


def _make_files(folder: Path, places: Iterable[_Place]) -> None:
    """Make the files in full size, each with its header and nothing else."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")) or (folder / INDEX).exists():
        raise ConfigError(f'folder ("{folder}") must have no safetensors files')
    by_file: dict[str, list[_Place]] = {}
    for place in places:
        by_file.setdefault(place.file, []).append(place)
    for file, inside in by_file.items():
        shapes = {p.stored.name: (p.dtype, p.stored.shape) for p in inside}
        header, _, size = layout_of(shapes)
        with created(folder / file) as descriptor:
            os.truncate(descriptor, size)
            write(descriptor, memoryview(header))


def _boxes_of_all(
    boxes: Mapping[str, list[Box]], group: ProcessGroup | None
) -> list[Mapping[str, list[Box]]]:
    if group is None:
        return [boxes]
    return [*all_gather_json(dict(boxes), of=dict[str, list[Box]], group=group)]


def _mine(
    places: Iterable[_Place], everyone: list[Mapping[str, list[Box]]], rank: int
) -> dict[str, list[Box]]:
    """Boxes that this rank is the first to have, when all ranks together have every one once."""
    owner: dict[str, dict[Box, int]] = {}
    for index, theirs in enumerate(everyone):
        for name, listed in theirs.items():
            for box in listed:
                owner.setdefault(name, {}).setdefault(box, index)
    for name, wanted in _num_elements(places).items():
        found = sum(prod(sizes) for _, sizes in owner.get(name, {}))
        if found != wanted:
            raise CheckpointError(
                f"tensor {name}: elements of all ranks ({found}) must be those of the model "
                f"({wanted})"
            )
    return {
        name: [box for box in listed if owner[name][box] == rank]
        for name, listed in everyone[rank].items()
    }


def _num_elements(places: Iterable[_Place]) -> Counter[str]:
    """Number of elements that each of our tensors must have."""
    found: Counter[str] = Counter()
    for stored in (place.stored for place in places if not place.stored.is_copy):
        for part in stored.parts:
            found[part] += prod(stored.shape) // len(stored.parts)
    return found


def _write_boxes(
    folder: Path, places: Iterable[_Place], boxes: Mapping[str, list[Box]], read: Read
) -> None:
    by_parts: dict[tuple[str, ...], list[_Place]] = {}
    for place in places:
        by_parts.setdefault(place.stored.parts, []).append(place)
    descriptors: dict[str, int] = {}
    try:
        for parts, inside in by_parts.items():
            _require_alike(parts, boxes)
            for box in boxes.get(parts[0], []):
                values = [read(part, box) for part in parts]
                for place in inside:
                    if place.file not in descriptors:
                        descriptors[place.file] = os.open(folder / place.file, os.O_RDWR)
                    _write_box(descriptors[place.file], place, box, values)
        for descriptor in descriptors.values():
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _require_alike(parts: tuple[str, ...], boxes: Mapping[str, list[Box]]) -> None:
    """Gate and up are written as one tensor, and so must be cut in the same way."""
    for part in parts[1:]:
        if boxes.get(part, []) != boxes.get(parts[0], []):
            raise CheckpointError(f"tensor {part} must be sharded as {parts[0]} is")


def _write_box(descriptor: int, place: _Place, box: Box, values: list[Tensor]) -> None:
    stored, (offsets, sizes) = place.stored, box
    target = FileTensor(descriptor, place.begin, "", stored.shape, place.file)
    if stored.expert is not None:
        if offsets[0] <= stored.expert < offsets[0] + sizes[0]:
            row = values[0][stored.expert - offsets[0]]
            target.write(Box(offsets[1:], sizes[1:]), row.to(place.dtype))
    elif stored.arrangement == "same":
        target.write(box, values[0].to(place.dtype))
    else:
        # Expert by expert, so that a stack is never there twice.
        for number in range(sizes[0]):
            one = Box((offsets[0] + number, *offsets[1:]), (1, *sizes[1:]))
            slices = [v[number : number + 1].to(place.dtype) for v in values]
            target.write(theirs_of(stored, 0, one), to_theirs(stored, slices))


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
