"""Checkpoints of several formats, read tensor by tensor; nothing is unpickled that could run."""

import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hp_checkpoint as store
from hp_base.errors import CheckpointError
from hp_base.folder import DamageError
from hp_checkpoint import Part, open_checkpoint
from hp_checkpoint.dcp.metadata import METADATA, StoredTensor, read_metadata
from hp_checkpoint.dcp.tensors import read_box
from hp_checkpoint.manifest import DTYPES, MANIFEST, NAME_OF
from hp_checkpoint.runs.directory import complete_checkpoints, newest_checkpoint
from hp_checkpoint.safetensors import INDEX, FileTensor, opened_tensors
from hp_checkpoint.weight_files import weight_files
from hp_verify.files.manifest import read_listing

_TORCH = ("*.pt", "*.pth", "*.bin")


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

    def read(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
        values = torch.empty(shape, dtype=DTYPES[dtype])
        checkpoint.fill({name: Part(values, shape, (0,) * len(shape))})
        return values

    tensors = {
        name: Entry(saved.dtype, saved.shape, partial(read, name, saved.dtype, saved.shape))
        for name, saved in checkpoint.manifest.tensors.items()
    }
    extra = store.decode_extra(checkpoint.manifest.extra)
    return Source(path, "hp-train", tensors, config=extra.get("config"))


def _of_files(path: Path, files: Mapping[str, FileTensor]) -> Source:
    known = {name: file for name, file in files.items() if file.dtype in DTYPES}
    tensors = {
        name: Entry(f.dtype, f.shape, partial(f.read, _all_of(f.shape)))
        for name, f in known.items()
    }
    return Source(path, "safetensors", tensors, tuple(sorted(files.keys() - known.keys())))


def _distributed(path: Path) -> Source:
    def read(stored: StoredTensor) -> Tensor:
        values = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        with _damage(path):
            for box, place in stored.boxes.items():
                part = read_box(path, place, dtype=stored.dtype, sizes=box.sizes)
                values[box.within(_all_of(stored.shape))] = part
        return values

    with _damage(path):
        found = read_metadata(path)
    tensors = {n: Entry(t.dtype, t.shape, partial(read, t)) for n, t in found.tensors.items()}
    others = tuple(file.name for file in path.glob("*.pt"))  # Megatron's arguments, and groups
    name = "torch.distributed.checkpoint"
    return Source(path, name, tensors, (*found.left_out, *others))


def _all_of(shape: tuple[int, ...]) -> store.Box:
    return store.Box((0,) * len(shape), shape)


@contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (DamageError, OSError) as error:
        raise CheckpointError(f"{path}: {error}") from None


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
