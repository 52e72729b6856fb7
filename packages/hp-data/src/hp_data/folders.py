"""Folders that are there whole or not at all, whoever makes them at the same time.

As with files: a folder is filled under another name, locked as long as its maker lives, and renamed
when it is whole. One that nobody has locked is a leftover, which
:func:`hp_base.atomic_write.remove_unfinished` removes.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from hp_base.atomic_write import try_lock

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Make a folder in one step; give where to fill it. If there is one by then, that one stays.

    Args:
        target: Its path; what it is in exists.
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
        descriptor = os.open(draft, _FLAGS)
        # Between the two calls it may have been taken for a leftover.
        if try_lock(descriptor) and draft.exists():
            return descriptor, draft
        os.close(descriptor)
