"""Run a case in a process of its own: it may crash, hang or print whatever it likes. No torch."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hp_train.errors import HpError
from hp_train.kit.outcome import Found, read
from hp_train.launch.signals import name_of

FOUND = "found.json"
LOG = "log.txt"
_GRACE_SECONDS = 3.0
_LOOK_SECONDS = 180.0
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


def run(
    task: Mapping[str, object], folder: Path, *, seconds: float, env: Mapping[str, str]
) -> Found:
    """Run `hp_train.kit.work` on a task; returns what it has left, or what became of it.

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
    if left := read(found, Found):
        return left
    if status is None:
        late = f"not done after {time.monotonic() - began:.0f} s"
        return Found(status="timed out", summary=late)
    return Found(status="error", summary=_end_of(status))


def look(
    work: Path, folder: Path, options: argparse.Namespace, *, who: str, env: Mapping[str, str]
) -> dict[str, Any]:
    """Ask a process what the machine is.

    Args:
        work: Folder that all cases share.
        folder: Folder for the log and the result of the process.
        options: Parsed flags of the command.
        who: What the message calls the machine.
        env: Environment variables of the process.

    Returns:
        `place`, of a `hp_train.kit.cases.Place`, and `facts`.

    Raises:
        HpError: When the process does not tell.
    """
    task = {"work": str(work), "device": options.device, "ranks": options.ranks}
    found = run(task, folder, seconds=_LOOK_SECONDS, env=env)
    if "place" not in found.figures:
        raise HpError(f"{who} cannot be looked at: {found.summary}\n{last_lines(folder)}")
    return found.figures


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
