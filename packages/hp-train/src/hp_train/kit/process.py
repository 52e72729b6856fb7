"""Run a case in a process of its own: it may crash, hang or print whatever it likes. No torch."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from hp_train.kit.outcome import Found, read_found
from hp_train.launch.signals import name_of

FOUND = "found.json"
LOG = "log.txt"
_GRACE_SECONDS = 3.0
_LOG_BYTES = 1 << 20
_SHOWN_LINES, _SHOWN_LETTERS = 40, 4000

NCCL_CHECKS = {
    "NCCL_DEBUG": "WARN",
    "NCCL_CHECK_POINTERS": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Environment of cases that look for mistakes: NCCL's warnings, its check of pointers (since
2.2.12), and torch's flight recorder, which is dumped where a collective times out."""


def checking(folder: Path) -> dict[str, str]:
    """`NCCL_CHECKS`, and where the flight recorder is to be dumped."""
    return {**NCCL_CHECKS, "TORCH_FR_DUMP_TEMP_FILE": str(folder.resolve() / "flight-")}


class Ended:
    """A process that has ended, or was ended.

    Attributes:
        found: Result that the process left; None: nothing.
        problem: Reason why there is no result; empty: there is one.
        is_late: Whether its time was up.
    """

    def __init__(self, found: Found | None, problem: str, *, is_late: bool = False) -> None:
        self.found, self.problem, self.is_late = found, problem, is_late


def run(
    task: Mapping[str, object], folder: Path, *, seconds: float, env: Mapping[str, str]
) -> Ended:
    """Run `hp_train.kit.work` on a task.

    Args:
        task: Contents of the task file, a `hp_train.kit.work.Task`.
        folder: Folder of the case, for its log and its result.
        seconds: Seconds after which the process, and all that it started, is ended.
        env: Environment variables of the process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / FOUND
    found.unlink(missing_ok=True)
    request = folder / "task.json"
    request.write_bytes(msgspec.json.encode(task))
    command = [sys.executable, "-m", "hp_train.kit.work", str(request)]
    began = time.monotonic()
    status = status_of(command, folder, seconds=seconds, env=env)
    left = read_found(found)
    if left is not None:
        return Ended(left, "")
    if status is None:
        return Ended(None, f"not done after {time.monotonic() - began:.0f} s", is_late=True)
    return Ended(None, _end_of(status))


def status_of(
    command: list[str], folder: Path, *, seconds: float, env: Mapping[str, str]
) -> int | None:
    """Run a command to its end, or end it; what it prints goes into the log of a case.

    Args:
        command: Command to run, in a session of its own, of which nothing is left.
        folder: Folder of the case.
        seconds: Seconds after which it is ended.
        env: Environment variables of the process.

    Returns:
        Its exit status, negative: the signal that ended it; None: its time was up.
    """
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - this interpreter
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
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
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return


def _end_of(status: int) -> str:
    if status >= 0:
        return f"its process ended with status {status}"
    return f"its process was killed by {name_of(-status)}"


def last_lines(folder: Path) -> str:
    """The end of what a case printed."""
    try:
        with (folder / LOG).open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LOG_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-_SHOWN_LINES:])[-_SHOWN_LETTERS:]


def nccl_warnings(folder: Path) -> int:
    """How often NCCL has warned."""
    try:
        return (folder / LOG).read_bytes().count(b"NCCL WARN")
    except OSError:
        return 0
