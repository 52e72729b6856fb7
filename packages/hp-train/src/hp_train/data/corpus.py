"""Text to train on: files, folders, jsonl, or the running Python's standard library.

Files are read in pieces that are cut at ends of lines, by a rule that looks at the file alone, so
that any number of processes reads the same text, and none of it needs to be in memory as a whole.
"""

import codecs
import os
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from hp_train.base.atomic_write import closed_at_end
from hp_train.base.folder import open_named, read_span
from hp_train.errors import DataError

# Not the library's own prose and code: third-party packages and megabytes of test tables.
_SKIPPED_PARTS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".jsonl")
_SCAN_BYTES = 1 << 16
_LONGEST_LINE = 1 << 28
_LOOKED_AT = 1000
_OPENED = 8
_KINDS_OF_BYTES = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"PAR1": "Parquet",
}

PIECE_BYTES = 1 << 22
"""Text that is in memory at a time, unless a line is longer."""


class Source(NamedTuple):
    """A file of text.

    Attributes:
        path: Where it is.
        size: Size in bytes, when the file was found.
        kind: One document; a document per line of JSON; or Python's own source, in which bytes
            that are not UTF-8 are replaced.
    """

    path: str
    size: int
    kind: Literal["text", "jsonl", "library"]


class Piece(NamedTuple):
    """The lines of a source that begin in a range of bytes.

    Attributes:
        source: The file.
        begin: First byte of the range.
        end: One past its last.
    """

    source: Source
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the file ends with it."""
        return self.end >= self.source.size


class _Line(msgspec.Struct):
    """What a line of jsonl must have; all else is left alone."""

    text: str


_decode_line = msgspec.json.Decoder(_Line).decode


def find_sources(paths: Sequence[str]) -> Iterator[Source]:
    """Files of the given files and folders, in the order given; Python's library if there are none.

    A folder is read recursively in name order, files ending in .py, .txt, .md, .rst and .jsonl.

    Raises:
        DataError: About a file or a folder that cannot be read, and a folder without text.
    """
    if not paths:
        yield from _standard_library()
    for given in map(Path, paths):
        found = _files_below(given) if given.is_dir() else [given]
        for path in found:
            yield _source(path, "jsonl" if path.suffix == ".jsonl" else "text")
        if not found:
            suffixes = " ".join(_TEXT_SUFFIXES)
            raise DataError(f"data.paths: {printable(given)} must have files of text ({suffixes})")


def look_at(paths: Sequence[str]) -> None:
    """Refuse what is no text by a look at the beginnings of some files, before anything starts.

    Reads at most 64 KiB of eight files of each path, and looks for no more than a thousand.

    Raises:
        DataError: About the first thing that is wrong.
    """
    total = 0
    for path in paths:
        opened = 0
        for number, source in enumerate(find_sources([path])):
            total += source.size
            if source.size and opened < _OPENED:
                opened += 1
                _look_at_beginning(source)
            if number >= _LOOKED_AT:
                return
    if paths and not total:
        raise DataError(f"data.paths: {printable(paths[0])} must not be empty")


def pieces_of(source: Source) -> Iterator[Piece]:
    """The pieces of a file, in order; none of an empty one."""
    for begin in range(0, source.size, PIECE_BYTES):
        yield Piece(source, begin, min(begin + PIECE_BYTES, source.size))


def read_piece(piece: Piece) -> tuple[int, bytes]:
    """Where a piece begins, and its bytes.

    Raises:
        DataError: When the file cannot be read, or has become shorter.
    """
    source = piece.source
    with _opened(source.path) as descriptor:
        begin, end = (_cut(descriptor, at, source) for at in (piece.begin, piece.end))
        raw = read_span(descriptor, begin, max(begin, end))
        if len(raw) < end - begin:
            raise DataError(f"{printable(source.path)} became shorter while it was read")
    return begin, raw


def texts_of(source: Source, begin: int, raw: bytes) -> Iterator[str]:
    """The texts in a piece: of a jsonl file one per line that is not blank, else one.

    Args:
        source: The file.
        begin: Where in it the piece begins.
        raw: Its bytes.

    Raises:
        DataError: Naming file and line, or byte, of what is no text.
    """
    if begin == 0:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    if source.kind != "jsonl":
        yield _plain_text(source, begin, raw)
        return
    for number, line in enumerate(raw.split(b"\n")):
        if line.strip():
            yield _text_of_line(source, begin, number, line)


def printable(path: str | Path) -> str:
    """A path for a message of one line."""
    return "".join(c if c.isprintable() else "?" for c in str(path))


def _standard_library() -> Iterator[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not _SKIPPED_PARTS.intersection(path.relative_to(root).parts):
            yield _source(path, "library")


def _files_below(folder: Path) -> list[Path]:
    """Files of text, by name; a folder that cannot be read is an error and not empty."""
    found: list[Path] = []
    try:
        for parent, _, names in os.walk(folder, onerror=_raise):
            found += [Path(parent, name) for name in names if name.endswith(_TEXT_SUFFIXES)]
    except OSError as error:
        raise DataError(f"data.paths: cannot read {printable(folder)}: {error.strerror}") from None
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def _source(path: Path, kind: Literal["text", "jsonl", "library"]) -> Source:
    try:
        about = path.stat()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"data.paths: cannot read {printable(path)}: {reason}") from None
    if not stat.S_ISREG(about.st_mode):
        raise DataError(f"data.paths: {printable(path)} must be a regular file or a folder")
    return Source(str(path), about.st_size, kind)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """Descriptor of a regular file; a pipe that took its place does not block."""
    try:
        with closed_at_end(open_named(Path(path))) as descriptor:
            yield descriptor
    except OSError as error:
        raise DataError(f"data.paths: cannot read {printable(path)}: {error.strerror}") from None
    except ValueError:  # of `open_named`
        raise DataError(
            f"data.paths: {printable(path)} must be a regular file or a folder"
        ) from None


def _cut(descriptor: int, at: int, source: Source) -> int:
    """The first beginning of a line from a byte on; in text without lines, that of a character."""
    if at <= 0 or at >= source.size:
        return max(0, min(at, source.size))
    limit = _LONGEST_LINE if source.kind == "jsonl" else PIECE_BYTES
    for begin in range(at - 1, min(at - 1 + limit, source.size), _SCAN_BYTES):
        found = os.pread(descriptor, _SCAN_BYTES, begin).find(b"\n")
        if found >= 0:
            return min(begin + found + 1, source.size)
    if at - 1 + limit >= source.size:
        return source.size
    if source.kind == "jsonl":
        where = f"{printable(source.path)}: the line at byte {at}"
        raise DataError(f"{where} must not exceed {_LONGEST_LINE} bytes")
    following = os.pread(descriptor, 4, at)
    return at + next((n for n, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


def _plain_text(source: Source, begin: int, raw: bytes) -> str:
    name = printable(source.path)
    try:
        text = raw.decode("utf-8", errors="replace" if source.kind == "library" else "strict")
    except UnicodeDecodeError as error:
        at = begin + error.start
        raise DataError(f"{name} must be UTF-8 text: byte {at} is not{_hint(raw)}") from None
    if "\0" in text:
        raise DataError(f"{name} must be text: it has a byte that is zero{_hint(raw)}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _hint(raw: bytes) -> str:
    kinds = [kind for magic, kind in _KINDS_OF_BYTES.items() if raw.startswith(magic)]
    return f"; it seems to be {kinds[0]}" if kinds else ""


def _text_of_line(source: Source, begin: int, number: int, line: bytes) -> str:
    try:
        text = _decode_line(line).text
    except msgspec.ValidationError:
        problem = "must be an object with a string under 'text'"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = f"not a JSON object: {error}"
    else:
        if "\0" not in text:
            return text
        problem = "must be text: it has a character that is zero"
    number += _lines_before(source, begin) + 1
    raise DataError(f"{printable(source.path)}:{number}: {printable(problem)}{_hint(line)}")


def _lines_before(source: Source, end: int) -> int:
    with _opened(source.path) as descriptor:
        reads = (
            os.pread(descriptor, min(PIECE_BYTES, end - begin), begin)
            for begin in range(0, end, PIECE_BYTES)
        )
        return sum(read.count(b"\n") for read in reads)


def _look_at_beginning(source: Source) -> None:
    with _opened(source.path) as descriptor:
        raw = os.pread(descriptor, _SCAN_BYTES, 0)
    if len(raw) < source.size:  # whole lines, or whole characters
        whole = raw[: raw.rfind(b"\n") + 1]
        is_cut = source.kind == "jsonl" or whole
        raw = whole if is_cut else raw[: len(raw) - _cut_off(raw)]
    for _ in texts_of(source, 0, raw):
        pass


def _cut_off(raw: bytes) -> int:
    """How many bytes at the end belong to a character that goes on."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(raw)
    return len(decoder.getstate()[0])
