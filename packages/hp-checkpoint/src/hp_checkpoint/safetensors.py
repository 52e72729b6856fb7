"""Safetensors files of any origin: headers, and boxes of tensors, read and written.

A box is read by as many calls as it has runs of bytes, and no other bytes of a tensor are accessed,
so that several processes may write boxes of one tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hp_base.errors import CheckpointError
from hp_base.folder import open_named, read_into, why_not
from hp_checkpoint.boxes import Box
from hp_checkpoint.manifest import DTYPES, NAME_OF, RESERVED, framed
from hp_platform.failures.messages import as_form, bytes_of

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100 << 20  # as in the safetensors library; also for an index
_MOST_DIMS = 8


class _Stated(NamedTuple):
    """The entry of a tensor in a header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of an open file.

    Attributes:
        descriptor: Descriptor of the file.
        begin: First byte of the tensor in the file.
        dtype: Dtype by safetensors' name, such as `"BF16"`, perhaps not in `DTYPES`.
        shape: Shape of the whole tensor.
        file: Name of the file, for messages.
    """

    descriptor: int
    begin: int
    dtype: str
    shape: tuple[int, ...]
    file: str

    def read(self, box: Box) -> Tensor:
        """Return the values of a box in new memory, of the file's dtype, which is in `DTYPES`.

        Raises:
            CheckpointError: If the file has become shorter.
        """
        dtype = DTYPES[self.dtype]
        buffer = bytearray(prod(box[1]) * dtype.itemsize)
        if not buffer:
            return torch.empty(box[1], dtype=dtype)
        data = memoryview(buffer)
        for place, start, nbytes in _runs(self.shape, box, dtype.itemsize):
            piece = data[start : start + nbytes]
            if read_into(self.descriptor, piece, self.begin + place) < nbytes:
                raise CheckpointError(f'"{self.file}" became shorter while it was read')
        return torch.frombuffer(buffer, dtype=dtype).reshape(box[1])

    def write(self, box: Box, values: Tensor) -> None:
        """Write the values of a box, which must have the file's dtype, to their place."""
        data = memoryview(bytes_of(values))
        for place, start, nbytes in _runs(self.shape, box, values.dtype.itemsize):
            _write(self.descriptor, data[start : start + nbytes], self.begin + place)


@contextmanager
def opened_tensors(paths: Iterable[Path]) -> Iterator[dict[str, FileTensor]]:
    """Open files and yield their tensors by name; only headers are read.

    Raises:
        CheckpointError: If a file is missing or damaged, or a tensor is in two files.
    """
    with ExitStack() as stack:
        found: dict[str, FileTensor] = {}
        for path in paths:
            descriptor = open_regular(path)
            stack.callback(os.close, descriptor)
            inside = _tensors_of(descriptor, str(path))
            if twice := found.keys() & inside.keys():
                name = min(twice)
                raise CheckpointError(
                    f'tensor {_shown(name)} must be in one file, not in "{found[name].file}" and '
                    f'"{path}"'
                )
            found |= inside
        yield found


def open_regular(path: Path) -> int:
    """Open a regular file for reading, without waiting for a pipe.

    Links are followed: the cache of Hugging Face's hub is made of them.

    Raises:
        CheckpointError: If it cannot be opened, or is not a regular file.
    """
    try:
        return open_named(path)
    except (OSError, ValueError) as error:
        reason = why_not(error)
        raise CheckpointError(f"{_shown(str(path))} must be readable: {reason}") from None


def layout_of(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a file of these tensors, the first byte of each, and the file's size.

    Args:
        tensors: Dtype and shape by name.
    """
    header: dict[str, object] = {RESERVED: {"format": "pt"}}
    places: dict[str, int] = {}
    position = 0
    # Wide dtypes first, so that all are aligned.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda e: -e[1][0].itemsize):
        places[name], position = position, position + prod(shape) * dtype.itemsize
        span = [places[name], position]
        header[name] = {"dtype": NAME_OF[dtype], "shape": list(shape), "data_offsets": span}
    text = framed(header)
    begins = {name: len(text) + places[name] for name in tensors}
    return text, begins, len(text) + position


def index_of(file_of: Mapping[str, str], num_bytes: int) -> bytes:
    """Return the index of a folder: the file of each tensor.

    Args:
        file_of: Names of files by name of tensor.
        num_bytes: Size of all tensors together, in bytes.
    """
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(file_of)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def _write(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, position)
        data, position = data[done:], position + done


def _runs(shape: tuple[int, ...], box: Box, item: int) -> Iterator[tuple[int, int, int]]:
    """Yield the runs of bytes of a box: place in the tensor, place in the box, number."""
    offsets, sizes = box
    if prod(sizes) == 0:
        return
    strides = [prod(shape[dim + 1 :]) * item for dim in range(len(shape))]
    # Dimensions after `last` are whole, so that a run goes over all of them.
    last = len(shape)
    while last > 0 and sizes[last - 1] == shape[last - 1]:
        last -= 1
    last = max(last - 1, 0)
    length = prod(sizes[last:]) * item if shape else item
    inner = sum(o * s for o, s in zip(offsets[last:], strides[last:], strict=True))
    outer = [range(o, o + n) for o, n in zip(offsets[:last], sizes[:last], strict=True)]
    for number, index in enumerate(product(*outer)):
        place = sum(i * s for i, s in zip(index, strides[:last], strict=True))
        yield place + inner, number * length, length


def _tensors_of(descriptor: int, path: str) -> dict[str, FileTensor]:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f'"{path}" must be a safetensors file: its header is cut off')
    try:
        stated = json.loads(os.pread(descriptor, length, 8))
        stated.pop(RESERVED, None)
        entries = {
            name: as_form(_Stated, {field: entry[field] for field in _Stated._fields})
            for name, entry in stated.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f'"{path}" must be a safetensors file: its header is none') from None
    found: dict[str, FileTensor] = {}
    last = 0
    in_order = sorted(entries.items(), key=lambda e: e[1].data_offsets)
    for name, (dtype, shape, (begin, end)) in in_order:
        if len(shape) > _MOST_DIMS:
            raise CheckpointError(
                f'"{path}": tensor {_shown(name)} must have at most {_MOST_DIMS} dims'
            )
        fits = 0 <= begin <= end <= size - 8 - length and min((0, *shape)) >= 0
        if not fits or (dtype in DTYPES and end - begin != prod(shape) * DTYPES[dtype].itemsize):
            raise CheckpointError(f'"{path}": tensor {_shown(name)} must lie inside the file')
        if begin < last:
            raise CheckpointError(f'"{path}": tensor {_shown(name)} must not overlap another one')
        last = end
        found[name] = FileTensor(descriptor, 8 + length + begin, dtype, shape, path)
    return found


def _shown(text: str) -> str:
    return json.dumps(text if len(text) <= 250 else f"{text[:250]}...")
