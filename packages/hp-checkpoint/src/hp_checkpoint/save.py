"""Saving: each chunk is written by one rank; the directory is read back and then renamed."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard

from hp_base.errors import CheckpointError
from hp_base.folder import DamageError, opened_directory
from hp_checkpoint.boxes import Box, Part
from hp_checkpoint.checkpoint import read_manifest
from hp_checkpoint.collective import (
    OnProgress,
    agree_all,
    gathered,
    on_all_ranks,
    on_first_rank,
    on_rank_zero,
    silent,
    verify_together,
)
from hp_checkpoint.files import create_staging, created, failed, write, write_tensor
from hp_checkpoint.manifest import (
    DIGEST,
    DTYPES,
    MANIFEST,
    NAME_OF,
    Chunk,
    Entry,
    Manifest,
    SavedFile,
    SavedTensor,
    decode,
    digest_line,
    encode,
    file_header,
    unfit_name,
)
from hp_platform.failures.messages import as_form

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Source:
    """The boxes of a tensor that a rank can save, and a function for their values.

    Attributes:
        dtype: Dtype of the tensor.
        shape: Shape of the whole tensor.
        boxes: Boxes of the tensor that the rank has.
        read: Function that returns the values of a box; called when they are written.
        kind: Kind of the tensor, such as `"DTensor"`, for messages; the same on all ranks that have
            the tensor.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    read: Callable[[Box], Tensor]
    kind: str = "Tensor"

    @classmethod
    def of(cls, part: Part, *, kind: str = "Tensor") -> Source:
        """Return the source of a part."""
        return cls(part.local.dtype, part.shape, (part.box,), lambda _: part.local, kind)


def parts_of(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """Return the local parts of tensors to save or load.

    Args:
        tensors: Tensors by global name; placements of a `DTensor` are `Shard` and `Replicate`.

    Raises:
        CheckpointError: If a tensor cannot be saved, or its part is unknown; names the tensor.
    """
    _require_names(tensors)
    parts = {}
    for name, tensor in tensors.items():
        if error := _tensor_error(tensor):
            raise CheckpointError(f"tensor {name}: {error}")
        try:
            parts[name] = Part.of(tensor)
        except ValueError as error:
            raise CheckpointError(f"tensor {name}: {error}") from None
    return parts


def sources_of(
    tensors: Mapping[str, Tensor], copies: Mapping[str, Tensor] | None = None
) -> dict[str, Source]:
    """Return the local parts of tensors as sources; see :func:`parts_of`.

    Args:
        tensors: Tensors by global name, as for :func:`parts_of`.
        copies: Copies of this rank's parts by the same names, to be written instead of the parts;
            None: the parts are written.
    """
    sources = {}
    for name, part in parts_of(tensors).items():
        kind = "DTensor" if isinstance(tensors[name], DTensor) else "Tensor"
        saved = part if copies is None else Part(copies[name], part.shape, part.offset)
        sources[name] = Source.of(saved, kind=kind)
    return sources


class _Offer(NamedTuple):
    """A chunk that a rank could write, with properties of its tensor."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def shown(self) -> str:
        """Return kind, shape and dtype of the tensor on this rank, in words."""
        return f"{self.kind} {list(self.shape)} {DTYPES[self.dtype]}"


class _Orders(NamedTuple):
    """The directory, the id of the save, and the chunks of each rank to write."""

    staging: str
    save_id: str
    kept: list[list[int]]


class Written(NamedTuple):
    """A file that a rank has written; without chunks there is no file.

    Attributes:
        name: Name of the file.
        bytes: Size of the whole file, in bytes.
        tensors: Name, dtype, shape and chunks of each tensor; the index of the file is not known
            yet.
    """

    name: str
    bytes: int
    tensors: list[tuple[str, str, tuple[int, ...], list[Chunk]]]


def save(
    directory: Path,
    name: str,
    sources: Callable[[], Mapping[str, Source]],
    *,
    commit: Callable[[Path], Path],
    group: ProcessGroup | None,
    step: int = 0,
    extra: bytes = b"{}",
    on_progress: OnProgress = silent,
) -> Path:
    """Save tensors as a new directory. Every rank of `group` calls; blocking.

    Files are written to a directory of another name, flushed to the disk, read back and compared
    with their hashes; then `commit` renames the directory. If anything fails, the directory is
    removed.

    Args:
        directory: Directory that will contain the checkpoint, on storage that all ranks share; made
            if it is missing, in an existing one. Must not be a symbolic link.
        name: Name that the checkpoint will have.
        sources: Function that returns the sources of this rank, by global name. Of ranks that have
            the same box, the one with the least to write so far writes it.
        commit: Function that is called on the first rank with the written directory; returns its
            final path.
        group: CPU group; None: this rank is alone.
        step: Step of the training run.
        extra: JSON of the caller, from `encode_extra`; that of the first rank is saved.
        on_progress: Function that is called for each chunk.

    Returns:
        The path that `commit` returned.

    Raises:
        CheckpointError: On all ranks, in one line: the storage failed, or a tensor cannot be saved.
        RuntimeError: If a rank is gone.
    """
    offered = on_all_ranks(lambda: _offers(sources()), group=group)
    told = gathered(json.dumps([offer for offer, _ in offered]), of=str, group=group)
    made: list[tuple[Path, int]] = []

    def decide() -> _Orders:
        kept = _shared_out(_decoded(told, list[_Offer]))
        try:
            made.append(create_staging(directory, name))
        except OSError as error:
            raise failed("create a checkpoint in", directory, error) from None
        return _Orders(str(made[0][0]), uuid4().hex, kept)

    try:
        orders = on_first_rank(decide, of=_Orders, group=group)
        staging, rank = Path(orders.staging), 0 if group is None else group.rank()
        kept = [offered[n] for n in orders.kept[rank]]
        chosen = [(offer.name, Box(offer.offsets, offer.sizes), source) for offer, source in kept]
        file = f"rank-{rank:05d}.safetensors"

        head = orders.save_id, step
        written = on_all_ranks(
            lambda: write_file(staging / file, chosen, head=head, on_progress=on_progress),
            group=group,
        )
        on_progress("write", waiting=True)
        finish(staging, [written], head=head, extra=extra, group=group, on_progress=on_progress)
        return Path(on_rank_zero(lambda: str(commit(staging)), of=str, group=group))
    finally:
        for path, lock in made:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def write_file(
    path: Path,
    chosen: Iterable[tuple[str, Box, Source]],
    *,
    head: tuple[str, int],
    on_progress: OnProgress = silent,
) -> Written:
    """Write chunks to a new safetensors file, copied from the device one at a time.

    Wide dtypes come first, so that all are aligned; a chunk without elements is left out, and a
    file without chunks is not written.

    Args:
        path: Path of the file.
        chosen: Names of tensors, boxes of them, and their sources.
        head: Id of the save, and step.
        on_progress: Function that is called for each chunk.

    Raises:
        CheckpointError: In one line, if the file cannot be written.
    """
    named = []
    for name, box, source in chosen:
        entry = Entry.of(name, NAME_OF[source.dtype], source.shape, Chunk(0, 0, *box, ""))
        named.append((-source.dtype.itemsize, entry.key, entry, source, box))
    named.sort(key=itemgetter(0, 1))
    tensors: dict[str, tuple[str, str, tuple[int, ...], list[Chunk]]] = {}
    entries, begin, reads = list[Entry](), 0, []
    for *_, entry, source, box in named:
        tensors[entry.tensor] = entry.tensor, entry.dtype, source.shape, []
        if entry.nbytes:
            entries.append(entry._replace(chunk=entry.chunk._replace(begin=begin)))
            reads.append((source.read, box))
            begin += entry.nbytes
    header = file_header(*head, entries)
    try:
        if entries:
            with opened_directory(path.parent) as folder, created(path.name, folder) as descriptor:
                write(descriptor, memoryview(header))
                for entry, (read, box) in zip(entries, reads, strict=True):
                    on_progress("write")
                    digest = write_tensor(descriptor, read(box))
                    tensors[entry.tensor][3].append(entry.chunk._replace(sha256=digest))
    except DamageError as damage:
        raise CheckpointError(f"cannot write {path}: {damage}") from None
    except OSError as error:
        raise failed("write", path, error) from None
    return Written(path.name, len(header) + begin, list(tensors.values()))


def finish(
    folder: Path,
    written: Sequence[Written],
    *,
    head: tuple[str, int],
    extra: bytes = b"{}",
    group: ProcessGroup | None,
    on_progress: OnProgress = silent,
) -> Manifest:
    """Write the manifest of the files of all ranks, and read everything back.

    Args:
        folder: Directory of the files that all ranks have written.
        written: Files that this rank has written.
        head: Id of the save, and step.
        extra: JSON of the caller, from `encode_extra`; that of the first rank is saved.
        group: CPU group; None: this rank is alone.
        on_progress: Function that is called for each chunk.

    Raises:
        CheckpointError: On all ranks, in one line.
        RuntimeError: If a rank is gone.
    """
    reports = gathered(json.dumps(written), of=str, group=group)
    decoded: dict[bytes, Manifest] = {}

    def make() -> str:
        on_progress("write the manifest")
        text = encode(_manifest_of(_decoded(reports, list[Written]), head=head, extra=extra))
        decoded[text] = _write_manifest(folder, text)
        return ""

    on_first_rank(make, of=str, group=group)
    error = None
    try:
        manifest = read_manifest(folder, decoded=decoded)
    except (DamageError, OSError) as raised:
        error = CheckpointError(f"{folder}: {raised}")
    agree_all(error, group=group, where="reading a new checkpoint back")
    if damage := verify_together(folder, manifest, group=group, on_progress=on_progress):
        raise CheckpointError(f"{folder} was not written well: {damage}")
    return manifest


def _manifest_of(
    everyones: Sequence[Sequence[Written]], *, head: tuple[str, int], extra: bytes
) -> Manifest:
    files: list[SavedFile] = []
    tensors: dict[str, tuple[str, tuple[int, ...], list[Chunk]]] = {}
    for report in (report for of_rank in everyones for report in of_rank):
        number = len(files)
        for name, dtype, shape, chunks in report.tensors:
            known = tensors.setdefault(name, (dtype, shape, []))
            for chunk in chunks:
                known[2].append(chunk._replace(file=number))
        if any(map(itemgetter(3), report.tensors)):
            files.append(SavedFile(report.name, report.bytes))
    software = {"python": platform.python_version(), "torch": str(torch.__version__)}
    return Manifest(
        save_id=head[0],
        step=head[1],
        world_size=len(everyones),
        software=software,
        extra=extra,
        files=tuple(files),
        tensors={
            name: SavedTensor(dtype, shape, tuple(chunks))
            for name, (dtype, shape, chunks) in sorted(tensors.items())
        },
    )


def _write_manifest(folder: Path, text: bytes) -> Manifest:
    """Write the manifest and its hash, and flush the entries of the folder to the disk."""
    try:
        manifest = decode(text)  # raises for a manifest that a load would refuse
        with opened_directory(folder) as directory:
            for name, data in ((MANIFEST, text), (DIGEST, digest_line(text))):
                with created(name, directory) as descriptor:
                    write(descriptor, memoryview(data))
            os.fsync(directory)
    except DamageError as damage:
        raise CheckpointError(f"cannot save: {damage}") from None
    except OSError as error:
        raise failed("write", folder / MANIFEST, error) from None
    return manifest


def _tensor_error(tensor: object) -> str | None:
    if not isinstance(tensor, Tensor):
        return f"type ({type(tensor).__name__}) must be Tensor"
    local = tensor
    if isinstance(tensor, DTensor):
        if any(type(placement) not in (Shard, Replicate) for placement in tensor.placements):
            return f"placements ({tensor.placements}) must be Shard or Replicate"
        local = tensor.to_local()
    if local.layout != torch.strided or local.is_quantized or local.device.type == "meta":
        return f"layout ({local.layout}) on {local.device} must be strided memory"
    return None if local.dtype in NAME_OF else _unknown(local.dtype)


def _unknown(dtype: torch.dtype) -> str:
    return f"dtype ({dtype}) must be one of {', '.join(map(str, NAME_OF))}"


def _require_names(names: Collection[str]) -> None:
    if bad := unfit_name(names):
        raise CheckpointError(f"tensor {bad[0]}: {bad[1]}")


def _offers(sources: Mapping[str, Source]) -> list[tuple[_Offer, Source]]:
    found = []
    _require_names(sources)
    for name, source in sources.items():
        if source.dtype not in NAME_OF:
            raise CheckpointError(f"tensor {name}: {_unknown(source.dtype)}")
        described = name, source.kind, NAME_OF[source.dtype], source.shape
        # One box without elements for a tensor that has none.
        for box in source.boxes or (Box((0,) * len(source.shape), source.shape),):
            found.append((_Offer(*described, *box), source))  # noqa: PERF401 - of two loops
    return found


def _shared_out(offers: Sequence[Sequence[_Offer]]) -> list[list[int]]:
    """Assign every chunk to one rank that has it: the one with the least to write so far.

    Raises:
        CheckpointError: If a tensor has another dtype, shape or kind on another rank.
    """
    seen: dict[str, tuple[int, _Offer]] = {}
    holders: dict[_Offer, list[tuple[int, int]]] = defaultdict(list)
    for rank, of_rank in enumerate(offers):
        for number, offer in enumerate(of_rank):
            first, other = seen.setdefault(offer.name, (rank, offer))
            if offer[1:4] != other[1:4]:
                raise CheckpointError(
                    f"tensor {offer.name}: {offer.shown} of rank {rank} must equal {other.shown} "
                    f"of rank {first}"
                )
            holders[offer].append((rank, number))
    kept: list[list[int]] = [[] for _ in offers]
    to_write = [0] * len(offers)
    for offer, having in holders.items():
        rank, number = having[0]
        if len(having) > 1:
            _, rank, number = min([(to_write[rank], rank, number) for rank, number in having])
        to_write[rank] += math.prod(offer.sizes) * DTYPES[offer.dtype].itemsize
        kept[rank].append(number)
    return kept


def _decoded(texts: Sequence[str], of: type[T]) -> list[T]:
    found: list[T] = []
    for rank, text in enumerate(texts):
        try:
            found.append(as_form(of, json.loads(text)))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"what rank {rank} of the group sent: {error}") from None
    return found
