"""A folder for runs that are looked at and forgotten, or kept where somebody asks for it."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hp_base.errors import ConfigError, HpError


@contextmanager
def scratch(prefix: str, keep: str | None = None) -> Iterator[Path]:
    """Give a folder for runs, a new one or one to keep; after a failure the folder stays.

    Args:
        prefix: Begins the name of a new folder.
        keep: Folder to make and keep; None: one that is removed at the end.

    Raises:
        ConfigError: When the folder to keep cannot be made.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix)) if keep is None else _new_folder(keep)
    ended = False
    try:
        yield folder
        ended = True
    except HpError as error:
        ended = error.exit_code > 128  # somebody wanted that
        raise
    finally:
        if ended and keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _new_folder(keep: str) -> Path:
    folder = Path(keep)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        reason = error.strerror
        raise ConfigError(f"--keep ({keep}) must be a folder that can be made: {reason}") from None
    return folder
