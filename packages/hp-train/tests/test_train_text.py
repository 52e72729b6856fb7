"""Text that `hp train --dry-run` is given: told in one line what is no text to train on."""

import gzip
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hp_train.cli import main

JSON_LINES = '{"text": "one"}\n{"text": "two"}\n'


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """End a test that blocks."""
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


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
    tmp_path: Path,
    make: Callable[[Path], None],
    inside: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a.txt"
    make(path)
    with within(30):
        status = main(["train", "--dry-run", "--data", str(tmp_path if inside else path)])
    error = capsys.readouterr().err
    assert status == (3 if inside else 2), error
    assert "must be a regular file or a folder" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", gzip.compress(b"text" * 1000, mtime=0), "it seems to be gzip"),
        ("a.jsonl", b'{"content": "text", "title": "text"}\n', "a.jsonl:1: must be an object with"),
        ("a.jsonl", b'["text"]\n' * 50_000, "a.jsonl:1: must be an object with a string"),
        ("a.txt", b"", "must not be empty"),
        ("folder/a.gz", b"\x1f\x8b", "must have files of text"),
        ("folder/a.txt", b"", "must not be empty"),
        ("a.txt", b"\x00" * 100, "a byte that is zero"),
    ],
)
def test_a_dry_run_looks_at_the_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, says: str
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    given = path.parent if "/" in name else path
    assert main(["train", "--dry-run", "--data", str(given)]) == 3
    answer = capsys.readouterr()
    assert says in answer.err
    assert answer.err.count("\n") == 1
    assert not answer.out


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.json",
            '{\n  "text": "one"\n}',
            "must be an object of JSON per line, or a list",
        ),
        ("a.txt", JSON_LINES, "a.txt must be plain text, and is JSON"),
        ("a", ' [ {"text": "one"}]', "a must be plain text, and is JSON"),
        ("a.ipynb", '{\n "cells": []}', "a.ipynb must be plain text, and is JSON"),
        ("a.csv", "title,body\none,1\n", "a.csv"),
        ("a.TSV", "title\tbody\none\t1\n", "a.TSV"),
        ("a.parquet", "PAR1", "a.parquet"),
    ],
)
def test_what_is_no_text_to_train_on_is_refused_with_what_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, says: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert main(["train", "--dry-run", "--data", str(path)]) == 3
    assert says in capsys.readouterr().err
