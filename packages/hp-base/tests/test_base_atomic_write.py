"""Files that are whole or not there, whoever writes, cleans or dies."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hp_base import remove_unfinished, replace_file
from hp_base.atomic_write import new_folder


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


def test_whoever_cleans_takes_no_folder_from_whoever_fills_one(tmp_path: Path) -> None:
    """A draft may be gone before it is opened."""
    ended = threading.Event()

    def write() -> None:
        for number in range(400):
            with new_folder(tmp_path / f"folder-{number}") as draft:
                (draft / "file").write_text(str(number))

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
    assert sorted(int(path.name.split("-")[1]) for path in tmp_path.iterdir()) == [*range(400)]
