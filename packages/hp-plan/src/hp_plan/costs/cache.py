"""A cache of learned costs on disk, for all runs of a user; a hit needs no import of torch.

An entry is a JSON file, named by a digest of everything that its content depends on: the key, and
the sources and versions of the packages that learn. An unreadable entry is a miss, and failed
writes are ignored. The ranks of a run all ask for the same: while one process of this user learns,
others wait for its entry.
"""

import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import msgspec

from hp_base.atomic_write import names_in, replacing
from hp_base.folder import DamageError, read_whole
from hp_base.own_caches import make_own, opened_own, user_cache

FOLDER = "hp-plan"
_SOURCES = (
    "hp_base",
    "hp_context",
    "hp_dry",
    "hp_expert",
    "hp_plan",
    "hp_platform",
    "hp_trainer",
    "hp_transformers",
)
_PACKAGES = ("torch", "triton")
_MOST_BYTES = 1 << 24
_MOST_ENTRIES = 256
_WAIT_SECONDS = 20.0  # at most, for another process that learns: it may have been stopped
_POLL_SECONDS = 0.02

T = TypeVar("T")


def cached(key: object, kind: type[T], learn: Callable[[], T]) -> T:
    """Return the entry of a key; on a miss, learn and store it.

    Args:
        key: Everything that the result depends on besides the code, of types that JSON has.
        kind: Type of the result, of types that JSON can be converted to.
        learn: Function that computes the result.
    """
    name = _name(kind.__name__, key)
    found = _read(name, kind)
    if found is not None:
        return found
    with _turn() as folder:
        found = _read(name, kind)
        if found is None:
            found = learn()
            if folder is not None:
                _store(folder, name, msgspec.json.encode(found))
    return found


def _read(name: str, kind: type[T]) -> T | None:
    with opened_own(user_cache(FOLDER)) as folder:
        if folder is not None:
            with suppress(OSError, DamageError, msgspec.DecodeError, RecursionError):
                return msgspec.json.decode(read_whole(folder, name, limit=_MOST_BYTES), type=kind)
    return None


@contextmanager
def _turn() -> Iterator[int | None]:
    """Lock the folder, and yield its descriptor; None: there is no folder."""
    with suppress(OSError):
        make_own(user_cache(FOLDER))
    with opened_own(user_cache(FOLDER)) as folder:
        deadline = time.monotonic() + _WAIT_SECONDS
        while folder is not None and time.monotonic() < deadline:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(_POLL_SECONDS)
        yield folder


def _store(folder: int, name: str, content: bytes) -> None:
    with suppress(OSError):
        with replacing(folder, name) as file:
            file.write(content)
        file.close()
        _make_room(folder)


def _make_room(folder: int) -> None:
    """Remove the oldest entries above the maximum number."""
    entries = [
        (os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns, name)
        for name in names_in(folder)
        if name.endswith(".json")
    ]
    for _, name in sorted(entries)[:-_MOST_ENTRIES]:
        os.unlink(name, dir_fd=folder)


def _name(kind: str, key: object) -> str:
    text = msgspec.json.encode([kind, key, _code()])
    return f"{hashlib.blake2b(text, digest_size=16).hexdigest()}.json"


@cache
def _code() -> str:
    """Return a digest of the versions and sources of the packages that learn."""
    parts: list[object] = [sys.version, *map(_version, _PACKAGES)]
    for name in _SOURCES:
        spec = find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            parts += sorted(_files(Path(folder)))
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the sources below a folder, with their sizes and times of last change."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files(Path(entry.path))
            elif entry.name.endswith(".py"):
                about = entry.stat()
                yield entry.path, about.st_size, about.st_mtime_ns
