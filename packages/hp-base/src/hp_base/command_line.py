"""Commands: their command lines, the files and folders that flags name, output and exit status."""

import argparse
import errno
import os
import resource
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from hp_base.atomic_write import replace_file
from hp_base.environment import speaks_for_node
from hp_base.errors import ConfigError, HpError, MachineError, told
from hp_base.folder import why_not
from hp_base.signals import ignore_stops
from hp_base.streams import own_streams

_LEAST_FILES = 64


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


def run_command(
    run: Callable[[Sequence[str]], int],
    argv: Sequence[str] | None = None,
    *,
    on_error: Callable[[str], None] = lambda _: None,
) -> int:
    """Run a command to its end; write an error as one line to standard error.

    Args:
        run: Function that runs the command with its arguments, and returns its exit status.
        argv: Arguments; None: those of this process, which ends after the command.
        on_error: Function that is also called with the line of an error.

    Returns:
        Exit status, see `hp_base.errors`.
    """
    if argv is None:
        own_streams()
    try:
        try:
            if argv is None:
                _look_at_machine()
            status = run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # also what --help says
    except HpError as error:
        status = _refused(error, on_error)
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # `hp config | head`
        status = 141
    except (OSError, MemoryError, ImportError) as error:
        status = _refused(MachineError(_of_the_machine(error)), on_error)
    if argv is None:
        ignore_stops()
    return status


def _look_at_machine() -> None:
    """Check the machine for conditions under which torch or libraries would abort.

    Raises:
        MachineError: If the current folder is gone, /proc is missing on Linux, or the limit of open
            files is too low.
    """
    try:
        os.getcwd()  # noqa: PTH109 - the call is the check
    except FileNotFoundError:
        raise MachineError(
            "the current folder is gone, it was removed: cd to one that is there"
        ) from None
    if sys.platform == "linux" and not os.path.exists("/proc/self/fd"):  # noqa: PTH110
        raise MachineError("/proc must be mounted: processes of a run meet there")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _LEAST_FILES:
        if 0 <= hard < _LEAST_FILES:
            raise MachineError(
                f"the limit of open files ({hard}) must be at least {_LEAST_FILES}: ulimit -n"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (_LEAST_FILES, hard))


def _refused(error: HpError, on_error: Callable[[str], None]) -> int:
    line = f"error: {error}"
    if speaks_for_node():
        warn(line)
    on_error(line)
    return error.exit_code


def _of_the_machine(error: Exception) -> str:
    """Return an error from outside of the program in one line, with the place that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{told(error, 400)} (in {Path(frame.filename).name}:{frame.lineno})"
