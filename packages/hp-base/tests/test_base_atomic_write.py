"""Files and folders that are whole or not there, whoever writes, cleans or dies."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hp_base import remove_unfinished, replace_file
from hp_base.atomic_write import new_folder


def _write_beside_cleaners(folder: Path, write: Callable[[int], None]) -> None:
    """Write 400 times, while two threads remove what they take for leftovers."""
    ended = threading.Event()

    def write_all() -> None:
        for number in range(400):
            write(number)

    def clean() -> None:
        while not ended.is_set():
            remove_unfinished(folder)

    with ThreadPoolExecutor(3) as pool:
        cleaners = [pool.submit(clean) for _ in range(2)]
        try:
            pool.submit(write_all).result()
        finally:
            ended.set()
        for cleaner in cleaners:
            cleaner.result()


def test_whoever_cleans_takes_nothing_from_whoever_writes(tmp_path: Path) -> None:
    """A draft may be taken for a leftover between its beginning and its lock."""
    _write_beside_cleaners(
        tmp_path, lambda number: replace_file(tmp_path / "file", str(number).encode())
    )
    assert [path.read_text() for path in tmp_path.iterdir()] == ["399"]


def test_whoever_cleans_takes_no_folder_from_whoever_fills_one(tmp_path: Path) -> None:
    """A draft may be gone before it is opened."""

    def fill(number: int) -> None:
        with new_folder(tmp_path / f"folder-{number}") as draft:
            (draft / "file").write_text(str(number))

    _write_beside_cleaners(tmp_path, fill)
    texts = {path.name: (path / "file").read_text() for path in tmp_path.iterdir()}
    assert texts == {f"folder-{number}": str(number) for number in range(400)}
