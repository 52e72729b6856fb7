"""Checkpoints in the format of this package: opened, verified, and read in boxes."""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from hp_base.errors import CheckpointError
from hp_base.folder import DamageError, opened, opened_directory, read_into, read_whole
from hp_checkpoint.boxes import Part
from hp_checkpoint.files import PIECE_BYTES, failed, hash_span
from hp_checkpoint.manifest import (
    DIGEST,
    DTYPES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Entry,
    Manifest,
    SavedTensor,
    decode,
    digest_line,
)

_CHANGED = "changed after it was verified; the state is loaded in part and must not be used"


class Checkpoint:
    """One checkpoint with a valid manifest; every chunk is hashed when it is read.

    Args:
        path: Directory of the checkpoint.
        manifest: Decoded manifest of the checkpoint.
        on_read: Function that is called before each chunk that is read into a part.
    """

    def __init__(
        self, path: Path, manifest: Manifest, *, on_read: Callable[[], object] = lambda: None
    ) -> None:
        self.path, self.manifest = path, manifest
        self._on_read = on_read
        self._buffer = bytearray()  # reused, as touching new memory is slow

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: In one line, if the manifest is missing, damaged or cannot be read.
        """
        with reading(path):
            manifest = read_manifest(path)
        return cls(path, manifest)

    def verify(self, names: Collection[str] | None = None) -> None:
        """Check every byte of some tensors, and headers and sizes of their files, on this rank.

        Args:
            names: Names of the tensors to check; None: all.

        Raises:
            CheckpointError: In one line, if a tensor is damaged, naming the file and the tensor, or
                cannot be read.
        """
        chosen = [
            entry
            for of_file in self.manifest.entries
            for entry in of_file
            if names is None or entry.tensor in names
        ]
        with reading(self.path):
            verify_entries(self.path, self.manifest, chosen)

    def require_fit(self, parts: Mapping[str, Part]) -> None:
        """Check that the checkpoint has the tensors of parts, with their dtypes and shapes.

        Raises:
            CheckpointError: If it has not; names the tensors.
        """
        if missing := parts.keys() - self.manifest.tensors.keys():
            raise CheckpointError(f"the checkpoint lacks {listed(missing)}")
        for name, part in parts.items():
            if error := _misfit(part, self.manifest.tensors[name]):
                raise CheckpointError(f"tensor {name}: {error}")

    def fill(self, parts: Mapping[str, Part]) -> None:
        """Fill parts with values from the checkpoint, whatever boxes were saved.

        Each chunk that is needed is read once.

        Args:
            parts: Parts to fill, by name of the tensor; see :meth:`require_fit`.

        Raises:
            CheckpointError: If a chunk cannot be read or differs from its hash; some parts may be
                filled then.
        """
        wanted = [
            entry for of_file in self.manifest.entries for entry in of_file if entry.tensor in parts
        ]
        with torch.no_grad(), reading(self.path), opened_directory(self.path) as directory:
            for entry in wanted:
                part = parts[entry.tensor]
                if both := part.box.overlap(entry.chunk.box):
                    self._on_read()
                    values = self._read(directory, entry, problem=_CHANGED)
                    part.local[both.within(part.box)] = values[both.within(entry.chunk.box)]

    def chunk(self, tensor: str, offsets: tuple[int, ...]) -> Tensor:
        """Return one saved chunk, in new memory.

        Raises:
            CheckpointError: If the chunk cannot be read or differs from its hash.
        """
        dtype, shape, chunks = self.manifest.tensors[tensor]
        chunk = next(chunk for chunk in chunks if chunk.offsets == offsets)
        with reading(self.path), opened_directory(self.path) as directory:
            entry = Entry.of(tensor, dtype, shape, chunk)
            return self._read(directory, entry, problem="is not what was saved").clone()

    def _read(self, directory: int, entry: Entry, *, problem: str) -> Tensor:
        """Return a saved chunk, in memory that the next call overwrites."""
        file, nbytes = entry.chunk.file, entry.nbytes
        name = self.manifest.files[file].name
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        begin = len(self.manifest.headers[file]) + entry.chunk.begin
        with opened(directory, name) as descriptor:
            found = hash_span(descriptor, begin, nbytes, memoryview(self._buffer), keep=True)
        if found != entry.chunk.sha256:
            raise CheckpointError(f"{self.path}/{name}: tensor {entry.key} {problem}")
        values = torch.frombuffer(self._buffer, dtype=torch.uint8)[:nbytes]
        return values.view(DTYPES[entry.dtype]).reshape(entry.chunk.sizes)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise errors of a checkpoint, or of reading it, as CheckpointError in one line."""
    try:
        yield
    except DamageError as damage:
        raise CheckpointError(f"{path}: {damage}") from None
    except OSError as error:
        raise failed("read", path, error) from None


def read_manifest(path: Path, *, decoded: Mapping[bytes, Manifest] | None = None) -> Manifest:
    """Read and check the manifest of a checkpoint; its files are not opened.

    Args:
        path: Directory of the checkpoint.
        decoded: Manifests that were decoded before, by their text.

    Raises:
        DamageError: If the manifest is missing or damaged.
        OSError: If this process cannot read it, which does not show damage.
    """
    try:
        with opened_directory(path) as directory:
            digest = read_whole(directory, DIGEST, limit=1024)
            text = read_whole(directory, MANIFEST, limit=MAX_MANIFEST_BYTES)
    except OSError as error:
        raise _damage_or(error, MANIFEST) from None
    if digest != digest_line(text):
        raise DamageError(f"{MANIFEST} does not match {DIGEST}")
    return decoded[text] if decoded and text in decoded else decode(text)


def verify_entries(
    path: Path,
    manifest: Manifest,
    entries: Iterable[Entry],
    *,
    on_entry: Callable[[], object] = lambda: None,
) -> None:
    """Check chunks, and the size and header of their files.

    Args:
        path: Directory of the checkpoint.
        manifest: Decoded manifest of the checkpoint.
        entries: Chunks to check.
        on_entry: Function that is called before each chunk.

    Raises:
        DamageError: If one is damaged; names the file, and the tensor if the damage is in one.
        OSError: If this process cannot read a file, which does not show damage.
    """
    by_file: dict[int, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_file[entry.chunk.file].append(entry)
    buffer = memoryview(bytearray(PIECE_BYTES))
    with opened_directory(path) as directory:
        for file, inside in by_file.items():
            (name, nbytes), header = manifest.files[file], manifest.headers[file]
            try:
                with opened(directory, name) as descriptor:
                    _check_header(descriptor, name, header, nbytes)
                    for entry in inside:
                        on_entry()
                        begin = len(header) + entry.chunk.begin
                        found = hash_span(descriptor, begin, entry.nbytes, buffer)
                        if found != entry.chunk.sha256:
                            raise DamageError(
                                f"{name}: tensor {entry.key} is damaged (its SHA-256 differs)"
                            )
            except OSError as error:
                raise _damage_or(error, name) from None


def listed(names: Iterable[str]) -> str:
    """Return names of tensors for a message: the first ones, and the number of others."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 8} more" if len(ordered) > 8 else ""
    return f"tensors {', '.join(ordered[:8])}{more}"


def _misfit(part: Part, saved: SavedTensor) -> str | None:
    if part.local.dtype != DTYPES[saved.dtype]:
        return (
            f"dtype ({part.local.dtype}) must equal that of the checkpoint ({DTYPES[saved.dtype]})"
        )
    if part.shape != saved.shape:
        return f"shape ({list(part.shape)}) must equal that of the checkpoint ({list(saved.shape)})"
    return None


def _check_header(descriptor: int, name: str, header: bytes, nbytes: int) -> None:
    size = os.fstat(descriptor).st_size
    if size != nbytes:
        raise DamageError(f"{name}: size ({size} bytes) must equal {nbytes} bytes")
    found = bytearray(len(header))
    read_into(descriptor, memoryview(found))
    if found != header:
        raise DamageError(f"{name}: the header is damaged or of another save")


def _damage_or(error: OSError, name: str) -> Exception:
    """Return an error of the medium as damage, and errors of permissions or processes as given."""
    if error.errno == errno.EIO:
        return DamageError(f"{name}: {error.strerror}")
    return error
