"""Values of a plain checkpoint: each box is a small zip file with its own checksum.

A save needs no ranks: a storage writer gets boxes that are read one after the other.
"""

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter

from hp_base.folder import DamageError, opened, opened_directory, read_into
from hp_checkpoint.boxes import Box
from hp_checkpoint.dcp.metadata import DTYPE_NAMES, Place, count
from hp_checkpoint.dcp.pickled import Called, Named, Persistent, read_pickle
from hp_checkpoint.manifest import DTYPES
from hp_checkpoint.save import Source

_STORAGES = {
    "torch.BFloat16Storage": "BF16",
    "torch.BoolStorage": "BOOL",
    "torch.ByteStorage": "U8",
    "torch.CharStorage": "I8",
    "torch.DoubleStorage": "F64",
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.IntStorage": "I32",
    "torch.LongStorage": "I64",
    "torch.ShortStorage": "I16",
}
_UNTYPED = "torch.storage.UntypedStorage"
_REBUILD = {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"}
_ALLOWED = {*_REBUILD, *_STORAGES, *DTYPE_NAMES, _UNTYPED, "collections.OrderedDict"}
_MAX_PICKLE = 1 << 16


def read_box(folder: Path, place: Place, *, dtype: str, sizes: tuple[int, ...]) -> Tensor:
    """Read one box.

    Args:
        folder: Folder of the checkpoint.
        place: Place of the box, checked by :func:`read_metadata`.
        dtype: Dtype that the box must have, by safetensors' name.
        sizes: Shape that the box must have.

    Returns:
        CPU tensor of `sizes`, in new memory.

    Raises:
        DamageError: In one line, if a checksum, the dtype or the shape differs.
        OSError: If this process cannot read it.
    """
    data = bytearray(place.length)
    with opened_directory(folder) as directory, opened(directory, place.file) as descriptor:
        if read_into(descriptor, memoryview(data), place.offset) != place.length:
            raise DamageError(f"{place.file} became shorter while it was read")
    try:
        return _tensor(data, dtype, sizes)
    except DamageError as damage:
        raise DamageError(f"{place.file}, byte {place.offset}: {damage}") from None
    except (zipfile.BadZipFile, zlib.error, ValueError, KeyError, NotImplementedError) as error:
        raise DamageError(f"{place.file}, byte {place.offset}: damaged: {error}") from None
    except (TypeError, AttributeError, EOFError, struct.error, OverflowError) as error:
        raise DamageError(f"{place.file}, byte {place.offset}: no tensor: {error}") from None


def _tensor(data: bytearray, dtype: str, sizes: tuple[int, ...]) -> Tensor:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
        for info in members.values():
            if info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data):
                raise DamageError(f"{info.filename[:60]!r} must be stored as it is")
        if members["data.pkl"].file_size > _MAX_PICKLE:
            raise DamageError(f"its description must not exceed {_MAX_PICKLE} bytes")
        if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
            raise DamageError("byte order must be little")
        described = read_pickle(archive.read(members["data.pkl"]), allowed=_ALLOWED)
        key, found, offset, shape, strides = _described(described)
        if found != dtype or shape != sizes:
            raise DamageError(
                f"holds {found} {list(shape)}, which must equal {dtype} {list(sizes)}"
            )
        raw = archive.read(members[f"data/{key}"])  # compares the checksum
    item = DTYPES[dtype].itemsize
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if min((offset, *strides)) < 0 or (last + 1) * item > len(raw) or math.prod(shape) == 0:
        raise DamageError("its strides must lie inside what is stored")
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8)[: len(raw) // item * item]
    return flat.view(DTYPES[dtype]).as_strided(shape, strides, offset).clone()


def _described(value: object) -> tuple[str, str, int, tuple[int, ...], tuple[int, ...]]:
    """Return the key of the storage, dtype, offset, shape and strides of a pickled tensor."""
    if not isinstance(value, Called) or value.name not in _REBUILD or value.state is not None:
        raise DamageError("must be a tensor")
    storage, offset, shape, strides, *rest = value.args
    if not isinstance(storage, Persistent) or not isinstance(storage.key, tuple):
        raise DamageError("its storage must be in the same file")
    _, kind, key, _, _ = storage.key
    if kind.name == _UNTYPED:
        [dtype] = [DTYPE_NAMES[n.name] for n in rest if isinstance(n, Named)]
    else:
        dtype = _STORAGES[kind.name]
    if not isinstance(key, str):
        raise DamageError("its storage must have a name")
    if not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise DamageError("its shape and strides must be tuples")
    return key, dtype, count(offset), tuple(map(count, shape)), tuple(map(count, strides))


def write_sources(sources: Mapping[str, Source], writer: StorageWriter) -> None:
    """Save tensors by a storage writer, with one box at a time in memory.

    Args:
        sources: Sources of the tensors, by name.
        writer: Storage writer of `torch.distributed.checkpoint`.
    """
    described = {name: _metadata_of(source) for name, source in sources.items()}
    metadata = Metadata({**described}, storage_meta=writer.storage_meta())
    items = [item for name, tensor in described.items() for item in _items(name, tensor)]
    writer.set_up_storage_writer(True)
    [plan] = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items))])
    written = writer.write_data(plan, _SourcePlanner(sources))
    written.wait()
    writer.finish(metadata, [written.value()])


class _SourcePlanner(DefaultSavePlanner):
    """The planner of a save whose values are read from sources."""

    def __init__(self, sources: Mapping[str, Source]) -> None:
        super().__init__()
        self._sources = sources

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the values of a box."""
        data = write_item.tensor_data
        assert data is not None, "only tensors are planned"
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        return self._sources[write_item.index.fqn].read(box)


def _items(name: str, tensor: TensorStorageMetadata) -> Iterator[WriteItem]:
    """Yield an item for every box of a tensor."""
    for number, chunk in enumerate(tensor.chunks):
        data = TensorWriteData(chunk, tensor.properties, tensor.size)
        index = MetadataIndex(name, chunk.offsets, number)
        yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _metadata_of(source: Source) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=source.dtype),
        torch.Size(source.shape),
        [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes in source.boxes
        ],
    )
