"""What happens in the process of a case: ``python -m integration_tests.acceptance.work TASK``."""

import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from hp_base.errors import HpError
from integration_tests.acceptance.cases import Case, Place
from integration_tests.acceptance.outcome import Found, write
from integration_tests.acceptance.process import FOUND

Work = Callable[[Case, Place, Path], Found]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the kit asks of a process.

    Attributes:
        work: Folder that all cases share.
        case: Case to run; None: look at the machine.
        place: Devices of this machine; None: look at it.
        device: Kind of devices wanted: `"auto"`, `"cpu"` or `"cuda"`.
        ranks: Most ranks that layouts may have; 0: by the number of GPUs.
    """

    work: str
    case: Case | None = None
    place: Place | None = None
    device: str = "auto"
    ranks: int = 0


def main(path: Path) -> int:
    """Do what a task file says and leave what was found beside it."""
    task = msgspec.json.decode(path.read_bytes(), type=Task)
    try:
        found = _found(task)
    except HpError as error:
        sys.stderr.write(f"error: {error}\n")
        found = Found(status="error", summary=str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the report has it
        traceback.print_exc()
        line = " ".join(str(error).split())[:300]
        found = Found(status="error", summary=f"{type(error).__name__}: {line}")
    write(path.parent / FOUND, found)
    return 0


def _found(task: Task) -> Found:
    if task.case is None or task.place is None:
        from integration_tests.acceptance import facts  # noqa: PLC0415 - imports torch

        place = facts.place_of(task.device, task.ranks)
        figures = {"place": msgspec.to_builtins(place), "facts": facts.facts()}
        return Found(status="passed", summary=place.name or "CPU", figures=figures)
    return _work(task.case.work)(task.case, task.place, Path(task.work))


def _work(name: str) -> Work:
    """The function that a case names; each kind imports what it needs."""
    from integration_tests.acceptance import layouts, rivals, speed  # noqa: PLC0415 - they import torch

    works: dict[str, Work] = {
        "reference": layouts.reference,
        "layout": layouts.layout,
        "request": layouts.request,
        "compare": layouts.compare_requested,
        "rates": speed.rates,
        "train": speed.train,
        "plan": speed.plan,
        "dry_run": speed.dry_run,
        "rival": rivals.rival,
        "fork": _fork,
        "tests": _tests,
    }
    return works[name]


def _fork(_case: Case, _place: Place, _work: Path) -> Found:
    from integration_tests.acceptance.facts import untouched_by_imports  # noqa: PLC0415 - imports torch

    if untouched_by_imports():
        return Found(status="passed", summary="a fork of what was imported uses the GPU")
    return Found(status="failed", summary="what is imported has touched the GPU: see the log")


def _tests(_case: Case, _place: Place, _work: Path) -> Found:
    root = Path(__file__).resolve().parents[2]
    if not (root / "integration_tests").is_dir() or not importlib.util.find_spec("pytest"):
        return Found(status="left out", summary="no checkout with pytest")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "packages", "integration_tests"]
    status = subprocess.run(command, cwd=root, check=False).returncode
    if status:
        return Found(status="failed", summary=f"pytest ended with status {status}: see the log")
    return Found(status="passed", summary="all passed")


if __name__ == "__main__":
    STATUS = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(STATUS)  # whatever a library waits for at its end
