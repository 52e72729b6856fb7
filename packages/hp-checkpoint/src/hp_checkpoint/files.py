"""Files of a checkpoint: opened without following links, hashed and written in pieces.

A checkpoint may come from a stranger: the name of a file may be a link to the reader's own files, a
pipe that blocks for ever, or a device. So every name in it is opened from the descriptor of its
directory without following links, and must be a regular file.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import torch
from torch import Tensor

from hp_base.atomic_write import names_in, try_lock
from hp_base.errors import CheckpointError
from hp_base.folder import DamageError, open_directory, opened_directory, read_into

PIECE_BYTES = 1 << 20
"""Bytes that are read, hashed or written at a time, so that they stay in the processor's cache."""


def failed(verb: str, path: Path, error: OSError) -> CheckpointError:
    """Return an error of the storage as a CheckpointError of one line."""
    return CheckpointError(f"cannot {verb} {path}: {error.strerror or error}")


@contextmanager
def opened_parent(directory: Path) -> Iterator[int]:
    """Yield the descriptor of the directory that contains checkpoints.

    Raises:
        CheckpointError: If it is missing, a symbolic link or no directory.
    """
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(opened_directory(directory))
        except DamageError as damage:
            raise CheckpointError(f"{directory}: {damage}") from None
        yield descriptor


def hash_span(
    descriptor: int, begin: int, nbytes: int, buffer: memoryview, *, keep: bool = False
) -> str:
    """Return the SHA-256 of a part of a file, as far as the file goes.

    Args:
        descriptor: Descriptor of the file.
        begin: First byte.
        nbytes: Number of bytes.
        buffer: Buffer for the bytes.
        keep: Whether to keep all bytes in the buffer, which must be long enough.
    """
    hasher, piece_bytes = hashlib.sha256(), min(PIECE_BYTES, len(buffer) or 1)
    for start in range(0, nbytes, piece_bytes):
        at = start if keep else 0
        piece = buffer[at : at + min(piece_bytes, nbytes - start)]
        count = read_into(descriptor, piece, begin + start)
        hasher.update(piece[:count])
        if count < len(piece):
            break
    return hasher.hexdigest()


@contextmanager
def created(path: str | Path, directory: int | None = None) -> Iterator[int]:
    """Make a new file, yield its descriptor, and flush it to the disk at the end.

    Args:
        path: Path of the new file.
        directory: Descriptor of the directory to which a relative path refers; None: the
            working directory.

    Raises:
        FileExistsError: If the file exists.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(path, flags, 0o644, dir_fd=directory)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(descriptor: int, data: memoryview) -> None:
    """Write all of `data` at the current position."""
    while data:
        data = data[os.write(descriptor, data) :]


def write_tensor(descriptor: int, values: Tensor) -> str:
    """Write the bytes of a tensor on any device in row-major order; return their SHA-256."""
    flat = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    hasher = hashlib.sha256()
    # Through a bytearray: memory of a tensor is accessible only with NumPy, which may be missing.
    piece = bytearray(min(PIECE_BYTES, len(flat)))
    for start in range(0, len(flat), PIECE_BYTES):
        part = flat[start : start + PIECE_BYTES]
        torch.frombuffer(piece, dtype=torch.uint8)[: len(part)] = part
        data = memoryview(piece)[: len(part)]
        hasher.update(data)
        write(descriptor, data)
    return hasher.hexdigest()


def fsync_directory(path: Path) -> None:
    """Flush the entries of a directory to the disk."""
    with opened_directory(path) as descriptor:
        os.fsync(descriptor)


def staging_name(name: str) -> str:
    """Return a unique name for a directory while it is written or removed."""
    return f"{name}.tmp-{uuid4().hex}"


def create_staging(directory: Path, name: str) -> tuple[Path, int]:
    """Make the directory that a checkpoint is written to before it gets its name.

    Args:
        directory: Directory of the checkpoint; made if it is missing, in an existing one.
        name: Name that the checkpoint will have.

    Returns:
        Path of the new directory, and a descriptor; until it is closed, the directory is not taken
        for a leftover.
    """
    with suppress(FileExistsError):
        directory.mkdir()
    path = directory / staging_name(name)
    with opened_parent(directory) as parent:
        os.mkdir(path.name, dir_fd=parent)
        lock = open_directory(path.name, parent)
    # Without locks of the file system, a second run in the same directory would remove this one as
    # a leftover, and the save would fail.
    try_lock(lock)
    return path, lock


def rename(path: Path, name_of: Callable[[set[str]], str]) -> Path:
    """Rename a directory inside of its parent, and flush the new name to the disk.

    Args:
        path: Path of the directory.
        name_of: Function that returns the new name, from those that are taken.

    Returns:
        The new path.
    """
    with opened_parent(path.parent) as directory:
        name = name_of(set(names_in(directory)))
        os.rename(path.name, name, src_dir_fd=directory, dst_dir_fd=directory)
        os.fsync(directory)
    return path.with_name(name)


def remove_leftovers(directory: Path, is_leftover: Callable[[str], object]) -> list[str]:
    """Remove directories that dead processes left while they saved or removed checkpoints.

    Args:
        directory: Directory of checkpoints; it need not exist.
        is_leftover: Function that recognizes names of :func:`staging_name`.

    Returns:
        Names of the removed directories.
    """
    if not os.path.lexists(directory):
        return []
    removed = []
    with opened_parent(directory) as parent:
        for name in filter(is_leftover, names_in(parent)):
            if not _is_locked(name, parent):
                shutil.rmtree(name, ignore_errors=True, dir_fd=parent)  # follows no link
                removed.append(name)
    return removed


def _is_locked(name: str, parent: int) -> bool:
    try:
        with opened_directory(name, parent) as descriptor:
            return not try_lock(descriptor)
    except (OSError, DamageError):
        return False
