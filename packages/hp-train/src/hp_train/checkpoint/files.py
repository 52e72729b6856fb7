"""Files of a checkpoint: written in a stream, put on the disk, hashed in pieces."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from hp_train.folder import read_into

PIECE_BYTES = 1 << 20
"""Read, hashed or written at a time: stays in the processor's cache between the two."""


class Hash(Protocol):
    """What hashlib returns."""

    def update(self, data: memoryview, /) -> None:
        """Take in more bytes."""

    def hexdigest(self) -> str:
        """Digest of all bytes taken in."""


@contextmanager
def created(path: str | Path, directory: int | None = None) -> Iterator[int]:
    """Make a new file, give its descriptor, and put it on the disk before closing it.

    Args:
        path: Of the file.
        directory: Descriptor of the one that a relative path begins in.

    Raises:
        FileExistsError: If it is there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    descriptor = os.open(path, flags, 0o644, dir_fd=directory)
    try:
        yield descriptor
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(descriptor: int, data: memoryview, hasher: Hash | None = None) -> None:
    """Write all of `data`, and let `hasher` see it while it is still in the cache."""
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        if hasher is not None:
            hasher.update(piece)
        while piece:
            piece = piece[os.write(descriptor, piece) :]


def fsync_directory(path: Path) -> None:
    """Put the names in a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_and_hash(descriptor: int, buffer: memoryview) -> str:
    """Fill `buffer` from the current position; SHA-256 of what was read."""
    hasher = hashlib.sha256()
    for start in range(0, len(buffer), PIECE_BYTES):
        piece = buffer[start : start + PIECE_BYTES]
        hasher.update(piece[: read_into(descriptor, piece)])
    return hasher.hexdigest()


def hash_span(descriptor: int, *, begin: int, nbytes: int, buffer: memoryview) -> str:
    """SHA-256 of a part of a file; of what there is if the file ends before."""
    os.lseek(descriptor, begin, os.SEEK_SET)
    hasher = hashlib.sha256()
    while nbytes > 0:
        piece = buffer[: min(nbytes, len(buffer))]
        count = read_into(descriptor, piece)
        if count == 0:
            break
        hasher.update(piece[:count])
        nbytes -= count
    return hasher.hexdigest()
