"""Processes that end with the program that started them: commands with a time limit, and ranks."""

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

LAUNCHER_VARIABLE = "HP_TRAIN_LAUNCHER_PID"
"""Environment variable of the launcher's process id, for the server that ranks are forked from."""
_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 1.0
_LOG_BYTES = 1 << 20
_SHOWN_LINES, _SHOWN_LETTERS = 40, 4000
_RANK = r"(?:\[rank\d+\]: )?"
_RAISED = re.compile(rf"Traceback \(most recent call last\):\n(?:{_RANK}  .*\n)*{_RANK}(\w.*)")


def status_of(
    command: Sequence[str],
    log: Path,
    *,
    seconds: float,
    env: Mapping[str, str],
    has_enough: Callable[[], bool] = lambda: False,
) -> int | None:
    """Run a command to its end, or end it after a time, with all processes that it started.

    Args:
        command: Command to run, in a session of its own.
        log: File for its output.
        seconds: Seconds after which it is ended.
        env: Environment variables of the process.
        has_enough: Called once a second; tells whether the command may be ended before.

    Returns:
        Exit status of the command, negative: minus the signal that ended it; None: out of time,
        or ended because of `has_enough`.

    Raises:
        OSError: When it cannot be started.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(  # noqa: S603 - as its user gave it
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        end = time.monotonic() + seconds
        try:
            while (left := end - time.monotonic()) > 0 and not has_enough():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(left, _POLL_SECONDS))
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a session, after a time for the command itself to end on SIGTERM."""
    if process.poll() is None:
        _signal(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    _signal(process.pid, signal.SIGKILL)
    process.wait()


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def last_lines(log: Path) -> str:
    """Return the end of the output of a command, and the first error that it raised."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    shown = "\n".join(text.splitlines()[-_SHOWN_LINES:])[-_SHOWN_LETTERS:]
    raised = _RAISED.search(text)
    return shown if raised is None or raised[1] in shown else f"{raised[1]}\n...\n{shown}"


def die_with(pid: int) -> None:
    """End this process when its parent or the launcher ends, for any reason.

    The kernel ends this process with its parent, which ends with the launcher likewise. In case
    the parent does not, a thread waits for the launcher itself.
    """
    kill_when_parent_dies()
    try:
        launcher = os.pidfd_open(pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a kernel without pidfd; this process still ends with its parent
        return
    threading.Thread(target=_exit_after, args=(launcher,), daemon=True).start()


def kill_when_parent_dies() -> None:
    """Ask the kernel of Linux to kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _exit_after(launcher: int) -> None:
    poll = select.poll()
    poll.register(launcher, select.POLLIN)
    poll.poll()
    os._exit(1)
