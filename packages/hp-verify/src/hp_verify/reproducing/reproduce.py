"""Writes and runs the program that shows a first difference, see `programs`."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from hp_verify.comparing.findings import Difference, Reproduction
from hp_verify.comparing.recordings import Step
from hp_verify.recording import events as ev
from hp_verify.reproducing.module_programs import blames_inputs
from hp_verify.reproducing.modules import CannotError, Pair
from hp_verify.reproducing.programs import MOST_LINES
from hp_verify.reproducing.reproduce_module import Maker, backwards, forwards, gradients
from hp_verify.reproducing.reproduce_update import of_phase, values

_SECONDS = 300
_PROGRAM, _RECORD = "reproduce.py", "record.pt"


def reproduce(
    first: Difference, pair: Pair, steps: tuple[Step, Step], folder: Path
) -> tuple[Reproduction | None, list[str]]:
    """Write the smallest program that shows a difference, and run it.

    Args:
        first: The first difference.
        pair: Both second runs.
        steps: The job's and the reference's step in the first runs.
        folder: Folder for the program and its record; it is made if need be.

    Returns:
        The first program that computes the reference's value again; reasons why others do not.
    """
    title = f"Step {first.step}, {first.phase} {first.name}".rstrip()
    folder.mkdir(parents=True, exist_ok=True)
    why: list[str] = []
    blaming: Maker | None = None
    for make in _of_modules(first, pair, title):
        made = _made(make, folder, why)
        if made is not None and not blames_inputs(made.verdict):
            return made, why
        if made is not None:
            blaming = blaming or make
    rest = (
        [blaming]
        if blaming
        else [
            lambda _: of_phase(first, pair, steps, title),
            lambda _: values(first, pair, title),
        ]
    )
    found = (_made(make, folder, why) for make in rest)
    return next((made for made in found if made is not None), None), why


def _made(make: Maker, folder: Path, why: list[str]) -> Reproduction | None:
    """Write a program and run it; None, and one more reason, where it does not run."""
    try:
        text, record = make(folder)
    except CannotError as error:
        why.append(str(error))
        return None
    except Exception as error:  # noqa: BLE001 - a stranger's job; the difference is told without it
        why.append(f"{type(error).__name__}: {error}"[:200])
        return None
    if (count := text.count("\n")) > MOST_LINES:
        why.append(f"its program would have {count} lines")
        return None
    torch.save(record, folder / _RECORD)
    path = folder / _PROGRAM
    path.write_text(text, encoding="utf-8")
    output, failure = _run(path)
    if failure is not None:
        why.append(failure)
        return None
    return Reproduction(path, text, output)


def _run(path: Path) -> tuple[str, str | None]:
    """Run a program: what it printed; and the last line of its error where it failed."""
    try:
        done = subprocess.run(  # noqa: S603 - it was just written
            [sys.executable, str(path)],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"it ran for {_SECONDS} s"
    last = done.stderr.strip().splitlines()[-1:] or [f"status {done.returncode}"]
    return done.stdout, None if done.returncode == 0 else last[0]


def _of_modules(first: Difference, pair: Pair, title: str) -> Iterator[Maker]:
    """Yield programs that compute modules again, the smallest first."""
    if first.phase in (ev.FORWARD, ev.EVALUATION):
        yield from forwards(first, pair, title)
    elif first.phase == ev.BACKWARD:
        yield from backwards(first, pair, title)
    elif first.phase == ev.GRADIENT and first.origin == ev.BACKWARD:
        yield from gradients(first, pair, title)
