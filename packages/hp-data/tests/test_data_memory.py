"""Memory stays flat over large files of every format, in the process that reads them."""

import gzip
import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
from hp_data import load_tokenizer
from hp_data.corpus import find_sources, pieces_of
from hp_data.encode import encode_all
pieces = [piece for source in find_sources(sys.argv[1:]) for piece in pieces_of(source)]
total = sum(part.tokens.size for part in encode_all(pieces, load_tokenizer(""), num_processes=1))
peaks = [resource.getrusage(w).ru_maxrss for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(total, sum(peaks) << 10)
"""
DOCUMENT = "Some words in a row, and {} of them. " * 100


def _documents(megabytes: int) -> Iterator[str]:
    return (DOCUMENT.replace("{}", str(number)) for number in range(megabytes * 270))


def _write(path: Path, kind: str, megabytes: int) -> None:
    if kind in ("parquet", "arrow"):
        arrow, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
        schema = arrow.schema([("text", arrow.string()), ("other", arrow.string())])
        open_ = pytest.importorskip("pyarrow.parquet").ParquetWriter
        # Little at a time: the peak of this process would count as one of those that it starts.
        found = _documents(megabytes)
        with open_(path, schema) if kind == "parquet" else ipc.new_stream(path, schema) as writer:
            while part := [*islice(found, 1000 if kind == "arrow" else 8000)]:
                writer.write(arrow.record_batch([part, part], schema=schema))
        return
    compressed = kind.endswith(("gz", "zst"))
    with gzip.open(path, "wb", 1) if compressed else path.open("wb") as file:
        file.write({"json": b"[", "csv": b"text\n"}.get(kind, b""))
        for number, document in enumerate(_documents(megabytes)):
            if kind.startswith("txt"):
                line = document + "\n"
            elif kind == "csv":
                line = f'"{document}"\n'
            else:
                line = json.dumps({"text": document}) + "\n"
            file.write(("," * (kind == "json" and number > 0) + line).encode())
        file.write(b"]" * (kind == "json"))


@pytest.mark.sample
@pytest.mark.parametrize("kind", ["jsonl.gz", "txt.gz", "json", "csv", "parquet", "arrow"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, kind: str) -> None:
    peaks = []
    for megabytes in (30, 300):
        path = tmp_path / f"a.{kind}"
        _write(path, kind, megabytes)
        command = [sys.executable, "-s", "-c", PROGRAM, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
        total, peak = map(int, done.stdout.split())
        assert total >= megabytes * 950_000
        peaks.append(peak)
        path.unlink()
    assert peaks[1] < peaks[0] + (96 << 20), peaks
    assert peaks[1] < 1 << 30, peaks
