"""Records of JSON, a line each or in a list, and tables of text, one record at a time."""

import codecs
import csv
import functools
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from hp_base.errors import DataError
from hp_data.sources.source import LONGEST, choose_column, has, printable, strings_in, why

LONGEST_CELL = 1 << 25
"""Most characters of a cell of a table, each of which takes four bytes while it is read."""
_SPACE = b" \t\r\n"
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\]]|"', re.DOTALL)
_LARGER = 1 << 18
Decode = Callable[[bytes], object]


class Document(NamedTuple):
    """A text, and the number of the line, row or record that has it, from 1 on."""

    number: int
    text: str


@functools.lru_cache(maxsize=8)
def _decoder(field: str) -> Decode:
    """Return what decodes a record of JSON, of which only the text is read."""
    record = msgspec.defstruct("Record", [("text", str, msgspec.field(name=field))])
    decode: Decode = msgspec.json.Decoder(record).decode
    return decode


class Records:
    """The texts of the records of a file of JSON.

    Args:
        field: Key of the text; empty: see `choose_column`, by the first record.
        first: Function that returns the first record of the file.
    """

    def __init__(self, field: str, first: Callable[[], bytes]) -> None:
        self._given, self._first = field, first
        self._field = field or "text"
        self._decode = _decoder(self._field)

    def text(self, raw: bytes) -> str:
        """Return the text of a record.

        Raises:
            ValueError: If it has none; the message follows the place.
        """
        for is_again in (False, True):
            try:
                found: str = self._decode(raw).text  # type: ignore[attr-defined] # made just now
            except msgspec.ValidationError:
                problem = f"must be an object with a string under {self._field!r}"
                problem += _others(raw)
                if is_again or self._given or not self._choose():
                    break
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                problem = f"not a JSON object: {error}"
                break
            else:
                return found
        raise ValueError(problem)

    def _choose(self) -> bool:
        """Take the only string of the first record for the text, and tell whether there is one."""
        try:
            record = msgspec.json.decode(self._first(), type=dict[str, object])
            chosen = choose_column("", [*record], strings_in(record))
        except (ValueError, RecursionError):
            return False
        changed, self._field, self._decode = chosen != self._field, chosen, _decoder(chosen)
        return changed


def _others(raw: bytes) -> str:
    """Return the keys of a record that has strings under others, for a message."""
    try:
        record = msgspec.json.decode(raw, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return f", {has([*record])}" if strings_in(record) else ""


def lines_of(parts: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Yield lines without their ends.

    Raises:
        DataError: If a line is longer than `LONGEST`.
    """
    kept = bytearray()
    number = 1
    for part in parts:
        first, *others = part.split(b"\n")
        kept += first
        if others:
            yield bytes(kept)
            yield from others[:-1]
            number += len(others)
            kept = bytearray(others[-1])
        if len(kept) > LONGEST:
            raise DataError(f"{name}:{number}: the line must not exceed {LONGEST} bytes")
    if kept:
        yield bytes(kept)


def without_mark(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield parts without the byte order mark at the beginning of the first."""
    for part in parts:
        yield part.removeprefix(codecs.BOM_UTF8)
        break
    yield from parts


def documents_of_lines(parts: Iterator[bytes], *, field: str, name: str) -> Iterator[Document]:
    """Yield the texts of lines of JSON.

    Raises:
        DataError: If a line has no text; names file and line.
    """
    first = b""
    records = Records(field, lambda: first)
    for number, line in enumerate(lines_of(without_mark(parts), name), 1):
        if not line.strip():
            continue
        first = first or line
        try:
            yield Document(number, records.text(line))
        except ValueError as error:
            raise DataError(f"{name}:{number}: {printable(str(error))}") from None


def documents_of_list(parts: Iterator[bytes], *, field: str, name: str) -> Iterator[Document]:
    """Yield the texts of a list of objects of JSON, one object in memory at a time.

    Raises:
        DataError: If it is no such list; names file and record.
    """
    first = b""
    records = Records(field, lambda: first)
    for number, raw in enumerate(_objects(without_mark(parts), name), 1):
        first = first or raw
        try:
            yield Document(number, records.text(raw))
        except ValueError as error:
            raise DataError(f"{name}: record {number}: {printable(str(error))}") from None


def _objects(parts: Iterator[bytes], name: str) -> Iterator[bytes]:
    """Yield the objects of a list, undecoded."""
    text, number = _Text(parts), 0
    if text.following() != "[":
        raise DataError(f"{name} must be a list of objects of JSON, or an object per line")
    text.skip()
    try:
        while text.following() != "]":
            if number:
                text.require(",")
                text.skip()
            text.require("{")
            yield text.object()
            number += 1
    except _CutError as error:
        raise DataError(f"{name}: record {number + 1}: {error}") from None
    text.skip()
    if text.following():
        raise DataError(f"{name}: something follows the list of {number} records")


class _CutError(Exception):
    """A list of JSON that is not one; the message says why."""


class _Text:
    """The text of JSON, of which an object at a time is in memory.

    Args:
        parts: The text.
    """

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts, self._buffer, self._at = parts, bytearray(), 0

    def following(self) -> str:
        """Return the next character that is no space, without going beyond; empty: the end."""
        while True:
            while self._at < len(self._buffer):
                if self._buffer[self._at] not in _SPACE:
                    return chr(self._buffer[self._at])
                self._at += 1
            self._forget()
            if not self._more(1):
                return ""

    def skip(self) -> None:
        """Go beyond the next character."""
        self._at += 1

    def require(self, character: str) -> None:
        """Raise _CutError if another character follows."""
        found = self.following()
        if found != character:
            what = (
                f"{character!r} must stand where {found!r} is" if found else "the list is cut off"
            )
            raise _CutError(what)

    def object(self) -> bytes:
        """Return the object that begins at the next character, and go beyond it."""
        self._forget()
        depth = 0
        while True:
            token = _TOKEN.search(self._buffer, self._at)
            kind = b'"' if token is None else token[0]
            if kind == b'"':  # nothing, or a string, that may go on
                self._at = len(self._buffer) if token is None else token.start()
                token = None  # which would hold the buffer
                if len(self._buffer) > LONGEST:
                    raise _CutError(f"must not exceed {LONGEST} bytes")
                # Twice as much each time, since the string is searched from its beginning.
                if not self._more(max(_LARGER, len(self._buffer) - self._at)):
                    raise _CutError("the list is cut off")
                continue
            assert token is not None
            self._at = token.end()
            depth += 1 if kind in b"{[" else -1 if kind in b"}]" else 0
            if not depth:
                return bytes(self._buffer[: self._at])

    def _forget(self) -> None:
        del self._buffer[: self._at]
        self._at = 0

    def _more(self, least: int) -> bool:
        """Read more, and tell whether there was any."""
        before = len(self._buffer)
        while len(self._buffer) < before + least:
            part = next(self._parts, None)
            if part is None:
                break
            self._buffer += part
        return len(self._buffer) > before


def documents_of_table(
    parts: Iterator[bytes], *, field: str, name: str, delimiter: str
) -> Iterator[Document]:
    """Yield the texts of a column of a table with a header.

    Raises:
        DataError: If a row does not fit the header, a quote never ends, or it is no UTF-8; names
            file and line.
    """
    lines = _decoded_lines(without_mark(parts), name)
    csv.field_size_limit(LONGEST_CELL)
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    header: list[str] = []
    column = 0
    while True:
        begin = rows.line_num + 1
        try:
            row = next(rows)
            if not header:
                header = row
                column = row.index(choose_column(field, row, row)) if row else 0
                continue
        except StopIteration:
            return
        except (csv.Error, ValueError) as error:
            hint = "; a quote may never end" if rows.line_num > begin else ""
            raise DataError(f"{name}:{begin}: {why(error)}{hint}") from None
        if not row:
            continue
        if len(row) != len(header):
            raise DataError(
                f"{name}:{begin}: must have the {len(header)} cells of the header, and has "
                f"{len(row)}"
            )
        yield Document(begin, row[column])


def _decoded_lines(parts: Iterator[bytes], name: str) -> Iterator[str]:
    for number, line in enumerate(lines_of(parts, name), 1):
        try:
            yield line.decode() + "\n"
        except UnicodeDecodeError as error:
            raise DataError(
                f"{name}:{number}: must be UTF-8 text: byte {error.start} of the line is not"
            ) from None
