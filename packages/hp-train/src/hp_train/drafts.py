"""Files that are there whole or not at all, and what writers that were killed leave behind.

A file is written under a draft's name, locked as long as its writer lives, and renamed when it is
whole. A draft that nobody has locked is a leftover.
"""

import errno
import fcntl
import os
import re
from pathlib import Path
from uuid import uuid4

_DRAFT = re.compile(r"\A.+\.[0-9a-f]{32}\.tmp\Z", re.DOTALL)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step, whoever else does so: readers see the old content or the new one.

    Args:
        path: The file; it need not exist, its directory must.
        content: All of it.
    """
    while not _replace(path, content):
        pass  # taken for a leftover before it was locked


def _replace(path: Path, content: bytes) -> bool:
    draft = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    file = draft.open("xb")
    try:
        with file:
            if not try_lock(file.fileno()):
                return False
            file.write(content)
            file.flush()
            try:
                draft.replace(path)
            except FileNotFoundError:
                return False
            return True
    finally:
        draft.unlink(missing_ok=True)


def remove_drafts(directory: Path) -> None:
    """Remove what writers of :func:`replace_file` that died left in a directory.

    Nothing is removed where the file system has no locks: another node may be writing it.

    Args:
        directory: It need not exist.
    """
    found = list(directory.iterdir()) if directory.is_dir() else []
    for path in (path for path in found if _DRAFT.match(path.name)):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # it has its name by now, or is no file
            continue
        try:
            if try_lock(descriptor, without_locks=False):
                path.unlink(missing_ok=True)
        finally:
            os.close(descriptor)


def try_lock(descriptor: int, *, without_locks: bool = True) -> bool:
    """Lock a file or directory until the descriptor is closed; False if another one holds the lock.

    Args:
        descriptor: Of an open file or directory.
        without_locks: The answer where the file system has no such locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES) and without_locks
    return True
