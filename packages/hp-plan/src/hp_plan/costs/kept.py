"""Costs that this user has learned before, by other runs: taken, torch need not be imported.

An entry is a file of JSON, named by a digest of all that decides about what is in it: what was
asked, and the sources and versions of what has answered. What cannot be read is learned again, and
what cannot be written is not kept. The ranks of a run all ask for the same: while one of this
user's processes learns, others wait for what it will have written.
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
from hp_base.user_cache import make_own, opened_own, user_cache

FOLDER = "hp-plan"
_SOURCES = (
    "hp_context",
    "hp_expert",
    "hp_plan",
    "hp_platform",
    "hp_trainer",
    "hp_transformers",
)
_PACKAGES = ("torch", "triton")
_MOST_BYTES = 1 << 24
_MOST_ENTRIES = 256
_WAIT_SECONDS = 20.0  # for what others learn; one of them may have been stopped
_LOOK_SECONDS = 0.02

T = TypeVar("T")


def kept(asked: object, kind: type[T], learn: Callable[[], T]) -> T:
    """Return what was learned before, or is now.

    Args:
        asked: All that decides about it besides the code, as JSON can have it.
        kind: What it is, of types that JSON can be converted to.
        learn: Learns it.
    """
    name = _name(kind.__name__, asked)
    found = _read(name, kind)
    if found is not None:
        return found
    with _turn():
        found = _read(name, kind)
        if found is None:
            found = learn()
            _store(name, msgspec.json.encode(found))
    return found


def _read(name: str, kind: type[T]) -> T | None:
    with opened_own(user_cache(FOLDER)) as folder:
        if folder is not None:
            with suppress(OSError, DamageError, msgspec.DecodeError, RecursionError):
                return msgspec.json.decode(read_whole(folder, name, limit=_MOST_BYTES), type=kind)
    return None


@contextmanager
def _turn() -> Iterator[None]:
    """Have the folder to oneself, where there is one."""
    with suppress(OSError):
        make_own(user_cache(FOLDER))
    with opened_own(user_cache(FOLDER)) as folder:
        deadline = time.monotonic() + _WAIT_SECONDS
        while folder is not None and time.monotonic() < deadline:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(_LOOK_SECONDS)
        yield


def _store(name: str, content: bytes) -> None:
    with suppress(OSError):
        make_own(user_cache(FOLDER))
        with opened_own(user_cache(FOLDER)) as folder:
            if folder is None:
                return
            with replacing(folder, name) as file:
                file.write(content)
            file.close()
            _make_room(folder)


def _make_room(folder: int) -> None:
    """Remove the oldest entries of too many."""
    entries = [
        (os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime_ns, name)
        for name in names_in(folder)
        if name.endswith(".json")
    ]
    for _, name in sorted(entries)[:-_MOST_ENTRIES]:
        os.unlink(name, dir_fd=folder)


def _name(kind: str, asked: object) -> str:
    text = msgspec.json.encode([kind, asked, _code()])
    return f"{hashlib.blake2b(text, digest_size=16).hexdigest()}.json"


@cache
def _code() -> str:
    """Digest of the versions and sources of what learns: a file that was changed has another."""
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
    """Sources below a folder, with their sizes and the times of their last changes."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _files(Path(entry.path))
            elif entry.name.endswith(".py"):
                about = entry.stat()
                yield entry.path, about.st_size, about.st_mtime_ns
