"""Files of a model as transformers cuts them: laid out by names and shapes, filled box by box."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from hp_base.atomic_write import closed_at_end, replace_file
from hp_base.errors import CheckpointError, ConfigError
from hp_checkpoint import Box
from hp_checkpoint.files import created, fsync_directory, write
from hp_checkpoint.safetensors import INDEX, FileTensor, index_of, layout_of
from hp_platform.failures.messages import agreeing

T = TypeVar("T")
SHARD_BYTES = 5 * 10**9  # of a file, as transformers cuts them
SINGLE = "model.safetensors"
"""The file of a model that has one and no index."""

Read = Callable[[str, Box], Tensor]
"""Function that returns the values of a box of a tensor, by the global name of the tensor."""


class Before(NamedTuple):
    """The layout of the files that a model came in, to be written again.

    Attributes:
        file_of: Names of files, by tensor.
        dtype_of: Dtypes, by tensor; empty: the dtype changes, and files get the usual size.
        listing: Content of the index of the files; None: there was none.
    """

    file_of: Mapping[str, str]
    dtype_of: Mapping[str, torch.dtype]
    listing: bytes | None


class Place(NamedTuple):
    """The place of a tensor in files that are about to be written.

    Attributes:
        file: Name of the file.
        begin: Offset of the first byte in the file.
        dtype: Dtype in the file.
        shape: Shape of the whole tensor.
    """

    file: str
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return prod(self.shape) * self.dtype.itemsize


def places_of(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    shard_bytes: int,
    before: Before | None = None,
) -> dict[str, Place]:
    """Return the place of every tensor: in its former file, or in full files in the model's order.

    Args:
        tensors: Dtype and shape by published name, in the order of the model.
        shard_bytes: Approximate size of a file, in bytes.
        before: Layout of the model's former files; None: there were none.
    """
    if before is not None and before.dtype_of and tensors.keys() <= before.file_of.keys():
        file_of = before.file_of
    else:
        file_of = _full_files(tensors, shard_bytes)
    places: dict[str, Place] = {}
    whole = {name: Place(file_of[name], 0, *about) for name, about in tensors.items()}
    for inside in _by_file(whole).values():
        _, begins, _ = _layout(inside)
        places |= {n: p._replace(begin=begins[n]) for n, p in inside.items()}
    return places


def _full_files(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], shard_bytes: int
) -> dict[str, str]:
    """Return the file of every tensor, each file filled before the next one."""
    number, size = 1, 0
    number_of: dict[str, int] = {}
    for name, (dtype, shape) in tensors.items():
        num_bytes = prod(shape) * dtype.itemsize
        if size and size + num_bytes > shard_bytes:
            number, size = number + 1, 0
        number_of[name] = number
        size += num_bytes
    return {n: f"model-{k:05d}-of-{number:05d}.safetensors" for n, k in number_of.items()}


def require_no_model(folder: Path) -> None:
    """Make a folder, if it is missing, and refuse one that has a model.

    Raises:
        hp_base.errors.ConfigError: When the folder has a model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")) or (folder / INDEX).exists():
        raise ConfigError(f'folder ("{folder}") must have no safetensors files')


def make_files(folder: Path, places: Mapping[str, Place]) -> None:
    """Make the files in full size, each with its header and nothing else.

    A single file without an index gets its header at the end, as without it there is no model.

    Raises:
        hp_base.errors.ConfigError: When the folder has a model.
    """
    require_no_model(folder)
    for file, inside in _by_file(places).items():
        header, _, size = _layout(inside)
        with created(folder / file) as descriptor:
            os.truncate(descriptor, size)
            if file != SINGLE:
                write(descriptor, memoryview(header))


def _by_file(places: Mapping[str, Place]) -> dict[str, dict[str, Place]]:
    by_file: dict[str, dict[str, Place]] = {}
    for name, place in places.items():
        by_file.setdefault(place.file, {})[name] = place
    return by_file


def _layout(inside: Mapping[str, Place]) -> tuple[bytes, dict[str, int], int]:
    return layout_of({name: (place.dtype, place.shape) for name, place in inside.items()})


@contextmanager
def opened_places(
    folder: Path, places: Mapping[str, Place]
) -> Iterator[Callable[[str], FileTensor]]:
    """Yield a function that opens a tensor for writing by its name; sync all files at the end."""
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


def write_index(folder: Path, places: Mapping[str, Place], before: Before | None = None) -> None:
    """Write the file that completes a model: the index, or the header of the only file."""
    file_of = {name: place.file for name, place in places.items()}
    index = None if before is None else before.listing
    if alone := _by_file(places).get(SINGLE):
        header, _, _ = _layout(alone)
        with closed_at_end(os.open(folder / SINGLE, os.O_RDWR)) as descriptor:
            write(descriptor, memoryview(header))
            os.fsync(descriptor)
    if index is not None and json.loads(index)["weight_map"] == file_of:
        replace_file(folder / INDEX, index)
    elif not alone or index is not None:
        total = sum(place.num_bytes for place in places.values())
        replace_file(folder / INDEX, index_of(file_of, total))
    fsync_directory(folder)


def cast(name: str, values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert values to the dtype of a file.

    Raises:
        hp_base.errors.CheckpointError: When a value is too large for the dtype.
    """
    made = values.to(dtype)
    if dtype == torch.float16 and not torch.equal(made.isinf(), values.isinf()):
        raise CheckpointError(
            f"tensor {name} must fit float16, which it came in; --dtype float32 writes it"
        )
    return made


def on_all_ranks(action: Callable[[], T], *, group: ProcessGroup | None, where: str) -> T:
    """Do something on every rank, and raise on all of them if it fails on one.

    Args:
        action: Part of this rank, without a collective that another rank may miss.
        group: CPU group of the ranks; None: this rank is alone.
        where: Infinitive for the message, such as "load weights".

    Returns:
        Result of this rank's part.
    """
    with agreeing(group=group, where=where):
        try:
            return action()
        except OSError as failure:
            raise CheckpointError(
                f"cannot {where}: {failure.filename}: {failure.strerror}"
            ) from None
