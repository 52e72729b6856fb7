"""Files and folders that exist whole or not at all, and removal of what killed writers left.

A file or folder is written under another name, locked as long as its writer lives, and renamed when
it is whole. An unfinished one without a lock is a leftover.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_UNFINISHED = re.compile(r"\A.+\.[0-9a-f]{32}\.tmp\Z", re.DOTALL)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file in one step: see :func:`replacing`.

    Args:
        path: Path of the file, in a directory that exists.
        content: All bytes of the file.
    """
    with closed_at_end(os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)) as directory:
        with replacing(directory, path.name) as file:
            file.write(content)
        file.close()


@contextmanager
def replacing(directory: int, name: str) -> Iterator[IO[bytes]]:
    """Yield a new file that gets its name at the end of the context, if nothing is raised.

    Readers see all of the old content or all of the new content. Several writers may do so at the
    same time: the last one counts.

    Args:
        directory: Descriptor of the directory.
        name: Name of the file in that directory.

    Yields:
        The file, which stays open until the caller closes it.
    """
    unfinished, file = new_unfinished(directory, name)
    try:
        yield file
        file.flush()
        os.rename(unfinished, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        file.close()
        with suppress(FileNotFoundError):
            os.unlink(unfinished, dir_fd=directory)
        raise


def new_unfinished(directory: int, name: str) -> tuple[str, IO[bytes]]:
    """Make an empty file under another name, locked, so that it is not taken for a leftover."""
    while True:
        unfinished = f"{name}.{uuid4().hex}.tmp"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        descriptor = os.open(unfinished, flags, 0o666, dir_fd=directory)
        if try_lock(descriptor) and os.fstat(descriptor).st_nlink:
            return unfinished, os.fdopen(descriptor, "r+b")
        os.close(descriptor)  # taken for a leftover before it was locked


def remove_unfinished(directory: Path | int) -> None:
    """Remove the unfinished files and folders of dead writers from a directory.

    Nothing is removed where the file system has no locks: a writer may be on another node.

    Args:
        directory: Descriptor of the directory, or its path, which need not exist.
    """
    if not isinstance(directory, int):
        with (
            suppress(FileNotFoundError),
            closed_at_end(os.open(directory, os.O_RDONLY | os.O_DIRECTORY)) as descriptor,
        ):
            remove_unfinished(descriptor)
        return
    for name in filter(_UNFINISHED.match, names_in(directory)):
        try:
            about = os.stat(name, dir_fd=directory, follow_symlinks=False)
            is_folder = stat.S_ISDIR(about.st_mode)
            kind = os.O_RDONLY | os.O_DIRECTORY if is_folder else os.O_RDWR
            flags = kind | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(name, flags, dir_fd=directory)
        except OSError:  # renamed meanwhile, or neither a file nor a folder
            continue
        with closed_at_end(descriptor):
            if not try_lock(descriptor, without_locks=False):
                continue
            if is_folder:
                shutil.rmtree(name, ignore_errors=True, dir_fd=directory)
            else:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make a folder in one step: yield a draft to fill, which is renamed at the end.

    If the folder exists by then, it stays, and the draft is removed.

    Args:
        target: Path of the folder, in a directory that exists.
    """
    descriptor, draft = _locked_draft(target)
    try:
        yield draft
        try:
            draft.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        os.close(descriptor)


def _locked_draft(target: Path) -> tuple[int, Path]:
    while True:
        draft = target.with_name(f"{target.name}.{uuid4().hex}.tmp")
        draft.mkdir()
        # Another process may remove it as a leftover before it is opened, or before it is locked.
        try:
            descriptor = os.open(draft, _FOLDER)
        except FileNotFoundError:
            continue
        if try_lock(descriptor) and draft.exists():
            return descriptor, draft
        os.close(descriptor)


def try_lock(descriptor: int, *, without_locks: bool = True) -> bool:
    """Lock a file or directory until the descriptor is closed; return False if it is locked.

    Args:
        descriptor: Descriptor of an open file or directory.
        without_locks: Result where the file system has no such locks.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EACCES) and without_locks
    return True


def lock_holder(descriptor: int) -> str:
    """Describe the process that holds the lock of an open file; empty where it is unknown.

    It is unknown on another node of a network file system, for example, or in another container.
    """
    about = os.fstat(descriptor)
    place = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
        fields = next(line.split() for line in lines if "FLOCK" in line and place in line.split())
        pid = int(fields[4])
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        user = Path(f"/proc/{pid}").stat().st_uid
    except (OSError, StopIteration, ValueError, IndexError):
        return ""
    shown = "".join(c if c.isprintable() else " " for c in command).strip()[:120]
    return f"process {pid} of user {user} ({shown})"


@contextmanager
def closed_at_end(descriptor: int) -> Iterator[int]:
    """Yield an open descriptor, and close it at the end of the context."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def names_in(directory: int) -> list[str]:
    """List the names in an open directory."""
    return os.listdir(directory)
