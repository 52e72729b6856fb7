"""Folders of this user in ``$XDG_CACHE_HOME``, which are used only where nobody else can write."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hp_base.atomic_write import closed_at_end

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def user_cache(name: str) -> Path:
    """Return the path of a folder for what any run may take instead of making it again.

    A user without a home has none: what this names then is not there, and cannot be made.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(home):  # noqa: PTH117
        return Path(home) / name
    try:
        return Path.home() / ".cache" / name
    except RuntimeError:
        return Path(os.devnull) / name


def make_own(path: Path) -> None:
    """Make such a folder, if it is not there.

    Raises:
        OSError: If it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def opened_own(path: Path) -> Iterator[int | None]:
    """Open a folder; give None where it is not there, not this user's own or open to others."""
    try:
        descriptor = os.open(path, _FLAGS)
    except OSError:
        yield None
        return
    with closed_at_end(descriptor):
        about = os.fstat(descriptor)
        is_own = about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o077
        yield descriptor if is_own else None
