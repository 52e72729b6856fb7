"""Tokens that runs of this user share instead of making them again.

An entry is a folder as in a run directory, named by a digest of everything that determines the
tokens. It is copied, and compared with its digests meanwhile: a damaged one is removed, and made
again.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hp_base.atomic_write import new_folder, remove_unfinished
from hp_base.errors import DataError
from hp_base.own_caches import make_own, opened_own, user_cache
from hp_data.index import INDEX, Index, read_index, write_index
from hp_data.tokens import SPLITS, TokenFile

_COPIED_BYTES = 1 << 24
_NAME = re.compile(r"[0-9a-f]{32}")
_FILES = (INDEX, *(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "sums")))


_RULES = 3
"""Version of the rules by which ids are made: 3 reads special tokens in text as text."""


def key_of(
    source: str | None, tokenizer: str | None, separator: int, eval_fraction: float | None
) -> str:
    """Return the name of an entry for a text, tokenizer, separator and held-out share."""
    decides = (_RULES, source, tokenizer, separator, eval_fraction)
    return hashlib.blake2b(repr(decides).encode(), digest_size=16).hexdigest()


class Cache:
    """A folder of entries, from which the least recently used are removed when it is too large.

    The folder is not used if it is not this user's own, or open to others. An entry that cannot be
    written is not kept.

    Args:
        folder: Folder of the entries; made with the first entry.
        limit_bytes: Most bytes of all files together.
    """

    def __init__(self, folder: Path, *, limit_bytes: int) -> None:
        self._folder, self._limit = folder, limit_bytes

    @classmethod
    def of_user(cls, *, limit_bytes: int) -> "Cache | None":
        """Return this user's cache, ``$XDG_CACHE_HOME/hp-train``; None for a limit of 0."""
        return cls(user_cache("hp-train"), limit_bytes=limit_bytes) if limit_bytes else None

    @property
    def is_empty(self) -> bool:
        """Tell whether there are no entries."""
        with self._opened() as folder:
            return folder is None or not any(folder.iterdir())

    def fetch(self, key: str, directory: Path, *, on_progress: Callable[[], None]) -> bool:
        """Copy an entry to a new folder; return False if there is no good one."""
        with self._opened() as folder:
            if folder is None or not os.path.lexists(folder / key):
                return False
            try:
                index = _index_of(folder / key)
                with new_folder(directory) as draft:
                    for split in SPLITS:
                        _copy(TokenFile(folder / key, split, index), draft, split, on_progress)
                    write_index(draft, index)
            except DataError:
                shutil.rmtree(folder / key, ignore_errors=True)
                return False
            with contextlib.suppress(OSError):
                os.utime(folder / key)
            return True

    def store(self, directory: Path, index: Index, *, on_progress: Callable[[], None]) -> None:
        """Keep a copy of a folder that has just been made, and remove entries over the limit."""
        if sum((directory / name).stat().st_size for name in _FILES) > self._limit:
            return
        with contextlib.suppress(OSError):
            make_own(self._folder)
            with self._opened() as folder:
                if folder is None:
                    return
                remove_unfinished(folder)
                with new_folder(folder / _key_of(index)) as draft:
                    for name in _FILES:
                        _copy_plain(directory / name, draft / name, on_progress)
                self._make_room(folder)

    @contextmanager
    def _opened(self) -> Iterator[Path | None]:
        """Yield the folder by its descriptor; None if it is not of this user alone."""
        with opened_own(self._folder) as descriptor:
            yield None if descriptor is None else Path(f"/proc/self/fd/{descriptor}")

    def _make_room(self, folder: Path) -> None:
        """Remove the least recently used entries until the rest is within the limit."""
        entries = [
            (entry.lstat().st_mtime_ns, entry.name, sum(f.lstat().st_size for f in entry.iterdir()))
            for entry in folder.iterdir()
            if _NAME.fullmatch(entry.name)
        ]
        total = sum(size for _, _, size in entries)
        for _, name, size in sorted(entries):
            if total <= self._limit:
                return
            shutil.rmtree(folder / name, ignore_errors=True)
            total -= size


def _index_of(entry: Path) -> Index:
    index = read_index(entry)
    if not isinstance(index, Index) or _key_of(index) != entry.name:
        raise DataError(f"{entry} must have the name of what it holds")
    return index


def _key_of(index: Index) -> str:
    return key_of(index.source, index.tokenizer, index.separator, index.eval_fraction)


def _copy_plain(path: Path, target: Path, on_progress: Callable[[], None]) -> None:
    """Copy a file that this process has written, piece by piece."""
    with path.open("rb") as source, target.open("xb") as copy:
        while data := source.read(_COPIED_BYTES):
            copy.write(data)
            on_progress()


def _copy(tokens: TokenFile, folder: Path, split: str, on_progress: Callable[[], None]) -> None:
    """Copy a split chunk by chunk, each compared with its digest."""
    (folder / f"{split}.sums").write_bytes(tokens.sums)
    with (folder / f"{split}.bin").open("xb") as file:
        for chunk in range(tokens.num_chunks):
            file.write(tokens.verified(chunk))
            on_progress()
