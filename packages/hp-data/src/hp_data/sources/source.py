"""A file to read, a part of it, and its bytes, here or in object storage."""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hp_base.errors import DataError
from hp_base.folder import open_named, read_span

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

LONGEST = 1 << 28
"""Most bytes of a line, a record or a document that is read as a whole."""
SCAN_BYTES = 1 << 16
"""Bytes that are read to see what a file is."""
_LISTED = 12


class Source(NamedTuple):
    """A file of text.

    Attributes:
        path: Path of the file, or its address in object storage.
        size: Size in bytes when the file was found.
        kind: Format of the file, such as "text", one document; "jsonl", a document per line of
            JSON; "library", Python's own source, in which bytes that are not UTF-8 are replaced.
            What it is compressed by follows a dot: "jsonl.gz".
        field: Name of the column or key with the text; empty: see `choose_column`.
    """

    path: str
    size: int
    kind: str
    field: str = ""

    @property
    def format(self) -> str:
        """Return the format of what is compressed, or of the file itself."""
        return self.kind.partition(".")[0]

    @property
    def compression(self) -> str:
        """Return what the file is compressed by; empty: nothing."""
        return self.kind.partition(".")[2]

    @property
    def is_plain(self) -> bool:
        """Tell whether any range of its bytes can be read as text or lines by itself."""
        return self.kind in {"text", "jsonl", "library"}


class Piece(NamedTuple):
    """The lines of a source that begin in a range of bytes.

    Attributes:
        source: File of the piece.
        begin: First byte of the range.
        end: One past the last byte of the range.
    """

    source: Source
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        """Tell whether the file ends with it."""
        return self.end >= self.source.size

    @property
    def is_whole(self) -> bool:
        """Tell whether it is the whole file."""
        return self.begin == 0 and self.is_last


class Opened(Protocol):
    """Bytes that are read at any place."""

    @property
    def size(self) -> int:
        """Return the number of bytes, as far as it is known."""

    def reaches(self, at: int) -> bool:
        """Tell whether there is a byte at a place."""

    def span(self, begin: int, end: int) -> bytes:
        """Return the bytes of a range; fewer where they end before."""


class _LocalFile:
    """A regular file of this machine, as `Opened`."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor, self.size = descriptor, size

    def reaches(self, at: int) -> bool:
        return at < self.size

    def span(self, begin: int, end: int) -> bytes:
        return read_span(self._descriptor, begin, end)


class AsFile(io.RawIOBase):
    """Gives opened bytes to libraries that read a file object of Python."""

    def __init__(self, opened: Opened) -> None:
        super().__init__()
        self._opened, self._at = opened, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the place that is read next."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place, and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._opened.size}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill a buffer with the next bytes, and return how many there were."""
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._opened.size)
        data = self._opened.span(self._at, end) if end > self._at else b""
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def is_remote(path: str) -> bool:
    """Tell whether a path is an address in object storage."""
    return "://" in path


def printable(path: str | Path) -> str:
    """Return a path for a message of one line."""
    return "".join(c if c.isprintable() else "?" for c in str(path))


def why(error: BaseException) -> str:
    """Return the reason of an error of a library, for a message of one line."""
    if isinstance(error, MemoryError):
        return "it takes more memory than a file of text should"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return printable(" ".join((text or type(error).__name__).split()))[:200]


@contextmanager
def opened_source(path: str, size: int | None = None) -> Iterator[Opened]:
    """Yield the bytes of a regular file, without waiting for a pipe in its place.

    Args:
        path: Path of the file, or its address in object storage.
        size: Bytes of it that are read; None: all.
    """
    if is_remote(path):
        # A library of a cloud is loaded where one is named, and this module is below that one.
        remote = importlib.import_module("hp_data.sources.remote")
        yield remote.opened(path, size)
        return
    try:
        file = os.fdopen(open_named(Path(path)), "rb")
    except OSError as error:
        raise _not_read(path, error) from None
    except ValueError:  # of `open_named`, or of a path that is none
        raise DataError(
            f"data.paths: {printable(path)} must be a regular file or a folder"
        ) from None
    with file:
        try:
            found = os.fstat(file.fileno()).st_size if size is None else size
            yield _LocalFile(file.fileno(), found)
        except OSError as error:
            raise _not_read(path, error) from None


def _not_read(path: str, error: OSError) -> DataError:
    return DataError(f"data.paths: cannot read {printable(path)}: {error.strerror}")


def extra(module: str, name: str, path: str) -> ModuleType:
    """Return a module that an extra of this package installs.

    Raises:
        DataError: If it is not installed; says what to install.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(
            f"{printable(path)} needs {module.partition('.')[0]}: pip install 'hp-data[{name}]'"
        ) from None


def choose_column(field: str, columns: Sequence[str], texts: Sequence[str]) -> str:
    """Return the name of the column, or of the key, that has the text.

    Args:
        field: Value of ``data.field``; empty: ``text``, or the only column of strings.
        columns: Names of all columns.
        texts: Names of those that have strings.

    Raises:
        ValueError: If there is none, or several; names the columns.
    """
    wanted = field or "text"
    if texts.count(wanted) == 1 == columns.count(wanted):
        return wanted
    if not field and wanted not in columns and len(texts) == 1:
        return texts[0]
    raise ValueError(f"must have strings under {printable(wanted)!r}, {has(columns)}")


def has(columns: Sequence[str]) -> str:
    """Return the end of a message about columns, or keys, of which another is to be named."""
    listed = ", ".join(printable(name)[:40] for name in columns[:_LISTED]) or "nothing"
    more = f" and {len(columns) - _LISTED} more" if len(columns) > _LISTED else ""
    return f"and has {listed}{more}: data.field names the one with the text"


def strings_in(record: Mapping[str, object]) -> list[str]:
    """Return the keys of a record whose values are strings."""
    return [name for name, value in record.items() if isinstance(value, str)]
