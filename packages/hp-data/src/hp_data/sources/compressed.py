"""Files read from beginning to end, decompressed in bounded parts, and windows of them."""

import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from hp_base.errors import DataError
from hp_data.sources.source import Opened, Source, extra, printable, why

SUFFIXES = {".gz": "gz", ".zst": "zst", ".xz": "xz"}
"""Name of what compresses, by the end of a file's name."""
_READ_BYTES = 1 << 20
_PART_BYTES = 1 << 18
# Of 2 KiB zstandard makes 64 MiB at most: four bytes for a block of 128 KiB.
_FED_BYTES = 1 << 11
_MEMORY = 1 << 27
_LEAST, _MOST_FOLD = 1 << 26, 500
OnRead = Callable[[int], None]


class _Decompressor(Protocol):
    """A decompressor of one stream.

    Attributes:
        error: Error of damaged data.
    """

    error: type[Exception]

    @property
    def ended(self) -> bool:
        """Tell whether the stream has ended."""

    def parts(self, data: bytes) -> Iterator[bytes]:
        """Yield what more of the stream decompresses to, in bounded parts."""

    def after(self) -> bytes:
        """Return what follows the stream in what was given."""


class _Gzip:
    error: type[Exception] = zlib.error

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)

    @property
    def ended(self) -> bool:
        return self._stream.eof

    def parts(self, data: bytes) -> Iterator[bytes]:
        part = b""
        while data or len(part) == _PART_BYTES:
            part = self._stream.decompress(data, _PART_BYTES)
            data = self._stream.unconsumed_tail
            yield part
            if self.ended:
                return

    def after(self) -> bytes:
        return self._stream.unused_data


class _Xz:
    error: type[Exception] = lzma.LZMAError

    def __init__(self) -> None:
        self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY)

    @property
    def ended(self) -> bool:
        return self._stream.eof

    def parts(self, data: bytes) -> Iterator[bytes]:
        yield self._stream.decompress(data, _PART_BYTES)
        while not (self.ended or self._stream.needs_input):
            yield self._stream.decompress(b"", _PART_BYTES)

    def after(self) -> bytes:
        return self._stream.unused_data


class _Zstandard:
    def __init__(self, path: str) -> None:
        module = extra("zstandard", "zstd", path)
        self.error: type[Exception] = module.ZstdError
        self._stream = module.ZstdDecompressor(max_window_size=_MEMORY).decompressobj()
        self._after = b""

    @property
    def ended(self) -> bool:
        return bool(self._stream.eof)

    def parts(self, data: bytes) -> Iterator[bytes]:
        for begin in range(0, len(data), _FED_BYTES):
            end = begin + _FED_BYTES
            part = self._stream.decompress(data[begin:end])
            for at in range(0, len(part), _PART_BYTES):
                yield part[at : at + _PART_BYTES]
            if self.ended:
                self._after = self._stream.unused_data + data[end:]
                return

    def after(self) -> bytes:
        return self._after


def _decompressor(source: Source) -> _Decompressor:
    match source.compression:
        case "gz":
            return _Gzip()
        case "xz":
            return _Xz()
    return _Zstandard(source.path)


def read_stream(
    source: Source, opened: Opened, *, on_read: OnRead = lambda _: None
) -> Iterator[bytes]:
    """Yield the bytes of a file from beginning to end, decompressed, in parts of 256 KiB at most.

    Args:
        source: File to read.
        opened: Bytes of the file.
        on_read: Function that is called with the number of bytes of the file that were read.

    Raises:
        DataError: If it is damaged, is cut off, or decompresses to far more than text does.
    """
    raw = _raw(source, opened, on_read)
    if not source.compression:
        for part in raw:
            for at in range(0, len(part), _PART_BYTES):
                yield part[at : at + _PART_BYTES]
        return
    name, total = printable(source.path), 0
    for part in _decompressed(source, raw):
        total += len(part)
        if total > _LEAST + _MOST_FOLD * source.size:
            raise DataError(
                f"{name} must be compressed text: its {source.size} bytes are more than {total} "
                f"bytes, and a text is not {_MOST_FOLD} times its {source.compression}"
            )
        yield part


def _raw(source: Source, opened: Opened, on_read: OnRead) -> Iterator[bytes]:
    for begin in range(0, source.size, _READ_BYTES):
        end = min(begin + _READ_BYTES, source.size)
        part = opened.span(begin, end)
        if len(part) < end - begin:
            raise DataError(f"{printable(source.path)} became shorter while it was read")
        on_read(len(part))
        yield part


def _decompressed(source: Source, raw: Iterator[bytes]) -> Iterator[bytes]:
    """Yield what one or more streams, one after the other, decompress to."""
    name, kind = printable(source.path), source.compression
    current = _decompressor(source)
    at, is_first, is_begun = 0, True, False
    try:
        for part in raw:
            at, data = at + len(part), part
            while data := data if is_first or is_begun else data.lstrip(b"\0"):
                is_begun = True
                yield from current.parts(data)
                if not current.ended:
                    break
                data = current.after()
                current, is_first, is_begun = _decompressor(source), False, False
    except (current.error, EOFError, MemoryError) as error:
        raise DataError(f"{name} must be {kind}, and before byte {at}: {why(error)}") from None
    if is_first or is_begun:
        raise DataError(f"{name} must be whole, and its {kind} is cut off at byte {at}")


class Window:
    """A stream as `Opened`, of which the bytes behind a place that moves on are forgotten.

    Args:
        parts: The stream.
    """

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts, self._kept, self._first, self._ended = parts, bytearray(), 0, False

    @property
    def size(self) -> int:
        """Return the number of bytes so far, and of all once `reaches` has returned False."""
        return self._first + len(self._kept)

    def reaches(self, at: int) -> bool:
        """Tell whether the stream has a byte at a place."""
        while self.size <= at and not self._ended:
            part = next(self._parts, None)
            self._ended = part is None
            self._kept += part or b""
        return self.size > at

    def span(self, begin: int, end: int) -> bytes:
        """Return the bytes of a range, none of which was forgotten."""
        self.reaches(end - 1)
        return bytes(self._kept[max(0, begin - self._first) : max(0, end - self._first)])

    def forget(self, before: int) -> None:
        """Free the memory of bytes before a place."""
        count = min(max(0, before - self._first), len(self._kept))
        del self._kept[:count]
        self._first += count


def beginning(source: Source, opened: Opened, size: int) -> tuple[bytes, bool]:
    """Return the first bytes of a file, decompressed, and whether they are all of them."""
    kept = bytearray()
    parts = read_stream(source, opened)
    with suppress(StopIteration):
        while len(kept) <= size:
            kept += next(parts)
        return bytes(kept[:size]), False
    return bytes(kept), True
