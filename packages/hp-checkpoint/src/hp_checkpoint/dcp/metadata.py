"""`.metadata` of a plain checkpoint: the place of every box of every tensor."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from hp_base.folder import DamageError, opened, opened_directory, read_whole
from hp_checkpoint.boxes import Box, coverage_error
from hp_checkpoint.dcp.pickled import Called, Named, read_pickle
from hp_checkpoint.manifest import DTYPES, unfit_name

METADATA = ".metadata"
MAX_METADATA_BYTES = 128 << 20
_FILE = re.compile(r"\A[A-Za-z0-9_][A-Za-z0-9_.-]*\.distcp\Z")
_LARGEST = 1 << 53
_MAX_DIMS = 16

_HERE = "torch.distributed.checkpoint.metadata."
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_SIZE = "torch.Size"
DTYPE_NAMES = {str(dtype): name for name, dtype in DTYPES.items()}
"""Safetensors' names of torch's dtypes: ``torch.float32`` -> ``F32``."""
State: TypeAlias = dict[str, Any]
"""The attributes of an object in a pickle, each checked where it is used."""
_ALLOWED = {
    *DTYPE_NAMES,
    f"{_HERE}Metadata",
    f"{_HERE}TensorStorageMetadata",
    f"{_HERE}BytesStorageMetadata",
    f"{_HERE}TensorProperties",
    f"{_HERE}ChunkStorageMetadata",
    f"{_HERE}MetadataIndex",
    f"{_HERE}StorageMeta",
    f"{_HERE}_MEM_FORMAT_ENCODING",
    _INFO,
    _SIZE,
    "torch.serialization._get_layout",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "collections.OrderedDict",
    # Megatron also keeps the plan of the save, for its next checkpoint. It is not read.
    "torch.distributed.checkpoint.planner.SavePlan",
    "torch.distributed.checkpoint.planner.TensorWriteData",
    "torch.distributed.checkpoint.planner.WriteItem",
    "torch.distributed.checkpoint.planner.WriteItemType",
}


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a box in the files of a checkpoint.

    Attributes:
        file: Name of the file in the folder.
        offset: First byte of the box.
        length: Number of bytes.
    """

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a plain checkpoint.

    Attributes:
        dtype: Dtype by safetensors' name.
        shape: Shape of the whole tensor.
        boxes: Boxes that cover the tensor, and their places; none if it has no elements.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: Mapping[Box, Place]


@dataclass(frozen=True, slots=True)
class Stored:
    """A plain checkpoint.

    Attributes:
        tensors: Tensors by name.
        left_out: Names of other entries, which are pickled and never opened.
    """

    tensors: Mapping[str, StoredTensor]
    left_out: tuple[str, ...]


def read_metadata(folder: Path) -> Stored:
    """Read and check `.metadata`, and check that its files exist and are long enough.

    Raises:
        DamageError: In one line, if it is missing, hostile, or describes impossible tensors.
        OSError: If this process cannot read it.
    """
    with opened_directory(folder) as directory:
        data = read_whole(directory, METADATA, limit=MAX_METADATA_BYTES)
        try:
            stored = _stored(read_pickle(data, allowed=_ALLOWED))
        except DamageError as damage:
            raise DamageError(f"{METADATA}: {damage}") from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise DamageError(f"{METADATA} is not of a checkpoint: {error}") from None
        _check_files(directory, stored)
    return stored


def _stored(root: object) -> Stored:
    top = _state(root, _HERE + "Metadata")
    places = dict(_places(top["storage_data"]))
    tensors: dict[str, StoredTensor] = {}
    left_out = []
    if bad := unfit_name(top["state_dict_metadata"]):
        raise DamageError(bad[1])
    for name, entry in top["state_dict_metadata"].items():
        if entry.name == _HERE + "BytesStorageMetadata":
            left_out.append(name)
            continue
        try:
            tensors[name] = _tensor(name, _state(entry, _HERE + "TensorStorageMetadata"), places)
        except DamageError as damage:
            raise DamageError(f"tensor {name}: {damage}") from None
    return Stored(tensors, tuple(left_out))


def _tensor(
    name: str, entry: State, places: Mapping[tuple[str, tuple[int, ...]], Place]
) -> StoredTensor:
    properties = entry["properties"].state
    dtype = properties[0].name if isinstance(properties[0], Named) else ""
    if dtype not in DTYPE_NAMES:
        raise DamageError(f"dtype ({dtype[:60]}) must be one of {', '.join(DTYPE_NAMES)}")
    shape = _sizes(entry["size"])
    chunks = (_state(chunk, _HERE + "ChunkStorageMetadata") for chunk in entry["chunks"])
    boxes = [Box(_sizes(chunk["offsets"]), _sizes(chunk["sizes"])) for chunk in chunks]
    # torch lists a box without elements for a tensor that has none.
    boxes = [box for box in boxes if math.prod(box[1])]
    if error := coverage_error(shape, boxes):
        raise DamageError(error)
    found: dict[Box, Place] = {}
    for box in boxes:
        place = places.get((name, box[0]))
        if place is None:
            raise DamageError(f"the place of its box at {list(box[0])} is missing")
        needed = math.prod(box[1]) * DTYPES[DTYPE_NAMES[dtype]].itemsize
        if needed > place.length:
            raise DamageError(
                f"bytes of its box at {list(box[0])} ({needed}) must fit those stored "
                f"({place.length})"
            )
        found[box] = place
    return StoredTensor(DTYPE_NAMES[dtype], shape, found)


def _places(
    data: Mapping[object, object],
) -> Iterator[tuple[tuple[str, tuple[int, ...]], Place]]:
    for key, value in data.items():
        index = _state(key, _HERE + "MetadataIndex")
        info = _state(value, _INFO)
        offset = index.get("offset")
        if offset is None:
            continue  # not of a tensor
        if info.get("transform_descriptors"):
            raise DamageError("what was compressed or encrypted cannot be read")
        file, name = info["relative_path"], index["fqn"]
        if not isinstance(name, str) or not isinstance(file, str):
            raise DamageError("names of tensors and files must be strings")
        if not _FILE.match(file):
            raise DamageError(f"file {file[:80]!r} must be one of this folder, *.distcp")
        place = Place(file, count(info["offset"]), count(info["length"]))
        yield (name, _sizes(offset)), place


def _check_files(directory: int, stored: Stored) -> None:
    ends: dict[str, int] = {}
    for tensor in stored.tensors.values():
        for place in tensor.boxes.values():
            ends[place.file] = max(ends.get(place.file, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        with opened(directory, name) as descriptor:
            size = os.fstat(descriptor).st_size
        if end > size:
            raise DamageError(f"{name}: size ({size} bytes) must be at least {end} bytes")


def _state(value: object, name: str) -> State:
    if not isinstance(value, Called) or value.name != name or not isinstance(value.state, dict):
        raise DamageError(f"must have a {name.rpartition('.')[2]} where it has something else")
    return value.state


def _sizes(value: object) -> tuple[int, ...]:
    """Return the numbers of a torch.Size or a tuple."""
    if isinstance(value, Called) and value.name == _SIZE and len(value.args) == 1:
        [value] = value.args
    if not isinstance(value, tuple) or len(value) > _MAX_DIMS:
        raise DamageError(f"a size must be at most {_MAX_DIMS} numbers")
    return tuple(map(count, value))


def count(value: object) -> int:
    """Return a size or an offset; raise DamageError for any other value."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise DamageError(f"a size or an offset must be a number from 0 to {_LARGEST}")
    return value
