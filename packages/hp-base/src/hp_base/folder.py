"""Folders held open by descriptor, in which links are not followed and pipes do not block.

A run directory may come from a stranger: the name of a log may be a link to the reader's own files,
a pipe that blocks for ever, or a device. So the path that a user gives is opened once, and may be
or lead through a link; every name below it is opened from that descriptor without following links,
and must be a regular file or a directory. A file is always written as a new file that replaces the
old one, so that another name of the old file (a hard link) does not change.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from hp_base.atomic_write import (
    closed_at_end,
    names_in,
    new_unfinished,
    remove_unfinished,
    replacing,
)
from hp_base.errors import RunDirectoryError

MOST_BYTES = 1 << 26
"""Largest file that is read as a whole, by default."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# Without O_NONBLOCK a named pipe would block for ever.
_NO_TRAPS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class DamageError(Exception):
    """A file or folder must not be used; the message of one line says why."""


class Folder:
    """An open directory, which stays the same if its name changes; a context that closes it.

    Names are names of its entries, without slashes. Every method may raise RunDirectoryError, in
    one line with the path, if an entry is of the wrong kind, or the storage failed.

    Attributes:
        path: Path by which it was opened, for messages.
        descriptor: File descriptor of the directory.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self.descriptor = path, descriptor

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open the directory that a user named, which may be a link to one."""
        try:
            return cls(path, os.open(path, _DIRECTORY))
        except OSError as error:
            raise RunDirectoryError(f"cannot open {path}: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self.descriptor)

    @property
    def is_here(self) -> bool:
        """Tell whether its path still leads to it: it was neither removed nor renamed."""
        try:
            there = self.path.stat()
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self.descriptor))

    @property
    def gone(self) -> str:
        """Return the message for a directory that was removed or renamed."""
        return f"the run directory ({self.path}) is gone: it was removed or renamed"

    def sub(self, name: str, *, make: bool = False) -> "Folder":
        """Open a directory in it.

        Args:
            name: Name of the directory.
            make: Whether it is made if it is missing.
        """
        with self._told("open", name):
            if make:
                with suppress(FileExistsError):
                    os.mkdir(name, dir_fd=self.descriptor)
            return Folder(self.path / name, open_directory(name, self.descriptor))

    def has(self, name: str) -> bool:
        """Tell whether there is anything of that name."""
        return self._about(name) is not None

    def size(self, name: str) -> int | None:
        """Return the bytes of the entry with that name; None if there is none."""
        about = self._about(name)
        return None if about is None else about.st_size

    def require_file(self, name: str) -> None:
        """Raise RunDirectoryError if an entry with that name exists and is not a regular file."""
        about = self._about(name)
        if about is not None and not stat.S_ISREG(about.st_mode):
            raise RunDirectoryError(f"{self.path / name} must be a regular file")

    def require_files(self) -> None:
        """Raise RunDirectoryError if any entry is not a regular file."""
        with self._told("list", ""):
            names = names_in(self.descriptor)
        for name in names:
            self.require_file(name)

    def open_file(self, name: str, flags: int = os.O_RDONLY, *, mode: int = 0o666) -> int:
        """Return the descriptor of a regular file; see :func:`open_file`."""
        with self._told("open", name):
            return open_file(self.descriptor, name, flags, mode=mode)

    def read(self, name: str, *, limit: int) -> bytes:
        """Return all bytes of a small file."""
        with self._told("read", name):
            return read_whole(self.descriptor, name, limit=limit)

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""
        with self._told("remove", name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.descriptor)

    def fresh(self, name: str) -> IO[bytes]:
        """Make an empty file for reading and writing, in place of one with the same name."""
        with self._told("write", name):
            self.require_file(name)
            draft, file = new_unfinished(self.descriptor, name)
            os.rename(draft, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)
            return file

    @contextmanager
    def replacing(self, name: str) -> Iterator[IO[bytes]]:
        """Yield a new file that gets its name at the end: see `hp_base.atomic_write.replacing`."""
        with self._told("write", name):
            self.require_file(name)
            with replacing(self.descriptor, name) as file:
                yield file

    def replace(self, name: str, content: bytes) -> None:
        """Write a file in one step: see :meth:`replacing`."""
        with self.replacing(name) as file:
            file.write(content)
        file.close()

    def remove_unfinished(self) -> None:
        """Remove the unfinished files of dead writers."""
        with self._told("list", ""):
            remove_unfinished(self.descriptor)

    def _about(self, name: str) -> os.stat_result | None:
        with self._told("look at", name):
            try:
                return os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
            except FileNotFoundError:
                return None

    @contextmanager
    def _told(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except DamageError as damage:
            raise RunDirectoryError(f"{self.path}: {damage}") from None
        except OSError as error:
            path = self.path / name
            raise RunDirectoryError(f"cannot {verb} {path}: {error.strerror}") from None


def open_directory(path: str | Path, parent: int | None = None) -> int:
    """Return the descriptor of a directory.

    Raises:
        DamageError: If it is missing, a symbolic link or no directory.
    """
    name = "the directory" if parent is None else str(path)
    try:
        return os.open(path, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        raise DamageError(f"{name} is missing") from None
    except OSError as error:  # macOS has a word of its own for a link
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        which = "" if parent is None else f"{path} "
        raise DamageError(f"{which}must be a directory and no symbolic link") from None


def opened_directory(path: str | Path, parent: int | None = None) -> AbstractContextManager[int]:
    """Open a directory as :func:`open_directory`, for a context."""
    return closed_at_end(open_directory(path, parent))


def open_file(directory: int, name: str, flags: int = os.O_RDONLY, *, mode: int = 0o666) -> int:
    """Return the descriptor of a regular file in an open directory.

    Args:
        directory: Descriptor of the directory.
        name: Name of the file in it.
        flags: As `os.open` takes them.
        mode: Permission bits of a file that is made, less the umask.

    Raises:
        DamageError: If it is missing, a symbolic link, or anything else but a regular file.
    """
    try:
        descriptor = os.open(name, flags | _NO_TRAPS, mode, dir_fd=directory)
    except FileNotFoundError:
        raise DamageError(f"{name} is missing") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EOPNOTSUPP):
            raise
        raise DamageError(f"{name} must be a regular file") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamageError(f"{name} must be a regular file")
    return descriptor


def opened(directory: int, name: str) -> AbstractContextManager[int]:
    """Open a file for reading as :func:`open_file`, for a context."""
    return closed_at_end(open_file(directory, name))


def read_whole(directory: int, name: str, *, limit: int) -> bytes:
    """Return all bytes of a small file.

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


def open_named(path: Path) -> int:
    """Return the descriptor of a regular file that a user names, which may be a link to one.

    Pipes, which may block, and devices, which have no end, are refused.

    Raises:
        OSError: When it cannot be opened.
        ValueError: When it is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    return descriptor


def read_named(path: Path, *, limit: int = MOST_BYTES) -> bytes:
    """Return all bytes of a file that a user names; see `open_named`.

    Args:
        path: Path of the file.
        limit: Most bytes that it may have.

    Raises:
        OSError: When it cannot be read.
        ValueError: When it is not a regular file, or longer than `limit`.
    """
    with os.fdopen(open_named(path), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it must be at most {limit} bytes long")
    return content


def why_not(error: Exception) -> str:
    """Return the reason why a file cannot be read or parsed, in words that fit into a line."""
    told = error.strerror if isinstance(error, OSError) else None
    return " ".join((told or str(error)).split())[:120]


def read_span(descriptor: int, begin: int, end: int) -> bytes:
    """Return the bytes of a part of a file; fewer where the file ends before."""
    data = os.pread(descriptor, end - begin, begin)
    while len(data) < end - begin:
        more = os.pread(descriptor, end - begin - len(data), begin + len(data))
        if not more:
            break
        data += more
    return data


def read_into(descriptor: int, buffer: memoryview, position: int = 0) -> int:
    """Fill a buffer from a file, as far as the file has bytes.

    Args:
        descriptor: Descriptor of the file.
        buffer: Buffer for the bytes.
        position: Position in the file of the first byte.

    Returns:
        Number of bytes that were read.
    """
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], position + done)
        if count == 0:
            break
        done += count
    return done
