"""The text of a column of Parquet and Arrow files, a batch of rows in memory at a time."""

from collections.abc import Iterator
from typing import Any, TypeAlias

from hp_base.errors import DataError
from hp_data.sources.records import Document
from hp_data.sources.source import (
    LONGEST,
    AsFile,
    Opened,
    Piece,
    choose_column,
    extra,
    printable,
    why,
)

_BATCH_BYTES, _MOST_ROWS = 1 << 22, 1024
_BUFFER_BYTES = 1 << 20
_ARROW = b"ARROW1"
_LARGEST_HEADER = 1 << 24
Module: TypeAlias = Any
"""A module of pyarrow, whose types this package does not depend on."""


def documents_of_columns(piece: Piece, opened: Opened) -> Iterator[Document]:
    """Yield the texts of a piece of a Parquet or Arrow file.

    A piece has the row groups, or record batches, that begin in it where all of them were as long
    as each other; of an Arrow stream the first piece has all.

    Raises:
        DataError: If the file is damaged, or has no such column; names file and row.
    """
    path = piece.source.path
    name, row = printable(path), 0
    arrow: Module = extra("pyarrow", "parquet", path)
    read = _parquet if piece.source.format == "parquet" else _arrow
    try:
        for first, column in read(piece, opened):
            row = first
            for number, text in enumerate(_strings(arrow, column), first + 1):
                row = number
                yield Document(number, text)
    except (
        OSError,
        ValueError,
        KeyError,
        MemoryError,
        OverflowError,
        arrow.ArrowException,
    ) as error:
        after = f" after row {row}" if row else ""
        if piece.begin and piece.source.format == "arrow":
            after += f" of its batches from byte {piece.begin} on"
        raise DataError(f"{name}{after}: {why(error)}") from None


def _parquet(piece: Piece, opened: Opened) -> Iterator[tuple[int, Any]]:
    """Yield the number of rows before a part of the column, and the part."""
    path, field = piece.source.path, piece.source.field
    arrow: Module = extra("pyarrow", "parquet", path)
    parquet: Module = extra("pyarrow.parquet", "parquet", path)
    with parquet.ParquetFile(
        arrow.PythonFile(AsFile(opened), mode="r"),
        buffer_size=_BUFFER_BYTES,
        pre_buffer=False,
        page_checksum_verification=True,
    ) as file:
        column = _column(arrow, file.schema_arrow, field)
        about, row = file.metadata, 0
        for group in range(about.num_row_groups):
            rows = about.row_group(group).num_rows
            if _is_in(piece, group, about.num_row_groups):
                mean = about.row_group(group).total_byte_size // max(1, rows)
                size = min(_MOST_ROWS, max(1, _BATCH_BYTES // max(1, mean)))
                at = row
                for batch in file.iter_batches(
                    size, row_groups=[group], columns=[column], use_threads=False
                ):
                    yield at, batch.column(0)
                    at += batch.num_rows
            row += rows


def _arrow(piece: Piece, opened: Opened) -> Iterator[tuple[int, Any]]:
    """Yield the number of rows before a part of the column, and the part."""
    path, field = piece.source.path, piece.source.field
    arrow: Module = extra("pyarrow", "parquet", path)
    ipc: Module = extra("pyarrow.ipc", "parquet", path)
    is_file = opened.span(0, len(_ARROW)) == _ARROW
    if not is_file and piece.begin:
        return
    open_ = ipc.open_file if is_file else ipc.open_stream
    with open_(arrow.PythonFile(AsFile(opened), mode="r")) as reader:
        schema = reader.schema
        only = [schema.get_field_index(_column(arrow, schema, field))]
    options = ipc.IpcReadOptions(included_fields=only, use_threads=False)
    with open_(arrow.PythonFile(AsFile(opened), mode="r"), options=options) as reader:
        row = 0
        number = reader.num_record_batches if is_file else 0
        batches = (
            (reader.get_batch(n) if _is_in(piece, n, number) else None for n in range(number))
            if is_file
            else iter(reader)
        )
        for batch in batches:
            if batch is not None:
                yield row, batch.column(0)
                row += batch.num_rows
    if not is_file and not opened.span(opened.size - 8, opened.size).endswith(bytes(4)):
        raise ValueError("the stream is cut off: it does not end as a stream of Arrow does")


def _is_in(piece: Piece, number: int, count: int) -> bool:
    """Tell whether a row group or batch belongs to a piece; each belongs to one."""
    return piece.begin <= number * piece.source.size // count < max(piece.end, 1)


def _column(arrow: Module, schema: Any, field: str) -> str:
    """Return the column of the text."""
    types = arrow.types
    texts = []
    for each in schema:
        kind = each.type.value_type if types.is_dictionary(each.type) else each.type
        is_view = getattr(types, "is_string_view", lambda _: False)(kind)
        if types.is_string(kind) or types.is_large_string(kind) or is_view:
            texts.append(each.name)
    return choose_column(field, schema.names, texts)


def _strings(arrow: Module, column: Any) -> Iterator[str]:
    """Yield the texts of a part of a column; an empty one for what is missing."""
    column.validate(full=True)
    if arrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for text in column:
        found: str = text.as_py() or ""
        if len(found) > LONGEST:
            raise ValueError(f"the text must not exceed {LONGEST} characters")
        yield found
