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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

LAUNCHER_VARIABLE = "HP_TRAIN_LAUNCHER_PID"
"""Environment variable of the launcher's process id, for the server that ranks are forked from."""
_PR_SET_PDEATHSIG = 1
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 1.0
_LOG_BYTES = 1 << 20
_SHOWN_LINES, _SHOWN_LETTERS = 40, 4000
_TRACEBACK = re.compile(
    r"^(?P<rank>(?:\[rank\d+\]: ?)?)Traceback \(most recent call last\):\n"
    r"(?:(?P=rank)(?:[ \t].*)?\n)+(?P=rank)(?P<raised>[^\s\[].*)\n?"
    r"(?:(?P=rank)[ \t].*\n?)*",
    re.MULTILINE,
)
"""A traceback, each line of it with the rank or without."""
_OF_LAUNCHERS = re.compile(r"^[\w.]*\.ChildFailedError:|/accelerate/commands/", re.MULTILINE)
_SAID_BY_LAUNCHERS = re.compile(
    r"^\[?[EWI]\d{4} .*torch/distributed/(?:elastic|run|launcher).*\n", re.MULTILINE
)
_BOX = re.compile(r"^=+\n[^\n]* FAILED\n-+\nFailures:\n(?s:.*?)\n=+\n?", re.MULTILINE)
_ROOT = re.compile(
    r"Root Cause.*?rank *: (\d+).*?exitcode *: (-?\d+) \([^)]*\) *(\(\w+\))?", re.DOTALL
)


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
    """Return the traceback that ended a command, and then the end of the rest of its output.

    Of several ranks it is that of the rank that failed first; what launchers of ranks say of that,
    such as torchrun, is left out, but which rank ended first and how.
    """
    text = _end_of(log)
    found, root = _own_traceback(text), _ROOT.search(text)
    own, rest = (found[0], text.replace(found[0], "", 1)) if found else ("", text)
    if root is not None and own.startswith("[rank"):
        # A rank that a signal has ended came first: others have seen their connections end.
        is_later = root[3] is not None and not own.startswith(f"[rank{root[1]}]")
        own, rest, root = ("", text, root) if is_later else (own, rest, None)
    if root is not None:
        own += f"rank {root[1]} ended first, with status {root[2]} {root[3] or ''}".rstrip()
    for whole, _, _ in _tracebacks(rest, of_launchers=True):
        rest = rest.replace(whole, "", 1)
    rest = _SAID_BY_LAUNCHERS.sub("", _BOX.sub("", rest))
    shown = ["\n".join(part.strip("\n").split("\n")[-_SHOWN_LINES:]) for part in (own, rest)]
    return "\n...\n".join(part[-_SHOWN_LETTERS:] for part in shown if part)


def raised_in(log: Path) -> str:
    """Return the exception that ended a command, as its traceback says; empty: none did."""
    found = _own_traceback(_end_of(log))
    return "" if found is None else found[1]


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _own_traceback(text: str) -> tuple[str, str] | None:
    """Find the traceback of the rank that failed first: itself, and its exception's first line.

    Ranks that print theirs with their number are told apart; the last of each has ended it, and the
    one that was printed first has come first.
    """
    own = _tracebacks(text, of_launchers=False)
    last = {rank: (whole, raised) for whole, raised, rank in own}
    return min(last.values(), key=lambda found: text.find(found[0]), default=None)


def _tracebacks(text: str, *, of_launchers: bool) -> Iterator[tuple[str, str, str]]:
    """Yield tracebacks, the first line of the exception, and what their lines begin with."""
    for found in _TRACEBACK.finditer(text):
        if bool(_OF_LAUNCHERS.search(found[0])) == of_launchers:
            yield found[0], found["raised"], found["rank"]


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
