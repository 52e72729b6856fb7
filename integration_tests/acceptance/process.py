"""Run a case in a process of its own: it may crash, hang or print whatever it likes. No torch."""

import argparse
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hp_base.errors import HpError
from hp_base.session import last_lines, status_of
from hp_base.signals import ending
from integration_tests.acceptance.outcome import Found, read

FOUND = "found.json"
LOG = "log.txt"
_LOOK_SECONDS = 180.0

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
    """Run `work` of this package on a task; returns what it has left, or what became of it.

    Args:
        task: Contents of the task file, a `integration_tests.acceptance.work.Task`.
        folder: Folder of the case, for its log and its result.
        seconds: Seconds after which the process, and all that it started, is ended.
        env: Environment variables of the process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = folder / FOUND
    found.unlink(missing_ok=True)
    request = folder / "task.json"
    request.write_bytes(msgspec.json.encode(task))
    command = [sys.executable, "-m", "integration_tests.acceptance.work", str(request)]
    began = time.monotonic()
    status = status_of(command, folder / LOG, seconds=seconds, env=env)
    left, is_late = read(found, Found), status is None
    if left is not None and not (is_late and left.status == "error"):  # by being ended
        return left
    if status is None:
        spent = time.monotonic() - began
        return Found(status="timed out", summary=f"not done after {spent:.0f} s")
    return Found(status="error", summary=f"its process {ending(status)}")


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
        `place`, of a `integration_tests.acceptance.cases.Place`, and `facts`.

    Raises:
        HpError: When the process does not tell.
    """
    task = {"work": str(work), "device": options.device, "ranks": options.ranks}
    found = run(task, folder, seconds=_LOOK_SECONDS, env=env)
    if "place" not in found.figures:
        raise HpError(f"{who} cannot be looked at: {found.summary}\n{last_lines(folder / LOG)}")
    return found.figures


def nccl_warnings(folder: Path) -> int:
    """How often NCCL has warned."""
    try:
        return (folder / LOG).read_bytes().count(b"NCCL WARN")
    except OSError:
        return 0
