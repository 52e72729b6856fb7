"""Safetensors files: their headers, and boxes of their tensors, read and written in place.

A box is read by as many calls as it has runs of bytes; nothing else of a tensor is touched, and
several processes may write boxes of one tensor.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from hp_train.checkpoint.manifest import ITEM_BYTES, RESERVED
from hp_train.checkpoint.planners import DTYPES, NAME_OF
from hp_train.errors import ConfigError
from hp_train.hugging_face.json_file import open_regular, read_json
from hp_train.hugging_face.plan import Box, Shape
from hp_train.schema import shown

INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20  # as the safetensors library has it; of an index too
_MOST_DIMS = 8


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of an open file.

    Attributes:
        descriptor: Of the file.
        begin: Where its bytes begin in the file.
        dtype: As safetensors calls it.
        shape: Of the whole.
        file: Name, for messages.
    """

    descriptor: int
    begin: int
    dtype: str
    shape: Shape
    file: str

    def read(self, box: Box) -> Tensor:
        """Values of a box, in new memory and in the file's dtype.

        Raises:
            ConfigError: When the file has become shorter.
        """
        dtype = DTYPES[self.dtype]  # type: ignore[index]  # checked when the file was opened
        values = torch.empty(box[1], dtype=dtype)
        data = values.view(-1).view(torch.uint8).numpy().data
        for place, start, nbytes in _runs(self.shape, box, dtype.itemsize):
            if not _read(self.descriptor, data[start : start + nbytes], self.begin + place):
                raise ConfigError(f'"{self.file}" became shorter while it was read')
        return values

    def write(self, box: Box, values: Tensor) -> None:
        """Put the values of a box to their place; they must be of the file's dtype."""
        data = values.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
        for place, start, nbytes in _runs(self.shape, box, values.dtype.itemsize):
            _write(self.descriptor, data[start : start + nbytes], self.begin + place)


def _read(descriptor: int, data: memoryview, position: int) -> bool:
    """Fill `data` from a position; False where the file ends before."""
    while data:
        done = os.preadv(descriptor, [data], position)
        if done == 0:
            return False
        data, position = data[done:], position + done
    return True


def _write(descriptor: int, data: memoryview, position: int) -> None:
    while data:
        done = os.pwrite(descriptor, data, position)
        data, position = data[done:], position + done


@contextmanager
def opened_files(folder: Path) -> Iterator[dict[str, FileTensor]]:
    """Open the files of a model and give their tensors by name; only headers are read.

    Raises:
        ConfigError: When files are missing, damaged, or not what the index says.
    """
    with ExitStack() as stack:
        found: dict[str, FileTensor] = {}
        for name in _file_names(folder):
            descriptor = open_regular(folder / name)
            stack.callback(os.close, descriptor)
            inside = _tensors_of(descriptor, str(folder / name))
            if twice := found.keys() & inside.keys():
                raise ConfigError(
                    f"tensor {shown(min(twice))} must be in one file, not in "
                    f'"{found[min(twice)].file}" and "{folder / name}"'
                )
            found |= inside
        yield found


def file_header(entries: Mapping[str, tuple[torch.dtype, Shape]]) -> tuple[bytes, dict[str, int]]:
    """What a file with these tensors begins with, and where each begins, in bytes after it."""
    begins: dict[str, int] = {}
    header: dict[str, Any] = {RESERVED: {"format": "pt"}}
    position = 0
    # Wide dtypes first, so that all are aligned.
    for name, (dtype, shape) in sorted(entries.items(), key=lambda e: -e[1][0].itemsize):
        begins[name] = position
        end = position + prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": NAME_OF[dtype],
            "shape": list(shape),
            "data_offsets": [position, end],
        }
        position = end
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, begins


def _runs(shape: Shape, box: Box, item: int) -> Iterator[tuple[int, int, int]]:
    """Runs of bytes of a box: where in the tensor, where in the box, how many."""
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


def _file_names(folder: Path) -> list[str]:
    if not os.path.lexists(folder / INDEX):
        return [_SINGLE]
    index = read_json(folder / INDEX, most_bytes=_MAX_HEADER_BYTES)
    listed = index.get("weight_map")
    if not isinstance(listed, dict):
        raise ConfigError(f"{INDEX}: weight_map ({shown(listed)}) must be an object")
    for name in listed.values():
        if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
            raise ConfigError(f"{INDEX}: file ({shown(name)}) must be a name in the folder")
    return sorted(set(listed.values()))


def _tensors_of(descriptor: int, path: str) -> dict[str, FileTensor]:
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
        raise ConfigError(f'"{path}" must be a safetensors file: its header is cut off')
    try:
        raw = msgspec.json.decode(os.pread(descriptor, length, 8), type=dict[str, msgspec.Raw])
        raw.pop(RESERVED, None)
        entries = {name: msgspec.json.decode(text, type=_Entry) for name, text in raw.items()}
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise ConfigError(f'"{path}" must be a safetensors file: its header is none') from None
    found: dict[str, FileTensor] = {}
    last = 0
    for name, entry in sorted(entries.items(), key=lambda e: e[1].data_offsets):
        begin, end = entry.data_offsets
        if len(entry.shape) > _MOST_DIMS:
            raise ConfigError(f'"{path}": tensor {shown(name)} must have at most {_MOST_DIMS} dims')
        nbytes = prod(entry.shape) * ITEM_BYTES.get(entry.dtype, 0)  # type: ignore[call-overload]
        fits = 0 <= begin <= end <= size - 8 - length and min((0, *entry.shape)) >= 0
        if not fits or (entry.dtype in ITEM_BYTES and end - begin != nbytes):
            raise ConfigError(f'"{path}": tensor {shown(name)} must lie inside the file')
        if begin < last:
            raise ConfigError(f'"{path}": tensor {shown(name)} must not overlap another one')
        last = end
        found[name] = FileTensor(descriptor, 8 + length + begin, entry.dtype, entry.shape, path)
    return found
