"""Checkpoints of several formats, read tensor by tensor; nothing is unpickled that could run.

One of them is a manifest of tensors: what an engine holds, as names, shapes, dtypes and digests, in
JSON.
"""

import hashlib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from hp_base.errors import CheckpointError
from hp_base.folder import read_named, why_not
from hp_checkpoint import Box, decode_extra, open_checkpoint
from hp_checkpoint import Source as Boxes
from hp_checkpoint.dcp import read_sources, sources_in
from hp_checkpoint.dcp.metadata import METADATA
from hp_checkpoint.manifest import DTYPES, MANIFEST, NAME_OF
from hp_checkpoint.runs.directory import complete_checkpoints, newest_checkpoint
from hp_checkpoint.safetensors import INDEX, FileTensor, opened_tensors
from hp_checkpoint.weight_files import weight_files

_TORCH = ("*.pt", "*.pth", "*.bin")
_FORMAT = "hp-tensors"
_MOST_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
        dtype: Its dtype, as safetensors calls it.
        shape: Its shape.
        read: Reads the values into new memory; None: the checkpoint has a digest alone.
        sha256: SHA-256 of its bytes in this dtype, hexadecimal; empty: unknown.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor] | None
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Source:
    """An open checkpoint.

    Attributes:
        path: Path of the checkpoint.
        format: Name of the format, for people.
        tensors: Name -> tensor.
        left_out: Names of what is no tensor, or of a dtype that cannot be read.
        config: Configuration of the run that saved it, of hp-train's own; else empty.
    """

    path: Path
    format: str
    tensors: Mapping[str, Entry]
    left_out: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None


@contextmanager
def opened_source(path: Path) -> Iterator[Source]:
    """Open a checkpoint of any known format.

    Args:
        path: A run directory or a checkpoint of hp-train, a folder or file of safetensors, a
            folder of `torch.distributed.checkpoint`, a file of `torch.save` or a folder of such,
            or a manifest of `hp-verify --manifest`.

    Raises:
        CheckpointError: When it is none of these, or damaged, with the file's name.
    """
    with ExitStack() as stack:
        yield _opened(path, stack)


def _opened(path: Path, stack: ExitStack) -> Source:
    if path.is_file():
        return _of_file(path, stack)
    if (path / MANIFEST).is_file():
        return _native(path)
    if complete_checkpoints(path / "checkpoints"):
        return _native(newest_checkpoint(path / "checkpoints"))
    if (path / METADATA).is_file():
        return _distributed(path)
    return _of_folder(path, stack)


def _of_file(path: Path, stack: ExitStack) -> Source:
    if path.suffix == ".json":
        listing = read_listing(path)
        tensors = {n: Entry(t.dtype, t.shape, None, t.sha256) for n, t in listing.items()}
        return Source(path, "manifest", tensors)
    if path.suffix == ".safetensors":
        return _of_files(path, stack.enter_context(opened_tensors([path])))
    return _of_torch([path], path)


def _of_folder(path: Path, stack: ExitStack) -> Source:
    """Open a folder of files that say nothing of each other, or by an index."""
    if (path / INDEX).is_file():
        return _of_files(path, stack.enter_context(opened_tensors(weight_files(path))))
    if found := sorted(path.glob("*.safetensors")):
        return _of_files(path, stack.enter_context(opened_tensors(found)))
    if found := sorted(file for pattern in _TORCH for file in path.glob(pattern)):
        return _of_torch(found, path)
    raise CheckpointError(
        f"{path} must be a checkpoint: a run directory, safetensors, "
        "torch.distributed.checkpoint, torch.save, or a manifest"
    )


def _native(path: Path) -> Source:
    checkpoint = open_checkpoint(path)
    config = decode_extra(checkpoint.manifest.extra).get("config")
    return Source(path, "hp-train", _entries(sources_in(checkpoint)), config=config)


def _entries(sources: Mapping[str, Boxes]) -> dict[str, Entry]:
    """Return tensors of boxes as tensors that are read whole."""
    return {n: Entry(NAME_OF[s.dtype], s.shape, partial(_whole, s)) for n, s in sources.items()}


def _whole(source: Boxes) -> Tensor:
    values = torch.empty(source.shape, dtype=source.dtype)
    for box in source.boxes:
        values[box.within(_all_of(source.shape))] = source.read(box)
    return values


def _of_files(path: Path, files: Mapping[str, FileTensor]) -> Source:
    known = {name: file for name, file in files.items() if file.dtype in DTYPES}
    tensors = {
        name: Entry(f.dtype, f.shape, partial(f.read, _all_of(f.shape)))
        for name, f in known.items()
    }
    return Source(path, "safetensors", tensors, tuple(sorted(files.keys() - known.keys())))


def _distributed(path: Path) -> Source:
    sources, pickled = read_sources(path)
    left_out = (
        *pickled,
        *(file.name for file in path.glob("*.pt")),
    )  # Megatron's arguments, groups
    return Source(path, "torch.distributed.checkpoint", _entries(sources), left_out)


def _all_of(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def _of_torch(paths: list[Path], shown: Path) -> Source:
    tensors: dict[str, Entry] = {}
    left_out: list[str] = []
    for path in paths:
        for name, value in _flat("", _loaded(path)):
            if not isinstance(value, Tensor) or value.dtype not in NAME_OF:
                left_out.append(name)
                continue
            if name in tensors:
                raise CheckpointError(f"{path}: tensor {name} must be in one file")
            shape = tuple(value.shape)
            tensors[name] = Entry(NAME_OF[value.dtype], shape, value.detach().clone)
    return Source(shown, "torch.save", tensors, tuple(left_out))


def _loaded(path: Path) -> Any:
    """Map the tensors of a file into memory, after a check of the checksums that torch ignores."""
    try:
        with zipfile.ZipFile(path) as archive:
            bad = archive.testzip()
        loaded = None
        if bad is None:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # noqa: BLE001 - of many kinds, and all say that it is none
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise CheckpointError(f"{path} must be a whole file of torch.save: {reason}") from None
    if bad is not None:
        raise CheckpointError(f"{path}: {bad} is damaged (its checksum differs)")
    return loaded


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what nested mappings and lists hold, with names joined by dots."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        yield prefix, value
        return
    for key, item in items:
        yield from _flat(f"{prefix}.{key}" if prefix else key, item)


class Listed(msgspec.Struct, frozen=True):
    """A tensor.

    Attributes:
        dtype: Its dtype as safetensors calls it, such as `"BF16"`.
        shape: Its shape.
        sha256: SHA of its bytes, little-endian, in C order; hexadecimal.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str


class _Manifest(msgspec.Struct, frozen=True):
    format: str
    tensors: dict[str, Listed]


def digest(values: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in C order."""
    flat = values.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()


def write_listing(path: Path, tensors: Mapping[str, Listed]) -> None:
    """Write a new manifest.

    Raises:
        CheckpointError: When it cannot be, or is there.
    """
    text = msgspec.json.format(msgspec.json.encode(_Manifest(_FORMAT, dict(tensors))), indent=1)
    try:
        with path.open("xb") as file:
            file.write(text + b"\n")
    except OSError as error:
        raise CheckpointError(f"{path} must be a new file: {error.strerror}") from None


def read_listing(path: Path) -> dict[str, Listed]:
    """Read a manifest.

    Raises:
        CheckpointError: When it is none.
    """
    try:
        found = msgspec.json.decode(read_named(path, limit=_MOST_BYTES), type=_Manifest)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} must be a manifest of tensors: {why_not(error)}") from None
    unknown = sorted({tensor.dtype for tensor in found.tensors.values()} - DTYPES.keys())
    if found.format != _FORMAT or unknown:
        wrong = f"dtype {unknown[0]}" if unknown else f"format {found.format[:40]}"
        raise CheckpointError(f"{path} must be a manifest of tensors: {wrong} is not known")
    return found.tensors
