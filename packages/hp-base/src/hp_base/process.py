"""The beginning and the end of a command: what it finds on the machine, and its exit status."""

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
    """Run a command to its end; what it fails of is one line on standard error.

    Args:
        run: Runs it, given its arguments; returns its exit status.
        argv: Arguments; None: those of this process, which is then at its end.
        on_error: Also told the line of an error.

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
    """See to what every process of a command finds on this machine.

    Raises:
        MachineError: When the current folder is gone: torch itself ends a process there. Or when
            so few files may be open that libraries abort.
    """
    try:
        os.getcwd()  # noqa: PTH109 - it is looked for, not used
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
    """Say what went wrong outside of a program, in a line with the place that met it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{told(error, 400)} (in {Path(frame.filename).name}:{frame.lineno})"
