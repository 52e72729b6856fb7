"""Packs: one file that holds several, and is whole or not there, or known to be damaged.

A pack is a zip file, without compression, behind a digest of all of it: checksums of a zip file are
of contents alone, and a flipped bit elsewhere can hide a file.
"""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from zipfile import ZipFile

from hp_base.atomic_write import closed_at_end, remove_unfinished, replacing
from hp_base.folder import DamageError, open_named

_DIGITS = 64


@contextmanager
def new_pack(path: Path) -> Iterator[ZipFile]:
    """Yield an archive to fill, which takes the place of a file in one step: see `replacing`.

    Args:
        path: Path of the file; its folder is made if it does not exist.

    Raises:
        OSError: When it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with closed_at_end(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)) as directory:
        remove_unfinished(directory)
        with replacing(directory, path.name) as file:
            file.write(bytes(_DIGITS))
            with ZipFile(file, "w", strict_timestamps=False) as archive:
                yield archive
            file.flush()
            os.pwrite(file.fileno(), _digest_from(file.fileno(), _DIGITS), 0)
        file.close()


@contextmanager
def opened_pack(path: Path) -> Iterator[ZipFile]:
    """Yield the archive in a pack.

    Raises:
        DamageError: When it is not as it was written.
        FileNotFoundError: When there is none.
        OSError: When it cannot be read.
        ValueError: When it is no regular file.
    """
    with closed_at_end(open_named(path)) as descriptor:
        if os.pread(descriptor, _DIGITS, 0) != _digest_from(descriptor, _DIGITS):
            raise DamageError(f"{path.name} is damaged")
        with os.fdopen(os.dup(descriptor), "rb") as file, ZipFile(file) as archive:
            yield archive


def digest_of(path: Path) -> str:
    """Return a digest of the content of a regular file; empty: there is none that can be read."""
    try:
        with closed_at_end(open_named(path)) as descriptor:
            return _digest_from(descriptor).decode()
    except (OSError, ValueError):
        return ""


def _digest_from(descriptor: int, begin: int = 0) -> bytes:
    """Return a digest of a file from a byte on, in `_DIGITS` digits."""
    with FileIO(descriptor, closefd=False) as file:
        file.seek(begin)
        return hashlib.file_digest(file, "sha256").hexdigest().encode()
