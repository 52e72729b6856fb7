"""Formats by the names of files, and the documents of a file of any of them."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import PurePosixPath

from hp_base.errors import DataError
from hp_data.sources.columns import documents_of_columns
from hp_data.sources.compressed import SUFFIXES, OnRead, beginning, read_stream
from hp_data.sources.records import (
    Document,
    documents_of_lines,
    documents_of_list,
    documents_of_table,
)
from hp_data.sources.source import SCAN_BYTES, Opened, Piece, Source, opened_source, printable
from hp_data.sources.token_files import DTYPES

TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst")
_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".npy": "npy",
}
_IF_TEXT = (".json", ".csv", ".tsv")
READ_IN_FOLDERS = (*TEXT_SUFFIXES, ".jsonl", ".ndjson", ".parquet", ".arrow")
"""Ends of names of files that are read in folders, those of text also with a compression's."""
COLUMNS = {"parquet", "arrow"}
"""Formats that are read by columns."""
IDS = {"npy", "ids", "megatron"}
"""Formats of ids that were made elsewhere."""
_PLACES = {"json": ": record ", "parquet": ": row ", "arrow": ": row "}


def suffixes_of(path: str) -> tuple[str, str]:
    """Return the end of the name of what is compressed, or of the file, and the compression."""
    name = PurePosixPath(path.lower())
    compression = SUFFIXES.get(name.suffix, "")
    return (name.with_suffix("") if compression else name).suffix, compression


def kind_of(path: str, field: str) -> str:
    """Return the kind of a file, by its name; of .json by its beginning.

    Raises:
        DataError: If its name is that of a file which has to be named otherwise.
    """
    suffix, compression = suffixes_of(path)
    after = f".{compression}" if compression else ""
    if suffix == ".idx":
        raise DataError(f"data.paths: {printable(path)} is read with the .bin beside it: name that")
    kind = _KINDS.get(suffix, "text")
    if compression and (kind in COLUMNS or suffix in {".npy", ".bin"}):
        raise DataError(f"data.paths: {printable(path)} must not be compressed a second time")
    if suffix == ".json" and _is_list(path, after):
        kind = "json"
    elif suffix == ".bin" and field in DTYPES:
        kind = "ids"
    return f"{kind}{after}"


def _is_list(path: str, after: str) -> bool:
    with opened_source(path) as opened:
        source = Source(path, opened.size, f"text{after}")
        raw, _ = beginning(source, opened, SCAN_BYTES)
    return raw.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def is_read_in_folders(path: str, field: str) -> bool:
    """Tell whether a file of a folder is read: JSON and tables of text are if they have texts.

    Files of ids are not: they are read where they are named.
    """
    suffix, compression = suffixes_of(path)
    if suffix in READ_IN_FOLDERS:
        return not (compression and _KINDS.get(suffix) in COLUMNS)
    if suffix not in _IF_TEXT:
        return False
    try:
        with opened_source(path) as opened:
            source = Source(path, opened.size, kind_of(path, field), field or "text")
            whole = Piece(source, 0, source.size)
            return next(documents_of(whole, opened), None) is not None
    except DataError:
        return False


def documents_of(
    piece: Piece, opened: Opened, *, on_read: OnRead = lambda _: None
) -> Iterator[Document]:
    """Yield the documents of a piece of a file of records, in their order.

    Args:
        piece: Piece of the file, a whole one unless it is one of columns.
        opened: Bytes of the file.
        on_read: Function that is called with the number of bytes of the file that were read.

    Raises:
        DataError: If the file is damaged, or a record has no text; names file and place.
    """
    source = piece.source
    name, field = printable(source.path), source.field
    if source.format in COLUMNS:
        found = documents_of_columns(piece, opened)
    else:
        parts = read_stream(source, opened, on_read=on_read)
        if source.format == "jsonl":
            found = documents_of_lines(parts, field=field, name=name)
        elif source.format == "json":
            found = documents_of_list(parts, field=field, name=name)
        else:
            delimiter = "\t" if source.format == "tsv" else ","
            found = documents_of_table(parts, field=field, name=name, delimiter=delimiter)
    for document in found:
        if "\0" in document.text:
            place = _PLACES.get(source.format, ":")
            raise DataError(
                f"{name}{place}{document.number}: must be text: it has a character that is zero"
            )
        yield document
