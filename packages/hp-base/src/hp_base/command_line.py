"""Parsers of command lines, files and folders that flags name, and output of commands."""

import argparse
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from hp_base.atomic_write import replace_file
from hp_base.errors import ConfigError, HpError
from hp_base.folder import why_not


class Parser(argparse.ArgumentParser):
    """A parser that raises an error of one line for a wrong command line."""

    def error(self, message: str) -> NoReturn:
        """Refuse a command line.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message} (see {self.prog} --help)")


def say(text: str) -> None:
    """Write lines to standard output, and flush it."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """Write lines to standard error, and flush it."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def require_files(options: argparse.Namespace, *names: str) -> None:
    """Check that files can be written, before a command computes their content.

    Args:
        options: Parsed flags.
        names: Names of flags for files, without ``--``; a flag without a value is not checked.

    Raises:
        ConfigError: If a file cannot be written; names the flag.
    """
    for name in names:
        path = getattr(options, name)
        if path:
            try:
                _require_place(Path(path))
            except (OSError, ValueError) as error:
                raise _unwritten(f"--{name}", path, error) from None


def require_folder(flag: str, path: str | None) -> None:
    """Make a folder for results of a command, if a flag names one and it does not exist.

    Raises:
        ConfigError: If the folder cannot be made or written to; names the flag.
    """
    if not path:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        _require_place(Path(path) / "x")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} ({path}) must be a writable folder: {why_not(error)}") from None


def write_named(flag: str, path: str, text: str) -> None:
    """Write a file that a flag names in one step, or write to a device such as /dev/stdout.

    Raises:
        ConfigError: When it cannot be written.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():
            Path(path).write_text(text, encoding="utf-8")  # such as /dev/stdout
        else:
            replace_file(Path(path), text.encode())
    except (OSError, ValueError) as error:
        raise _unwritten(flag, path, error) from None


@contextmanager
def scratch(prefix: str, keep: str | None = None) -> Iterator[Path]:
    """Yield a folder for runs: a temporary one, which stays after a failure, or one to keep.

    Args:
        prefix: Prefix of the name of a temporary folder.
        keep: Folder to make and keep; None: a temporary one.

    Raises:
        ConfigError: When the folder to keep cannot be made.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix)) if keep is None else new_folder(keep)
    ended = False
    try:
        yield folder
        ended = True
    except HpError as error:
        ended = error.exit_code > 128  # a user has stopped it
        raise
    finally:
        if ended and keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def new_folder(keep: str) -> Path:
    """Make the folder that ``--keep`` names.

    Raises:
        ConfigError: When it cannot be made, or is there.
    """
    folder = Path(keep)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        reason = error.strerror
        raise ConfigError(f"--keep ({keep}) must be a folder that can be made: {reason}") from None
    return folder


def _require_place(path: Path) -> None:
    if path.is_dir():
        raise _error(errno.EISDIR)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise _error(errno.ENOTDIR if folder.exists() else errno.ENOENT)
    is_special = path.exists() and not path.is_file()
    if not os.access(path if is_special else folder, os.W_OK):
        raise _error(errno.EACCES)


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _unwritten(flag: str, path: str, error: Exception) -> ConfigError:
    return ConfigError(f"{flag} ({path}) must be a file that can be written: {why_not(error)}")
