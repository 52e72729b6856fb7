"""Parsers of command lines, files that they name to be written, and what commands say."""

import argparse
import errno
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from hp_base.atomic_write import replace_file
from hp_base.errors import ConfigError
from hp_base.folder import why_not


class Parser(argparse.ArgumentParser):
    """Answers a wrong command line in one line.

    Args:
        see: Command that shows its help; empty: the program with ``--help``.
        **options: Those of `argparse.ArgumentParser`.
    """

    def __init__(self, *, see: str = "", **options: Any) -> None:
        super().__init__(**options)
        self._see = see or f"{self.prog} --help"

    def error(self, message: str) -> NoReturn:
        """Refuse a command line.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message} (see {self._see})")


def say(text: str) -> None:
    """Write lines to standard output at once, whoever reads them."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def warn(text: str) -> None:
    """Write lines to standard error at once."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def require_files(options: argparse.Namespace, *names: str) -> None:
    """Refuse files that cannot be written, before a command works for what is to stand in them.

    Args:
        options: Parsed flags.
        names: Names of flags that take a file, or none, without ``--``.

    Raises:
        ConfigError: Naming the flag.
    """
    for name in names:
        path = getattr(options, name)
        if path:
            try:
                _require_place(Path(path))
            except (OSError, ValueError) as error:
                raise _unwritten(f"--{name}", path, error) from None


def require_folder(flag: str, path: str | None) -> None:
    """Make a folder for what a command will have found, unless it is there or none is named.

    Raises:
        ConfigError: Naming the flag, when it cannot be made or written to.
    """
    if not path:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        _require_place(Path(path) / "x")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} ({path}) must be a writable folder: {why_not(error)}") from None


def write_named(flag: str, path: str, text: str) -> None:
    """Write a file that a flag names, in one step; what is no regular file is written through.

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
