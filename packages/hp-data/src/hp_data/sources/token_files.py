"""Ids that were made elsewhere: arrays of numpy, plain numbers, Megatron's files."""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hp_base.errors import DataError
from hp_data.sources.source import AsFile, Opened, Source, opened_source, printable, why

DTYPES = ("uint16", "uint32", "int32")
"""Dtypes of ids in files, which have at most 32 bits."""
_Ids: TypeAlias = NDArray[Any]
_PART = 1 << 20  # ids
_MAGIC = b"MMIDIDX\0\0"
_NUMPY = b"\x93NUMPY"
_HEADER = re.compile(
    rb"\{'descr': '([<>]?[iu][24])', 'fortran_order': (?:True|False), "
    rb"'shape': \((\d{1,15}),\), \}\s*"
)
_MOST_HEADER = 1 << 16
_HEAD = struct.Struct("<9sQBQQ")
_MEGATRON = {4: "<i4", 8: "<u2"}
_BLOCK, _MOST_SEQUENCES = 1 << 14, 1 << 22


def read_ids(source: Source, opened: Opened) -> Iterator[tuple[_Ids, bool]]:
    """Yield parts of the ids of a file, and whether a document ends with the part.

    Raises:
        DataError: If it is not what it should be; says what is wrong.
    """
    name = printable(source.path)
    try:
        with io.BufferedReader(AsFile(opened), _PART) as file:
            if source.format == "megatron":
                with opened_source(index_of(source.path)) as index:
                    yield from _megatron(file, index, source.size)
                return
            dtype, begin = np.dtype(source.field or "u1").newbyteorder("<"), 0
            if source.format == "npy":
                dtype, count, begin = _numpy_header(file)
                _require_size(source, begin + count * dtype.itemsize)
            yield from _plain(file, dtype, source.size - begin)
    except (OSError, ValueError, struct.error, MemoryError) as error:
        raise DataError(f"{name} must be a file of token ids: {why(error)}") from None


def index_of(path: str) -> str:
    """Return the path of the index of Megatron beside a file of ids."""
    return path[: -len(".bin")] + ".idx"


def _plain(
    file: io.BufferedReader[AsFile], dtype: np.dtype[Any], size: int
) -> Iterator[tuple[_Ids, bool]]:
    """Yield ids that follow each other, of which the last ends a document."""
    count, rest = divmod(size, dtype.itemsize)
    if rest:
        raise ValueError(f"{size} bytes are no whole number of {dtype}")
    for first in range(0, count, _PART):
        number = min(_PART, count - first)
        yield _read(file, dtype, number), first + number == count


def _read(file: io.BufferedReader[AsFile], dtype: np.dtype[Any], count: int) -> _Ids:
    data = file.read(count * dtype.itemsize)
    if len(data) < count * dtype.itemsize:
        raise ValueError("it is cut off")
    return np.frombuffer(data, dtype=dtype)


def _numpy_header(file: io.BufferedReader[AsFile]) -> tuple[np.dtype[Any], int, int]:
    """Return the dtype of an array, the number of its ids, and the first byte of them."""
    magic = file.read(len(_NUMPY) + 2)
    if magic[:-2] != _NUMPY or magic[-2] not in (1, 2):
        raise ValueError("it is no array of numpy")
    length = (
        struct.unpack("<H", file.read(2)) if magic[-2] == 1 else struct.unpack("<I", file.read(4))
    )
    header = file.read(min(length[0], _MOST_HEADER))
    found = _HEADER.fullmatch(header)
    name = np.dtype(found[1].decode()).name if found else ""
    if found is None or name not in DTYPES:
        shown = header[:80].decode("ascii", errors="replace").strip()
        raise ValueError(f"it must have one dimension of {', '.join(DTYPES)}, and is {shown}")
    return np.dtype(found[1].decode()), int(found[2]), file.tell()


def _require_size(source: Source, size: int) -> None:
    if size != source.size:
        raise ValueError(f"its header needs {size} bytes, and it has {source.size}")


def _megatron(
    file: io.BufferedReader[AsFile], index: Opened, size: int
) -> Iterator[tuple[_Ids, bool]]:
    """Yield the documents that an index describes, in its order."""
    magic, version, code, sequences, documents = _HEAD.unpack(index.span(0, _HEAD.size))
    if magic != _MAGIC or version != 1 or code not in _MEGATRON:
        raise ValueError("its .idx is no index of Megatron, version 1, of uint16 or int32")
    dtype = np.dtype(_MEGATRON[code])
    lengths = _HEAD.size
    pointers, begins = lengths + 4 * sequences, lengths + 12 * sequences
    if documents < 1 or begins + 8 * documents > index.size:
        raise ValueError(
            f"its .idx has no room for {sequences} sequences and {documents} documents"
        )
    place, last = 0, 0
    for first in range(0, documents - 1, _BLOCK):
        number = min(_BLOCK, documents - 1 - first) + 1
        ends = np.frombuffer(_whole(index, begins + 8 * first, 8 * number), "<i8")
        low, high = int(ends[0]), int(ends[-1])
        if low != last or (np.diff(ends) < 0).any() or high > sequences:
            raise ValueError("documents of its .idx do not follow each other")
        if high - low > _MOST_SEQUENCES:
            raise ValueError(
                f"{_BLOCK} documents of its .idx have more than {_MOST_SEQUENCES} sequences"
            )
        sizes = np.frombuffer(_whole(index, lengths + 4 * low, 4 * (high - low)), "<i4")
        starts = np.frombuffer(_whole(index, pointers + 8 * low, 8 * (high - low)), "<i8")
        offsets = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))) + place
        if (sizes < 0).any() or (starts != offsets[:-1] * dtype.itemsize).any():
            raise ValueError("sequences of its .idx do not follow each other")
        for length in np.diff(offsets[ends - low]).tolist():
            for at in range(0, length, _PART):
                part = min(_PART, length - at)
                yield _read(file, dtype, part), at + part == length
        place, last = int(offsets[-1]), high
    if last != sequences or place * dtype.itemsize != size:
        raise ValueError(f"its .idx has {place} ids of {dtype}, and it has {size} bytes")


def _whole(index: Opened, begin: int, size: int) -> bytes:
    data = index.span(begin, begin + size) if size else b""
    if len(data) < size:
        raise ValueError("its .idx is cut off")
    return data
