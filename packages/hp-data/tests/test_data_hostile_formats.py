"""Files of strangers in every format: the same documents, or one line of error, in bounded memory.

Each mutant is read by the process that reads for a run, whose peak of memory is measured.
"""

import gzip
import io
import json
import lzma
import os
import random
import resource
import signal
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from formats import COLUMNS, COMPRESSIONS, DOCUMENTS, RECORDS, save_megatron

from hp_base.errors import DataError
from hp_data import load_tokenizer
from hp_data.corpus import find_sources, left_out, look_at, pieces_of
from hp_data.encode import encode_all
from hp_data.sources.records import LONGEST_CELL

BYTES = load_tokenizer("")
SEED = 46
SECONDS, MOST_BYTES = 60, 1 << 30
IDS = [[5, 6, 7, 0], [8, 9, 0], [10, 0]]


def _originals(folder: Path) -> dict[str, bytes]:
    """Files of the same documents by name, and of ids."""
    made = {f"a.{suffix}": make(DOCUMENTS) for suffix, make in {**RECORDS, **COLUMNS}.items()}
    plain = "\n".join(DOCUMENTS).encode()
    made["a.txt"] = plain
    for compression in (".gz", ".xz", ".zst"):
        compress = COMPRESSIONS[compression]
        made |= {f"a.{kind}{compression}": compress(made[f"a.{kind}"]) for kind in ("jsonl", "csv")}
        made[f"a.txt{compression}"] = compress(plain)
    ids = save_megatron(folder / "ids.bin", IDS)
    array = io.BytesIO()
    np.save(array, np.asarray([token for ids in IDS for token in ids], "uint16"))
    made |= {"ids.bin": ids.read_bytes(), "ids.idx": ids.with_suffix(".idx").read_bytes()}
    made["ids.npy"] = array.getvalue()
    return made


def _mutants(name: str, raw: bytes, draw: random.Random) -> Iterator[tuple[str, str, bytes]]:
    """Yield what was done, the name of the file and its content."""
    for share in (0.0, 0.3, 0.97):
        yield f"cut at {share}", name, raw[: int(share * len(raw))]
    for _ in range(3):
        changed = bytearray(raw)
        changed[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        yield "a bit flipped", name, bytes(changed)
    changed = bytearray(raw)
    begin = draw.randrange(len(raw))
    changed[begin : begin + 40] = draw.randbytes(40)
    yield "40 bytes changed", name, bytes(changed)
    yield "more at the end", name, raw + draw.randbytes(30)
    if "bin" not in name and "idx" not in name:
        wrong = draw.choice(
            ["jsonl", "json", "csv", "parquet", "arrow", "txt.gz", "txt.zst", "npy"]
        )
        yield "another suffix", f"b.{wrong}", raw


def _read(path: Path) -> tuple[str, list[int]]:
    """Return a refusal, or the ids, as a run reads them: look, then processes."""
    try:
        look_at([str(path)])
        pieces = [piece for source in find_sources([str(path)]) for piece in pieces_of(source)]
        made = [*encode_all(pieces, BYTES, num_processes=1)]
    except DataError as error:
        return str(error), []
    return "", [int(token) for part in made for token in part.tokens]


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10


def _check(path: Path, what: str) -> tuple[str, list[int]]:
    began = time.monotonic()
    signal.alarm(SECONDS)
    try:
        error, ids = _read(path)
    finally:
        signal.alarm(0)
    assert error.isprintable(), (what, error)
    assert not error or path.name.removesuffix("idx").removesuffix("bin") in error, (what, error)
    assert len(error) < 600, (what, error)
    assert time.monotonic() - began < SECONDS
    assert _peak() < MOST_BYTES, what
    return error, ids


ENDS = ("gz", "xz", "zst", "parquet", "arrow", "feather", "json", "npy", "bin", "idx")
"""Files that say where they end."""
CHECKED = ("gz", "xz")  # those that have a digest of their content
NAMES = (
    *(f"a.{suffix}" for suffix in {**RECORDS, **COLUMNS}),
    *("a.txt", "a.jsonl.gz", "a.csv.gz", "a.txt.gz", "a.jsonl.xz", "a.csv.xz", "a.txt.xz"),
    *("a.jsonl.zst", "a.csv.zst", "a.txt.zst", "ids.bin", "ids.idx", "ids.npy"),
)


@pytest.mark.sample("a.parquet")
@pytest.mark.parametrize("name", NAMES)
def test_mutants_are_the_same_documents_or_one_line_of_error(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("zstandard")
    originals = _originals(tmp_path)
    raw = originals[name]
    (tmp_path / name).write_bytes(raw)
    beside = tmp_path / "ids.bin" if name == "ids.idx" else tmp_path / name
    good = _check(beside, "good")
    assert good[0] == ""
    count = refused = 0
    for what, changed_name, content in _mutants(name, raw, random.Random(f"{SEED} {name}")):
        (tmp_path / changed_name).write_bytes(content)
        error, ids = _check(beside if name == "ids.idx" else tmp_path / changed_name, what)
        count, refused = count + 1, refused + bool(error)
        if what.startswith("cut at 0.0") and "txt" not in name.partition(".")[2][-3:]:
            assert error, (name, what)
        if name.endswith(CHECKED) and changed_name == name:
            assert error or ids == good[1], (name, what)
        if what.startswith("cut at") and name.endswith(ENDS):
            assert error, (name, what)
    assert count >= 8
    assert refused >= (0 if name == "a.txt" else 2)


def _bomb(compression: str) -> bytes:
    size = 1 << 26
    if compression == "gz":
        stream = zlib.compressobj(9, zlib.DEFLATED, 31)
        return b"".join(stream.compress(b"a" * size) for _ in range(8)) + stream.flush()
    if compression == "xz":
        return lzma.compress(b"a" * size) * 8
    return bytes(pytest.importorskip("zstandard").compress(b"a" * size)) * 8


@pytest.mark.parametrize("compression", ["gz", "xz", "zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
@pytest.mark.sample("txt-zst")
def test_a_bomb_is_refused_before_it_fills_the_memory(
    tmp_path: Path, compression: str, kind: str
) -> None:
    path = tmp_path / f"a.{kind}.{compression}"
    path.write_bytes(_bomb(compression))
    error, _ = _check(path, "bomb")
    assert "is not 500 times its" in error or "must not exceed" in error


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b'id,text\n1,"' + b"x\n" * 3000, "a.csv:2: unexpected end of data; a quote may"),
        ("a.csv", b"id,text\n1,one,more\n", "a.csv:2: must have the 2 cells of the header"),
        ("a.csv", b"id,text\n1,\xff\n", "a.csv:2: must be UTF-8 text: byte 2 of the line"),
        ("a.csv", b"id,text\n1,a\0b\n", "a.csv:2: "),
        ("a.csv", b"text,text\na,b\n", "a.csv:1: must have strings under 'text'"),
        ("a.json", b"[" * 200_000, "record 1: '{' must stand where '[' is"),
        ("a.json", b'[{"text": "a"}, {"text": 3}]', "record 2: must be an object with a string"),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', "record 2: ',' must stand where '{' is"),
        ("a.json", b'[{"text": "a"}', "record 2: the list is cut off"),
        ("a.json", b'[{"text": "a', "record 1: the list is cut off"),
        ("a.json", b'[{"text": "a"}] 3', "something follows the list of 1 records"),
        ("a.json", b'[{"a":' * 100_000, "record 1: "),
        ("a.json", b'[{"text": "\xff"}]', "record 1: "),
        ("a.jsonl.gz", gzip.compress(b'{"text": "\\u0000"}'), ":1: must be text: it has a char"),
        ("a.parquet.gz", gzip.compress(b"PAR1"), "must not be compressed a second time"),
        ("a.idx", b"MMIDIDX", "is read with the .bin beside it"),
        ("a.gz", gzip.compress(b'{"text": "a"}\n'), "a.gz must be plain text, and is JSON"),
        ("a.txt.gz", b"", "its gz is cut off at byte 0"),
        ("a.txt.gz", gzip.compress(b"text") + b"more", "must be gz"),
        ("a.txt.gz", gzip.compress("gr\u00fcn".encode("latin-1")), "byte 2 is not"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as refusal:
        _in_process(tmp_path / name)
    assert says in str(refusal.value)
    assert name in str(refusal.value)
    assert str(refusal.value).isprintable()


def _in_process(path: Path) -> None:
    for source in find_sources([str(path)]):
        for _ in encode_all(pieces_of(source), BYTES, num_processes=0):
            pass


@pytest.mark.sample
@pytest.mark.parametrize("suffix", ["jsonl.gz", "csv", "json", "csv-quote"])
def test_what_never_ends_is_refused_within_bounds(tmp_path: Path, suffix: str) -> None:
    kind = suffix.partition("-")[0]
    path = tmp_path / f"a.{kind}"
    begin = {"jsonl.gz": '{"text": "', "csv": "text\n", "json": '[{"text": "'}.get(
        suffix, 'text\n"'
    )
    line = (b"some words, " if suffix == "csv-quote" else b"some words  ") * 85
    with gzip.open(path, "wb") if kind.endswith("gz") else path.open("wb") as file:
        file.write(begin.encode())
        for number in range(330_000):
            file.write(line + (b"" if suffix != "csv-quote" else b"%d\n" % number))
    error, _ = _check(path, suffix)
    limit = str(LONGEST_CELL) if "csv" in suffix else "must not exceed"
    assert limit in error or "must not exceed" in error


def test_links_that_lead_back_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "a.jsonl").write_text('{"text": "one"}\n')
    (tmp_path / "a" / "loop.jsonl").symlink_to("loop.jsonl")
    for path in (str(tmp_path / "a"), f"{tmp_path}/a/*.jsonl", f"{tmp_path}/**/*.jsonl"):
        with pytest.raises(DataError, match=r"loop\.jsonl"):
            look_at([path])
    (tmp_path / "a" / "loop.jsonl").unlink()
    (tmp_path / "a" / "up").symlink_to("..")
    for path in (str(tmp_path / "a"), f"{tmp_path}/**/*.jsonl"):
        with pytest.raises(DataError, match="must not be a link to a folder"):
            look_at([path])
    assert left_out([f"{tmp_path}/a/*.jsonl"]) == ""


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    for name in ("a.json", "a.csv.gz", "a.parquet", "a.npy", "a.bin"):
        os.mkfifo(tmp_path / name)
        signal.alarm(30)
        with pytest.raises(DataError, match="must be a regular file"):
            look_at([str(tmp_path / name)])
        signal.alarm(0)


def test_an_index_of_megatron_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    path = save_megatron(tmp_path / "a.bin", IDS)
    index = path.with_suffix(".idx").read_bytes()
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 1 << 60, 1 << 60)
    for content, says in (
        (head + index[len(head) :], "no room for"),
        (index.replace(b"MMIDIDX", b"MMIDIDY"), "no index of Megatron"),
        (index[:-8], "no room for"),
        (index[:34] + struct.pack("<i", 3) + index[38:], "do not follow each other"),
    ):
        path.with_suffix(".idx").write_bytes(content)
        with pytest.raises(DataError, match=f"a.bin must be a file of token ids: .*{says}"):
            _in_process(path)
    path.with_suffix(".idx").write_bytes(index)
    path.write_bytes(path.read_bytes() + b"\1\0")
    with pytest.raises(DataError, match=r"its \.idx has 9 ids of uint16, and it has 20 bytes"):
        _in_process(path)


def test_json_of_a_list_is_read_object_by_object_whatever_the_parts(tmp_path: Path) -> None:
    text = json.dumps([{"n": {"]": [1]}, "text": f'"{n}\\ }}' * n} for n in range(60)], indent=3)
    path = tmp_path / "a.json"
    path.write_text(text)
    [source] = find_sources([str(path)])
    made = [*encode_all(pieces_of(source), BYTES, num_processes=0)]
    found = bytes(int(token) for part in made for token in part.tokens).decode().split("\0")
    assert found == [f'"{n}\\ }}' * n for n in range(1, 60)] + [""]
