"""Files of a checkpoint: written in a stream, opened without following links, hashed in pieces."""

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from hp_train.checkpoint.manifest import DamageError

PIECE_BYTES = 1 << 20
"""Read, hashed or written at a time: stays in the processor's cache between the two."""


class Hash(Protocol):
    """What hashlib returns."""

    def update(self, data: memoryview, /) -> None:
        """Take in more bytes."""

    def hexdigest(self) -> str:
        """Digest of all bytes taken in."""


@contextmanager
def created(path: Path) -> Iterator[int]:
    """Make a new file, give its descriptor, and put it on the disk before closing it.

    Raises:
        FileExistsError: If it is there.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
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


@contextmanager
def opened_directory(path: Path) -> Iterator[int]:
    """Descriptor of a directory.

    Raises:
        DamageError: If it is missing, a symbolic link or no directory.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        raise DamageError("the directory is missing") from None
    except NotADirectoryError:
        raise DamageError("must be a directory and no symbolic link") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def opened(directory: int, name: str) -> Iterator[int]:
    """Descriptor of a regular file in an open directory.

    Raises:
        DamageError: If it is missing, a symbolic link, or anything else but a regular file.
    """
    # Without O_NONBLOCK a named pipe would block for ever.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(name, flags, dir_fd=directory)
    except FileNotFoundError:
        raise DamageError(f"{name} is missing") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise DamageError(f"{name} must be a regular file") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DamageError(f"{name} must be a regular file")
        yield descriptor
    finally:
        os.close(descriptor)


def read_whole(directory: int, name: str, *, limit: int) -> bytes:
    """All bytes of a small file.

    Raises:
        DamageError: If it is missing, not a regular file or longer than `limit`.
    """
    with opened(directory, name) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise DamageError(f"{name} ({size} bytes) must not exceed {limit} bytes")
        data = bytearray(size)
        if read_into(descriptor, memoryview(data)) != size:
            raise DamageError(f"{name} became shorter while it was read")
    return bytes(data)


def read_into(descriptor: int, buffer: memoryview) -> int:
    """Fill `buffer` from the current position; fewer bytes than it holds at the end of the file."""
    done = 0
    while done < len(buffer):
        count = os.readv(descriptor, [buffer[done:]])
        if count == 0:
            break
        done += count
    return done


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
