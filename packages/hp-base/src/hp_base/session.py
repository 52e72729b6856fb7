"""A command in a session of its own, of which nothing is left when its time is up. No torch."""

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_GRACE_SECONDS = 3.0
_LOG_BYTES = 1 << 20
_SHOWN_LINES, _SHOWN_LETTERS = 40, 4000
_RANK = r"(?:\[rank\d+\]: )?"
_RAISED = re.compile(rf"Traceback \(most recent call last\):\n(?:{_RANK}  .*\n)*{_RANK}(\w.*)")


def status_of(
    command: Sequence[str], log: Path, *, seconds: float, env: Mapping[str, str]
) -> int | None:
    """Run a command to its end, or end it.

    Args:
        command: Command to run, in a session of its own, of which nothing is left.
        log: File for what it prints.
        seconds: Seconds after which it is ended.
        env: Environment variables of the process.

    Returns:
        Its exit status, negative: the signal that ended it; None: its time was up.

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
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a session: politely where the process itself is alive."""
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
    """Cut out the end of what a command printed, and what was raised first."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    shown = "\n".join(text.splitlines()[-_SHOWN_LINES:])[-_SHOWN_LETTERS:]
    raised = _RAISED.search(text)
    return shown if raised is None or raised[1] in shown else f"{raised[1]}\n...\n{shown}"
