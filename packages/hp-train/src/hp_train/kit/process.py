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

FOUND = "found.json"
LOG = "log.txt"
_GRACE_SECONDS = 3.0
_LOG_BYTES = 1 << 20
_SHOWN_LINES, _SHOWN_LETTERS = 40, 4000

NCCL_CHECKS = {
    "NCCL_DEBUG": "WARN",
    "NCCL_CHECK_POINTERS": "1",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""For cases that look for mistakes: NCCL's warnings, its check of pointers (since 2.2.12), and
torch's flight recorder, under both of its names, which is dumped where a collective times out."""


class Ended:
    """A process that has ended, or was ended.

    Attributes:
        found: What it left; None: nothing.
        problem: Why there is nothing; empty: there is.
        is_late: Whether its time was up.
    """

    def __init__(self, found: Found | None, problem: str, *, is_late: bool = False) -> None:
        self.found, self.problem, self.is_late = found, problem, is_late


def run(
    task: Mapping[str, object], folder: Path, *, seconds: float, env: Mapping[str, str]
) -> Ended:
    """Run `hp_train.kit.work` on a task.

    Args:
        task: What it reads.
        folder: Of the case: gets its log and what it found.
        seconds: After which it and all that it has started is killed.
        env: Variables beside those of this process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / FOUND
    found.unlink(missing_ok=True)
    request = folder / "task.json"
    request.write_bytes(msgspec.json.encode(task))
    command = [sys.executable, "-m", "hp_train.kit.work", str(request)]
    return ended(command, folder, seconds=seconds, env=env, found=found)


def ended(
    command: list[str], folder: Path, *, seconds: float, env: Mapping[str, str], found: Path
) -> Ended:
    """Run a command to its end, or end it; see :func:`run`."""
    began = time.monotonic()
    is_late = False
    recorder = {
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / "flight-"),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "flight-"),
    }
    with (folder / LOG).open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 - this interpreter
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **NCCL_CHECKS, **recorder, **env},
            start_new_session=True,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            is_late = True
        finally:
            _end(process)
    left = read_found(found)
    if is_late and left is None:
        return Ended(None, f"not done after {time.monotonic() - began:.0f} s", is_late=True)
    if left is None:
        return Ended(None, _end_of(process.returncode))
    return Ended(left, "")


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
    try:
        return f"its process was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"its process was killed by signal {-status}"


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
