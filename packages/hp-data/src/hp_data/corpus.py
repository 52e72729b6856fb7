"""Text to train on: files, folders, patterns, or the running Python's standard library.

Files are read in pieces that are cut at ends of lines, by a rule that depends on the file alone, so
that any number of processes reads the same text, and no file needs to be in memory as a whole.
"""

import codecs
import glob
import os
import re
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from hp_base.errors import DataError
from hp_data.sources import remote
from hp_data.sources.compressed import Window, beginning
from hp_data.sources.formats import (
    COLUMNS,
    IDS,
    READ_IN_FOLDERS,
    documents_of,
    is_read_in_folders,
    kind_of,
    suffixes_of,
)
from hp_data.sources.records import Records
from hp_data.sources.source import (
    LONGEST,
    SCAN_BYTES,
    Opened,
    Piece,
    Source,
    is_remote,
    opened_source,
    printable,
)
from hp_data.sources.token_files import index_of, read_ids

# Third-party packages and megabytes of test tables, which are not the library's own code and prose.
_SKIPPED_PARTS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_TO_LINES = "make a .jsonl file of it, in which every line is an object with a string under 'text'"
_PROSE = (".py", ".md", ".rst")  # may begin with anything
_JSON = re.compile(rb'\s*\[?\s*\{\s*"(?:[^"\\]|\\.)*"\s*:')
_SPREAD = re.compile(rb"\s*\{\s*\n")
_MAGIC = re.compile(r"[*?[]")
_STATE, _SPLITS = "state.json", "dataset_dict.json"
_LARGEST_STATE = 1 << 24
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
    b"ARROW1": "Arrow",
}

PIECE_BYTES = 1 << 22
"""Bytes of text that are in memory at a time, unless a line is longer."""


COLUMN_BYTES = 1 << 25
"""Bytes of a file of columns whose row groups one process reads."""


class Corpus(NamedTuple):
    """The text of a run.

    Attributes:
        paths: Value of ``data.paths``.
        field: Value of ``data.field``.
    """

    paths: Sequence[str]
    field: str

    def sources(self) -> list[Source]:
        """Return all files, see `find_sources`."""
        return list(find_sources(self.paths, self.field))

    def left_out(self) -> str:
        """Return a message about files that are not read, see `left_out`."""
        return left_out(self.paths, self.field)


def find_sources(paths: Sequence[str], field: str = "") -> Iterator[Source]:
    """Yield the files of paths, in the order given; without paths those of Python's library.

    A path with ``*``, ``?`` or ``[`` that is no file is a pattern; ``**`` stands for any folders.
    What it matches comes in the order of names. So do the files of a folder, which is read
    recursively: see `is_read_in_folders`. A folder that `datasets` has saved has the files that its
    state lists.

    Args:
        paths: Files, folders, patterns, and such in object storage.
        field: Name of the column or key with the text; see `Source`.

    Raises:
        DataError: If a file or folder cannot be read, a folder has no text or a link to a folder.
    """
    if not paths:
        yield from _standard_library()
    for path in paths:
        if is_remote(path):
            yield from _remote_sources(path, field)
            continue
        for given in _expanded(path):
            found = _files_below(given, field)[0] if given.is_dir() else [given]
            for each in found:
                yield _source(each, _require_named(each, field), field)
            if not found:
                suffixes = " ".join(READ_IN_FOLDERS)
                raise DataError(
                    f"data.paths: {printable(given)} must have files of text ({suffixes})"
                )


def left_out(paths: Sequence[str], field: str = "") -> str:
    """Return a message with the numbers of files in folders that are not read, by suffix.

    It is empty if all files are read.

    Raises:
        DataError: When a folder cannot be read.
    """
    others = [
        each
        for path in paths
        if not is_remote(path)
        for given in _expanded(path)
        if given.is_dir()
        for each in _files_below(given, field)[1]
    ]
    for path in filter(is_remote, paths):
        names = remote.sizes_below(path)
        others += [Path(name) for name in names if name != path and not _is_read(name)]
    counts = Counter(path.suffix.lower() or "no suffix" for path in others)
    listed = ", ".join(
        f"{printable(name)} ({count})" for name, count in counts.most_common(_OPENED)
    )
    more = f" and {len(counts) - _OPENED} kinds more" if len(counts) > _OPENED else ""
    return (
        f"files of data.paths that are left out, no text by their names: {listed}{more}"
        if counts
        else ""
    )


def look_at(paths: Sequence[str], field: str = "") -> None:
    """Check that the beginnings of some files are text, before anything starts.

    Reads at most 64 KiB of eight files of each path, or the first record, and lists at most a
    thousand files.

    Raises:
        DataError: About the first error that is found.
    """
    total = 0
    for path in paths:
        opened = 0
        for number, source in enumerate(find_sources([path], field)):
            total += source.size
            if (source.size or not source.is_plain) and opened < _OPENED:
                opened += 1
                _look_at_beginning(source)
            if number >= _LOOKED_AT:
                return
    if paths and not total:
        raise DataError(f"data.paths: {printable(paths[0])} must not be empty")


def pieces_of(source: Source) -> Iterator[Piece]:
    """Yield the pieces of a file, in order; an empty file of plain text has none.

    A file that is read from beginning to end is one piece.
    """
    step = PIECE_BYTES
    if not source.is_plain:
        step = COLUMN_BYTES if source.format in COLUMNS else max(1, source.size)
    for begin in range(0, source.size if source.is_plain else max(1, source.size), step):
        yield Piece(source, begin, min(begin + step, source.size))


def read_piece(piece: Piece) -> tuple[int, bytes]:
    """Return the first byte of a piece of plain text, and its bytes.

    Raises:
        DataError: When the file cannot be read, or has become shorter.
    """
    source = piece.source
    with opened_source(source.path, source.size) as opened:
        begin, end = (cut(opened, at, source) for at in (piece.begin, piece.end))
        raw = opened.span(begin, max(begin, end))
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
        require_kind(source, raw)
    if source.kind != "jsonl":
        yield plain_text(source, begin, raw)
        return
    records = Records(source.field, lambda: _first_line(source))
    for number, line in enumerate(raw.split(b"\n")):
        if line.strip():
            yield _text_of_line(source, begin, number, line, records)


def _standard_library() -> Iterator[Source]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        # Debian links to a file that may be gone.
        if path.is_file() and not _SKIPPED_PARTS.intersection(path.relative_to(root).parts):
            yield _source(path, "library")


def _require_named(path: Path, field: str) -> str:
    """Return the kind of a file, see `kind_of`; that of a ``.bin`` with an index is Megatron's."""
    if path.suffix.lower() == ".bin" and Path(index_of(str(path))).is_file():
        return "megatron"
    # What is no file is refused by `_source`, which does not wait for a pipe.
    return kind_of(str(path), field) if path.is_file() else "text"


def _expanded(path: str) -> list[Path]:
    """Return what a path stands for: itself, or what a pattern matches, by name.

    Raises:
        DataError: If a pattern matches nothing.
    """
    if not _MAGIC.search(path) or os.path.lexists(path):
        return [Path(path)]
    if "**" in path:
        parts = Path(path).parts
        number = next(n for n, part in enumerate(parts) if _MAGIC.search(part))
        rule, top = _rule(parts[number:]), Path(*parts[:number])
        found, others = _files_below(top, "")
        names = [
            each
            for each in (*found, *others)
            if rule.fullmatch(name := str(each.relative_to(top))) and not f"/{name}".count("/.")
        ]
    else:
        names = [Path(name) for name in glob.glob(path)]  # noqa: PTH207 - without hidden files
    # An index of Megatron is read with its ids.
    names = [n for n in names if n.suffix != ".idx" or not n.with_suffix(".bin").is_file()]
    if not names:
        raise DataError(f"data.paths: {printable(path)} must match something")
    return sorted(names)


def _rule(parts: Sequence[str]) -> "re.Pattern[str]":
    """Return the expression of the parts of a pattern, between which are slashes."""
    text = ""
    for part in parts:
        if part == "**":
            text += "(?:.*/)?"
            continue
        text += re.sub(
            r"\[[^]/]+\]|.",
            lambda found: {"*": "[^/]*", "?": "[^/]"}.get(
                found[0], found[0].replace("[!", "[^") if len(found[0]) > 1 else re.escape(found[0])
            ),
            part,
        )
        text += "/"
    return re.compile(text.removesuffix("/") if not text.endswith(")?") else f"{text}[^/]*")


def _remote_sources(path: str, field: str) -> Iterator[Source]:
    """Yield the objects below an address.

    Raises:
        DataError: If none of them is text, or they cannot be read.
    """
    sizes = remote.sizes_below(path)
    found = {name: size for name, size in sizes.items() if name == path or _is_read(name)}
    if not found:
        raise DataError(f"data.paths: {printable(path)} must have files of text")
    for name, size in found.items():
        kind = kind_of(name, field)
        if name.endswith(".bin") and remote.exists(index_of(name)):
            kind = "megatron"
        yield Source(name, size, kind, field)


def _is_read(name: str) -> bool:
    return is_read_in_folders(name, "")


def _files_below(folder: Path, field: str) -> tuple[list[Path], list[Path]]:
    """Return the files of text below a folder, sorted by name, and all other files.

    Raises:
        DataError: If a folder cannot be read, or is a link, which may lead anywhere, also back; or
            has several splits of `datasets`.
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
            if _SPLITS in names and len(folders) > 1:
                listed = ", ".join(sorted(map(printable, folders)))
                raise DataError(
                    f"data.paths: {printable(parent)} has splits of datasets ({listed}), and must "
                    f"be one: name {printable(Path(parent, max(folders)))}, for example"
                )
            shards = _shards(Path(parent)) if _STATE in names else None
            for path in (Path(parent, name) for name in names):
                is_read = is_read_in_folders(str(path), field)
                if shards is not None and path.suffix == ".arrow":
                    is_read = path.name in shards
                (found if is_read else others).append(path)
    except OSError as error:
        raise DataError(f"data.paths: cannot read {printable(folder)}: {error.strerror}") from None
    return sorted(found), sorted(others)


def _shards(folder: Path) -> set[str] | None:
    """Return the names of the files of a dataset that `datasets` saved; None: it is none.

    Raises:
        DataError: If a file of it is missing.
    """
    with opened_source(str(folder / _STATE)) as opened:
        raw = opened.span(0, _LARGEST_STATE)
    try:
        state = msgspec.json.decode(raw, type=dict[str, object])
        files = msgspec.convert(state["_data_files"], list[dict[str, str]])
        names = {each["filename"] for each in files}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError):
        return None
    for name in sorted(names):
        if not (folder / name).is_file() or Path(name).name != name:
            where = printable(folder / _STATE)
            raise DataError(f"data.paths: {where} lists {printable(name)}, which must be beside it")
    return names


def _raise(error: OSError) -> None:
    raise error


def _source(path: Path, kind: str, field: str = "") -> Source:
    try:
        about = path.stat()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"data.paths: cannot read {printable(path)}: {reason}") from None
    if not stat.S_ISREG(about.st_mode):
        raise DataError(f"data.paths: {printable(path)} must be a regular file or a folder")
    return Source(str(path), about.st_size, kind, field)


def cut(opened: Opened, at: int, source: Source) -> int:
    """Return the first beginning of a line from a byte on; without lines, that of a character."""
    if at <= 0 or not opened.reaches(at):
        return max(0, min(at, opened.size))
    limit = LONGEST if source.kind == "jsonl" else PIECE_BYTES
    for begin in range(at - 1, at - 1 + limit, SCAN_BYTES):
        if not opened.reaches(begin):
            return opened.size
        found = opened.span(begin, begin + SCAN_BYTES).find(b"\n")
        if found >= 0:
            return min(begin + found + 1, opened.size)
    if not opened.reaches(at - 1 + limit):
        return opened.size
    if source.kind == "jsonl":
        where = f"{printable(source.path)}: the line at byte {at}"
        raise DataError(f"{where} must not exceed {LONGEST} bytes")
    following = opened.span(at, at + 4)
    return at + next((n for n, byte in enumerate(following) if byte & 0xC0 != 0x80), len(following))


def plain_text(source: Source, begin: int, raw: bytes) -> str:
    """Return the text of some bytes of a document.

    Raises:
        DataError: If they are not text; names the file, and the byte.
    """
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


def require_kind(source: Source, raw: bytes) -> None:
    """Check that JSON is a document per line, and is not read as plain text.

    Raises:
        DataError: If it is not; says what to do.
    """
    name, (suffix, _) = printable(source.path), suffixes_of(source.path)
    if suffix == ".json" and _SPREAD.match(raw):
        raise DataError(
            f"{name} must be an object of JSON per line, or a list, and is spread over lines: "
            f"{_TO_LINES}"
        )
    if source.format == "text" and suffix not in _PROSE and _JSON.match(raw):
        raise DataError(f"{name} must be plain text, and is JSON: {_TO_LINES}")


def _hint(raw: bytes) -> str:
    kinds = [kind for magic, kind in _KINDS_OF_BYTES.items() if raw.startswith(magic)]
    return f"; it seems to be {kinds[0]}" if kinds else ""


def _text_of_line(source: Source, begin: int, number: int, line: bytes, records: Records) -> str:
    try:
        text = records.text(line)
    except ValueError as error:
        problem = str(error)
    else:
        if "\0" not in text:
            return text
        problem = "must be text: it has a character that is zero"
    number += _lines_before(source, begin) + 1
    raise DataError(f"{printable(source.path)}:{number}: {printable(problem)}{_hint(line)}")


def _first_line(source: Source) -> bytes:
    """Return the first line of a file that is not blank."""
    with opened_source(source.path, source.size) as opened:
        size = SCAN_BYTES
        while True:
            raw = opened.span(0, size).removeprefix(codecs.BOM_UTF8).lstrip()
            if b"\n" in raw or not opened.reaches(size) or size > LONGEST:
                return raw.split(b"\n", 1)[0]
            size *= 2


def _lines_before(source: Source, end: int) -> int:
    with opened_source(source.path) as opened:
        reads = (
            opened.span(begin, min(begin + PIECE_BYTES, end))
            for begin in range(0, end, PIECE_BYTES)
        )
        return sum(read.count(b"\n") for read in reads)


def _look_at_beginning(source: Source) -> None:
    with opened_source(source.path, source.size) as opened:
        if source.format in IDS:
            next(read_ids(source, opened), None)
            return
        if source.format not in {"text", "library"} and source.kind != "jsonl":
            next(documents_of(Piece(source, 0, source.size), opened), None)
            return
        raw, is_whole = opened.span(0, SCAN_BYTES), not opened.reaches(SCAN_BYTES)
        if source.compression:
            raw, is_whole = beginning(source, opened, SCAN_BYTES)
    if not is_whole:  # whole lines, or whole characters
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


def text_of_stream(
    window: Window, place: Callable[[Opened, int], int]
) -> Iterator[tuple[int, bytes, bool]]:
    """Yield parts of a document that is read from beginning to end, as pieces would cut it.

    Args:
        window: Bytes of the document, of which those before the next part are forgotten.
        place: Function that returns the first place from a byte on where it is cut.

    Yields:
        First byte of a part, its bytes, and whether the document ends with it.
    """
    begin = 0
    while True:
        end = place(window, (begin // PIECE_BYTES + 1) * PIECE_BYTES)
        is_last = not window.reaches(end)
        yield begin, window.span(begin, end), is_last
        if is_last:
            return
        window.forget(end - SCAN_BYTES)
        begin = end
