"""Files of a model as transformers cuts them: laid out by names and shapes, filled box by box."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hp_platform.store import Box
from hp_platform.store.files import created, fsync_directory, write
from hp_platform.store.safetensors import INDEX, FileTensor, index_of, layout_of
from hp_train.base.atomic_write import replace_file
from hp_train.errors import ConfigError

SHARD_BYTES = 5 * 10**9  # of a file, as transformers cuts them

Read = Callable[[str, Box], Tensor]
"""Gives the values of a box of a tensor, by global name."""


class Place(NamedTuple):
    """A tensor in the files to come.

    Attributes:
        file: Name of its file.
        begin: First byte there.
        dtype: Dtype of the file.
        shape: Shape of the whole.
    """

    file: str
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole."""
        return prod(self.shape) * self.dtype.itemsize


def places_of(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], shard_bytes: int
) -> dict[str, Place]:
    """Say where every tensor goes: full files, in the order of the model.

    Args:
        tensors: Dtype and shape by published name, in the order of the model.
        shard_bytes: Approximate size of a file, in bytes.
    """
    shards: list[dict[str, Place]] = [{}]
    size = 0
    for name, about in tensors.items():
        place = Place("", 0, *about)
        if shards[-1] and size + place.num_bytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = place
        size += place.num_bytes
    places: dict[str, Place] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _, begins, _ = _layout(shard)
        places |= {n: p._replace(file=file, begin=begins[n]) for n, p in shard.items()}
    return places


def make_files(folder: Path, places: Mapping[str, Place]) -> None:
    """Make the files in full size, each with its header and nothing else.

    Raises:
        hp_train.errors.ConfigError: When the folder has a model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")) or (folder / INDEX).exists():
        raise ConfigError(f'folder ("{folder}") must have no safetensors files')
    by_file: dict[str, dict[str, Place]] = {}
    for name, place in places.items():
        by_file.setdefault(place.file, {})[name] = place
    for file, inside in by_file.items():
        header, _, size = _layout(inside)
        with created(folder / file) as descriptor:
            os.truncate(descriptor, size)
            write(descriptor, memoryview(header))


def _layout(inside: Mapping[str, Place]) -> tuple[bytes, dict[str, int], int]:
    return layout_of({name: (place.dtype, place.shape) for name, place in inside.items()})


@contextmanager
def opened_places(
    folder: Path, places: Mapping[str, Place]
) -> Iterator[Callable[[str], FileTensor]]:
    """Give what a tensor is written to, by its name; all of it is on the disk at the end."""
    descriptors: dict[str, int] = {}

    def target(name: str) -> FileTensor:
        file, begin, _, shape = places[name]
        if file not in descriptors:
            descriptors[file] = os.open(folder / file, os.O_RDWR)
        return FileTensor(descriptors[file], begin, "", shape, file)

    try:
        yield target
        for descriptor in descriptors.values():
            os.fsync(descriptor)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def write_index(folder: Path, places: Mapping[str, Place]) -> None:
    """Write what makes a model of the files."""
    total = sum(place.num_bytes for place in places.values())
    replace_file(folder / INDEX, index_of({n: place.file for n, place in places.items()}, total))
    fsync_directory(folder)
