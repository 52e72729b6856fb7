"""Files that are whole or not there, whoever writes, cleans or dies."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hp_base import Folder, replace_file
from hp_base.atomic_write import remove_unfinished, replacing


def fail_halfway(directory: int) -> None:
    with replacing(directory, "file") as file:
        file.write(b"half")
        raise RuntimeError


def test_a_writer_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    replace_file(tmp_path / "file", b"old")
    with Folder.open(tmp_path) as folder, pytest.raises(RuntimeError):
        fail_halfway(folder.descriptor)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"
    replace_file(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"new"


def test_whoever_cleans_takes_nothing_from_whoever_writes(tmp_path: Path) -> None:
    """A draft may be taken for a leftover between its beginning and its lock."""
    ended = threading.Event()

    def write() -> None:
        for number in range(400):
            replace_file(tmp_path / "file", str(number).encode())

    def clean() -> None:
        while not ended.is_set():
            remove_unfinished(tmp_path)

    with ThreadPoolExecutor(3) as pool:
        cleaners = [pool.submit(clean) for _ in range(2)]
        try:
            pool.submit(write).result()
        finally:
            ended.set()
        for cleaner in cleaners:
            cleaner.result()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["399"]
