"""Text to train on: files, folders, jsonl, or the running Python's standard library.

Files are read in pieces that are cut at ends of lines, by a rule that depends on the file alone, so
that any number of processes reads the same text, and no file needs to be in memory as a whole.
"""

import codecs
import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from hp_base.errors import DataError
from hp_base.folder import open_named, read_span

# Third-party packages and megabytes of test tables, which are not the library's own code and prose.
_SKIPPED_PARTS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_LINE_SUFFIXES = (".jsonl", ".ndjson", ".json")
_TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", *_LINE_SUFFIXES[:2])
_NO_TEXT = {".csv": "a table", ".tsv": "a table", ".parquet": "a table", ".arrow": "a table"}
_TO_LINES = "make a .jsonl file of it, in which every line is an object with a string under 'text'"
_PROSE = (".py", ".md", ".rst")  # may begin with anything
_JSON = re.compile(rb'\s*\[?\s*\{\s*"(?:[^"\\]|\\.)*"\s*:')
_NO_LINES = {re.compile(rb"\s*\["): "an array", re.compile(rb"\s*\{\s*\n"): "spread over lines"}
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
"""Bytes of text that are in memory at a time, unless a line is longer."""


class Source(NamedTuple):
    """A file of text.

    Attributes:
        path: Path of the file.
        size: Size in bytes when the file was found.
        kind: Kind of the file: one document; a document per line of JSON; or Python's own source,
            in which bytes that are not UTF-8 are replaced.
    """

    path: str
    size: int
    kind: Literal["text", "jsonl", "library"]


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


class _Line(msgspec.Struct):
    """A line of jsonl, of which only the text is read."""

    text: str


_decode_line = msgspec.json.Decoder(_Line).decode


def find_sources(paths: Sequence[str]) -> Iterator[Source]:
    """Yield the files of paths, in the order given; without paths those of Python's library.

    A folder is read recursively in the order of names: files ending in .py, .txt, .md, .rst, .jsonl
    and .ndjson, and files ending in .json with a document in their first line.

    Raises:
        DataError: If a file or folder cannot be read, a folder has no text or a link to a folder,
            or the name of a file is that of a table.
    """
    if not paths:
        yield from _standard_library()
    for given in map(Path, paths):
        found = _files_below(given)[0] if given.is_dir() else [given]
        for path in found:
            yield _source(path, _kind_of(path))
        if not found:
            suffixes = " ".join(_TEXT_SUFFIXES)
            raise DataError(f"data.paths: {printable(given)} must have files of text ({suffixes})")


def left_out(paths: Sequence[str]) -> str:
    """Return a message with the numbers of files in folders that are not read, by suffix.

    It is empty if all files are read.

    Raises:
        DataError: When a folder cannot be read.
    """
    counts = Counter(
        path.suffix.lower() or "no suffix"
        for given in map(Path, paths)
        if given.is_dir()
        for path in _files_below(given)[1]
    )
    listed = ", ".join(
        f"{printable(name)} ({count})" for name, count in counts.most_common(_OPENED)
    )
    more = f" and {len(counts) - _OPENED} kinds more" if len(counts) > _OPENED else ""
    return (
        f"files of data.paths that are left out, no text by their names: {listed}{more}"
        if counts
        else ""
    )


def look_at(paths: Sequence[str]) -> None:
    """Check that the beginnings of some files are text, before anything starts.

    Reads at most 64 KiB of eight files of each path, and lists at most a thousand files.

    Raises:
        DataError: About the first error that is found.
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
    """Yield the pieces of a file, in order; an empty file has none."""
    for begin in range(0, source.size, PIECE_BYTES):
        yield Piece(source, begin, min(begin + PIECE_BYTES, source.size))


def read_piece(piece: Piece) -> tuple[int, bytes]:
    """Return the first byte of a piece, and its bytes.

    Raises:
        DataError: When the file cannot be read, or has become shorter.
    """
    source = piece.source
    with opened_source(source.path) as descriptor:
        begin, end = (_cut(descriptor, at, source) for at in (piece.begin, piece.end))
        raw = read_span(descriptor, begin, max(begin, end))
        if len(raw) < end - begin:
            raise DataError(f"{printable(source.path)} became shorter while it was read")
    return begin, raw


def texts_of(source: Source, begin: int, raw: bytes) -> Iterator[str]:
    """Yield the texts in a piece: of a jsonl file one per line that is not blank, else one.

    Args:
        source: File of the piece.
        begin: First byte of the piece in the file.
        raw: Bytes of the piece.

    Raises:
        DataError: If the piece is not text; names file and line, or byte.
    """
    if begin == 0:
        raw = raw.removeprefix(codecs.BOM_UTF8)
        _require_kind(source, raw)
    if source.kind != "jsonl":
        yield _plain_text(source, begin, raw)
        return
    for number, line in enumerate(raw.split(b"\n")):
        if line.strip():
            yield _text_of_line(source, begin, number, line)


def printable(path: str | Path) -> str:
    """Return a path for a message of one line."""
    return "".join(c if c.isprintable() else "?" for c in str(path))


def _standard_library() -> Iterator[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        # Debian links to a file that may be gone.
        if path.is_file() and not _SKIPPED_PARTS.intersection(path.relative_to(root).parts):
            yield _source(path, "library")


def _kind_of(path: Path) -> Literal["text", "jsonl"]:
    """Return the kind of a file, by its name.

    Raises:
        DataError: If the name is not that of text.
    """
    suffix = path.suffix.lower()
    if suffix in _NO_TEXT:
        raise DataError(
            f"data.paths: {printable(path)} must be text, and is {_NO_TEXT[suffix]}: {_TO_LINES}"
        )
    return "jsonl" if suffix in _LINE_SUFFIXES else "text"


def _files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files of text below a folder, sorted by name, and all other files.

    Raises:
        DataError: If a folder cannot be read, or is a link, which may lead anywhere, also back.
    """
    found: list[Path] = []
    others: list[Path] = []
    try:
        for parent, folders, names in os.walk(folder, onerror=_raise):
            for link in (Path(parent, name) for name in folders):
                if link.is_symlink():
                    raise DataError(
                        f"data.paths: {printable(link)} must not be a link to a folder: name that "
                        "folder in data.paths as well, and remove the link"
                    )
            for path in (Path(parent, name) for name in names):
                (found if _is_text(path) else others).append(path)
    except OSError as error:
        raise DataError(f"data.paths: cannot read {printable(folder)}: {error.strerror}") from None
    return sorted(found), others


def _is_text(path: Path) -> bool:
    """Tell whether a file of a folder is read; a .json file is if it has a document per line."""
    if path.suffix.lower() != ".json":
        return path.suffix.lower() in _TEXT_SUFFIXES
    try:
        with opened_source(str(path)) as descriptor:
            first = os.pread(descriptor, _SCAN_BYTES, 0).removeprefix(codecs.BOM_UTF8).lstrip()
        _decode_line(first.split(b"\n", 1)[0])
    except (DataError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return True


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
def opened_source(path: str) -> Iterator[int]:
    """Yield the descriptor of a regular file, without waiting for a pipe in its place."""
    try:
        with os.fdopen(open_named(Path(path)), "rb") as file:
            yield file.fileno()
    except OSError as error:
        raise DataError(f"data.paths: cannot read {printable(path)}: {error.strerror}") from None
    except ValueError:  # of `open_named`
        raise DataError(
            f"data.paths: {printable(path)} must be a regular file or a folder"
        ) from None


def _cut(descriptor: int, at: int, source: Source) -> int:
    """Return the first beginning of a line from a byte on; without lines, that of a character."""
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
    return plain_lines(text)


def plain_lines(text: str) -> str:
    """Return the text with a newline at the end of each line, as on any system."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _require_kind(source: Source, raw: bytes) -> None:
    """Check that JSON is a document per line, and is not read as plain text.

    Raises:
        DataError: If it is not; says what to do.
    """
    name, suffix = printable(source.path), Path(source.path).suffix.lower()
    if suffix == ".json":
        for beginning, kind in _NO_LINES.items():
            if beginning.match(raw):
                raise DataError(
                    f"{name} must be an object of JSON per line, and is {kind}: {_TO_LINES}"
                )
    if source.kind == "text" and suffix not in _PROSE and _JSON.match(raw):
        raise DataError(f"{name} must be plain text, and is JSON: {_TO_LINES}")


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
    with opened_source(source.path) as descriptor:
        reads = (
            os.pread(descriptor, min(PIECE_BYTES, end - begin), begin)
            for begin in range(0, end, PIECE_BYTES)
        )
        return sum(read.count(b"\n") for read in reads)


def _look_at_beginning(source: Source) -> None:
    with opened_source(source.path) as descriptor:
        raw = os.pread(descriptor, _SCAN_BYTES, 0)
    if len(raw) < source.size:  # whole lines, or whole characters
        whole = raw[: raw.rfind(b"\n") + 1]
        is_cut = source.kind == "jsonl" or whole
        raw = whole if is_cut else raw[: len(raw) - _cut_off(raw)]
    for _ in texts_of(source, 0, raw):
        pass


def _cut_off(raw: bytes) -> int:
    """Return the number of bytes of an incomplete character at the end."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(raw)
    return len(decoder.getstate()[0])
