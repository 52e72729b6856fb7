"""Files of the same documents in every format."""

import csv
import gzip
import io
import json
import lzma
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DOCUMENTS = [
    "one document, with a comma",
    'a "quoted" one\nof two lines',
    "",
    "gr\u00fcn \u2028 \U0001f600, and a tab\t here",
    *(
        f"document {number} is squared {number * number}. " * (1 + number % 7)
        for number in range(40)
    ),
]
"""Documents, one of which is empty."""


def as_jsonl(documents: Sequence[str], field: str = "text") -> bytes:
    return "".join(json.dumps({"id": 3, field: each}) + "\n" for each in documents).encode()


def as_json(documents: Sequence[str], field: str = "text") -> bytes:
    records = [{"meta": {"a": [1, "]"]}, field: each} for each in documents]
    return json.dumps(records, indent=1, ensure_ascii=False).encode()


def as_table(documents: Sequence[str], field: str, delimiter: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter)
    writer.writerows([["id", field], *([3, each] for each in documents)])
    return text.getvalue().encode()


def as_csv(documents: Sequence[str], field: str = "text") -> bytes:
    return as_table(documents, field, ",")


def as_tsv(documents: Sequence[str], field: str = "text") -> bytes:
    return as_table(documents, field, "\t")


def _table(documents: Sequence[str], field: str) -> Any:
    arrow = pytest.importorskip("pyarrow")
    return arrow.table({"id": [*range(len(documents))], field: [*documents]})


def as_parquet(documents: Sequence[str], field: str = "text") -> bytes:
    table = _table(documents, field)
    out = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(table, out, row_group_size=9)
    return out.getvalue()


def _as_arrow(documents: Sequence[str], field: str, kind: str) -> bytes:
    table = _table(documents, field)
    ipc = pytest.importorskip("pyarrow.ipc")
    out = io.BytesIO()
    with getattr(ipc, kind)(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return out.getvalue()


def as_arrow_file(documents: Sequence[str], field: str = "text") -> bytes:
    return _as_arrow(documents, field, "new_file")


def as_arrow_stream(documents: Sequence[str], field: str = "text") -> bytes:
    return _as_arrow(documents, field, "new_stream")


def _zstd(raw: bytes) -> bytes:
    compressed: bytes = pytest.importorskip("zstandard").compress(raw)
    return compressed


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda raw: raw,
    ".gz": lambda raw: gzip.compress(raw, mtime=0),
    ".xz": lzma.compress,
    ".zst": _zstd,
}
RECORDS: dict[str, Callable[..., bytes]] = {
    "jsonl": as_jsonl,
    "ndjson": as_jsonl,
    "json": as_json,
    "csv": as_csv,
    "tsv": as_tsv,
}
COLUMNS: dict[str, Callable[..., bytes]] = {
    "parquet": as_parquet,
    "arrow": as_arrow_stream,
    "feather": as_arrow_file,
}


def save_dataset(folder: Path, shards: Sequence[Sequence[str]]) -> Path:
    """Write a folder as `save_to_disk` of datasets does."""
    folder.mkdir(parents=True)
    names = [f"data-{n:05}-of-{len(shards):05}.arrow" for n in range(len(shards))]
    for name, documents in zip(names, shards, strict=True):
        (folder / name).write_bytes(as_arrow_stream(documents))
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"description": "x", "features": {}}))
    return folder


def save_megatron(path: Path, documents: Sequence[Sequence[int]], dtype: str = "uint16") -> Path:
    """Write ids as Megatron's preprocessing does, each document a sequence."""
    ids = np.concatenate([np.asarray(each, dtype) for each in documents])
    path.write_bytes(ids.tobytes())
    sizes = np.asarray([len(each) for each in documents], "<i4")
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1])) * ids.dtype.itemsize
    code = {"uint16": 8, "int32": 4}[dtype]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(sizes), len(sizes) + 1)
    arrays = (sizes, starts.astype("<i8"), np.arange(len(sizes) + 1, dtype="<i8"))
    path.with_suffix(".idx").write_bytes(head + b"".join(each.tobytes() for each in arrays))
    return path
