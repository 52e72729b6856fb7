"""Text as people have it: what is read, what is refused, and how it is cut into pieces."""

import gzip
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_base.errors import DataError
from hp_data import corpus
from hp_data.corpus import find_sources, look_at, pieces_of, read_piece, texts_of


def texts(*paths: Path) -> list[str]:
    """All documents, piece by piece."""
    found = []
    for source in find_sources([str(path) for path in paths]):
        for piece in pieces_of(source):
            found += list(texts_of(source, *read_piece(piece)))
    return found


def _file(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """End a test that blocks."""
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def test_jsonl_lines_are_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "one"}), "", json.dumps({"id": [1, {}], "text": "two"})]
    assert texts(_file(tmp_path, "a.jsonl", "\n".join(lines))) == ["one", "two"]


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\x1c", "\x0b", "\x0c"])
def test_lines_end_at_newlines_alone(tmp_path: Path, character: str) -> None:
    inner = f"a{character}b" if character > "\x20" else "a"
    content = json.dumps({"text": inner}, ensure_ascii=False) + "\r\n" + '{"text": "c"}\r\n'
    assert texts(_file(tmp_path, "a.jsonl", content)) == [inner, "c"]
    assert texts(_file(tmp_path, "a.txt", f"a{character}b")) == [f"a{character}b"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert texts(_file(tmp_path, "a.txt", "\ufeffabc\ufeff")) == ["abc\ufeff"]
    assert texts(_file(tmp_path, "a.jsonl", '\ufeff{"text": "abc"}\n')) == ["abc"]


def test_lines_of_plain_text_end_alike_whoever_wrote_it(tmp_path: Path) -> None:
    assert texts(_file(tmp_path, "a.txt", "a\r\nb\rc\n")) == ["a\nb\nc\n"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "1",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"text": 3}',
        '{"text": null}',
        '{"txt": "a"}',
        '{"text": "a"} {"text": "b"}',
        '{"text": "half a pair \\ud800"}',
        '{"text": "zero \\u0000"}',
        '{"text": "raw \t tab"}',
        '{"text": NaN}',
        b'{"text": "\xff"}',
        b"\x1f\x8b\x08",
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes | str) -> None:
    raw = line.encode() if isinstance(line, str) else line
    path = _file(tmp_path, "a.jsonl", b'{"text": "one"}\n' + raw + b"\n")
    with pytest.raises(DataError, match=r"a\.jsonl:2: "):
        texts(path)


def test_a_bad_line_far_into_a_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", 1000)
    lines = ['{"text": "fine"}'] * 997 + ['{"text": 1}']
    with pytest.raises(DataError, match=r"a\.jsonl:998: must be an object with a string"):
        texts(_file(tmp_path, "a.jsonl", "\n".join(lines)))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"fine so far \xff\xfe", "byte 12 is not"),
        ("gr\u00fcn".encode("latin-1"), "byte 2 is not"),
        ("text".encode("utf-16"), "it seems to be UTF-16"),
        ("text".encode("utf-16-le"), "a byte that is zero"),
        (gzip.compress(b"text", mtime=0), "it seems to be gzip"),
        ("cut off: \u00fc".encode()[:-1], "byte 9 is not"),
        (b"\xed\xa0\x80", "byte 0 is not"),
    ],
)
def test_what_is_no_text_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = _file(tmp_path, "a.txt", content)
    with pytest.raises(DataError, match=rf"a\.txt must be .*{re.escape(says)}"):
        texts(path)


def test_a_folder_is_read_by_name_and_a_broken_link_in_it_is_an_error(tmp_path: Path) -> None:
    for name in ("b.txt", "a.md", "c/z.txt", "c.txt", "d.gz"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        _file(tmp_path, name, name)
    assert texts(tmp_path) == ["a.md", "b.txt", "c/z.txt", "c.txt"]
    (tmp_path / "e.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"cannot read .*e\.txt: No such file"):
        texts(tmp_path)


def test_a_folder_without_text_is_an_error(tmp_path: Path) -> None:
    _file(tmp_path, "a.gz", b"\x1f\x8b")
    with pytest.raises(DataError, match="must have files of text"):
        texts(tmp_path)


def test_names_that_a_terminal_would_obey_are_not_printed(tmp_path: Path) -> None:
    path = _file(tmp_path, "a\x1b[2J\n.txt", b"\xff")
    with pytest.raises(DataError) as refusal:
        texts(path)
    assert str(refusal.value).isprintable()


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [_fifo, _socket, _device])
@pytest.mark.parametrize("inside", [True, False])
def test_what_is_no_file_is_refused_and_never_waited_for(
    tmp_path: Path, make: Callable[[Path], None], inside: bool
) -> None:
    path = tmp_path / "a.txt"
    make(path)
    with within(30), pytest.raises(DataError, match="must be a regular file or a folder"):
        look_at([str(tmp_path if inside else path)])


def test_a_pipe_that_takes_the_place_of_a_file_does_not_block(tmp_path: Path) -> None:
    path = _file(tmp_path, "a.txt", "text")
    [source] = find_sources([str(path)])
    path.unlink()
    os.mkfifo(path)
    with within(30), pytest.raises(DataError, match="must be a regular file"):
        read_piece(next(pieces_of(source)))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", gzip.compress(b"text" * 1000, mtime=0), "it seems to be gzip"),
        ("a.jsonl", b'{"a": "text", "b": "text"}\n', "a.jsonl:1: must be an object with a string"),
        ("a.jsonl", b'["text"]\n' * 50_000, "a.jsonl:1: must be an object with a string"),
        ("a.txt", b"", "must not be empty"),
        ("folder/a.gz", b"\x1f\x8b", "must have files of text"),
        ("folder/a.txt", b"", "must not be empty"),
        ("a.txt", b"\x00" * 100, "a byte that is zero"),
    ],
)
def test_a_look_finds_what_is_no_text(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    given = path.parent if "/" in name else path
    with pytest.raises(DataError) as refusal:
        look_at([str(given)])
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("a.txt", "\u00fc" * 7),
        ("a.jsonl", '{"text": "\u00fc"}\n'),
        ("a.txt", "\u00fc\n"),
        ("a.txt", "ab\n"),
    ],
)
def test_a_look_reads_the_beginning_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: str
) -> None:
    path = _file(tmp_path, name, line.encode() * 40_000 + b"\xff")
    read = []
    pread = os.pread

    def counted(descriptor: int, size: int, at: int) -> bytes:
        read.append(at + size)
        return pread(descriptor, size, at)

    monkeypatch.setattr(os, "pread", counted)
    look_at([str(path)])
    assert max(read) <= 1 << 16


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet="a\u00fc\U0001f600\n\r ", max_size=400),
    st.integers(min_value=1, max_value=60),
    st.booleans(),
)
def test_pieces_of_any_size_are_the_same_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int, has_lines: bool
) -> None:
    whole = text if has_lines else text.replace("\n", "").replace("\r", "")
    path = _file(tmp_path_factory.mktemp("text"), "a.txt", whole)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE_BYTES", size)
        pieces = [read_piece(p) for s in find_sources([str(path)]) for p in pieces_of(s)]
    assert b"".join(raw for _, raw in pieces) == whole.encode()
    for _, raw in pieces:
        raw.decode()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.text(alphabet="a\u00fc\u2028", max_size=40), max_size=12),
    st.integers(min_value=1, max_value=60),
)
def test_lines_of_any_length_are_read_once_whatever_the_pieces(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], size: int
) -> None:
    content = "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in documents)
    path = _file(tmp_path_factory.mktemp("text"), "a.jsonl", content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE_BYTES", size)
        assert texts(path) == documents


JSON_LINES = '{"text": "one"}\n{"text": "two"}\n'


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.NDJSON", "a.json", "a.Json"])
@pytest.mark.parametrize("is_folder", [False, True])
def test_lines_of_json_are_documents_whatever_the_file_is_called(
    tmp_path: Path, name: str, is_folder: bool
) -> None:
    path = _file(tmp_path, name, JSON_LINES)
    assert texts(tmp_path if is_folder else path) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", '{\n  "text": "one"\n}', "must be an object of JSON per line, or a list, and"),
        ("a.txt", JSON_LINES, "a.txt must be plain text, and is JSON"),
        ("a", ' [ {"text": "one"}]', "a must be plain text, and is JSON"),
        ("a.ipynb", '{\n "cells": []}', "a.ipynb must be plain text, and is JSON"),
    ],
)
def test_what_is_no_text_to_train_on_is_refused_with_what_would_do(
    tmp_path: Path, name: str, content: str, says: str
) -> None:
    path = _file(tmp_path, name, content)
    with pytest.raises(DataError, match=re.escape(says)) as refusal:
        texts(path)
    assert "make a .jsonl file of it" in str(refusal.value)


def test_prose_and_code_may_begin_with_json(tmp_path: Path) -> None:
    for name in ("a.md", "a.py"):
        assert texts(_file(tmp_path, name, JSON_LINES)) == [JSON_LINES]


def test_what_a_folder_has_besides_text_is_told(tmp_path: Path) -> None:
    for name in ("a.txt", "B.TXT", "a.csv", "b.CSV", "a.gz", "Makefile"):
        _file(tmp_path, name, name)
    _file(tmp_path, "package.json", '{"name": "x"}')
    assert texts(tmp_path) == ["B.TXT", "a.txt"]
    told = corpus.left_out([str(tmp_path), str(tmp_path / "a.txt")])
    assert told.startswith(
        "files of data.paths that are left out, no text by their names: .csv (2)"
    )
    for part in (".gz (1)", ".json (1)", "no suffix (1)"):
        assert part in told
    assert corpus.left_out([str(tmp_path / "a.txt")]) == ""


@pytest.mark.parametrize("target", ["elsewhere", ".", ".."])
def test_a_link_to_a_folder_in_a_folder_is_refused_and_not_left_out(
    tmp_path: Path, target: str
) -> None:
    folder = tmp_path / "folder"
    (tmp_path / "elsewhere").mkdir()
    folder.mkdir()
    _file(folder, "a.txt", "a")
    (folder / "more").symlink_to(f"../{target}" if target == "elsewhere" else target)
    with pytest.raises(DataError, match=r"more must not be a link to a folder: name that folder"):
        texts(folder)
    (tmp_path / "link").symlink_to("folder/real")
    (folder / "more").rename(tmp_path / "aside")
    (folder / "real").mkdir()
    _file(folder / "real", "b.txt", "b")
    assert texts(tmp_path / "link") == ["b"]
