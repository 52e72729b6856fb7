"""The beginning and the end of a command: checks of the machine, and its exit status."""

import os
import resource
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from hp_base.command_line import warn
from hp_base.environment import speaks_for_node
from hp_base.errors import HpError, MachineError, told
from hp_base.signals import ignore_stops
from hp_base.streams import own_streams

_LEAST_FILES = 64


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
        MachineError: If the current folder is gone, /proc is missing, or the limit of open files is
            too low.
    """
    try:
        os.getcwd()  # noqa: PTH109 - the call is the check
    except FileNotFoundError:
        raise MachineError(
            "the current folder is gone, it was removed: cd to one that is there"
        ) from None
    if not os.path.exists("/proc/self/fd"):  # noqa: PTH110
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
