"""What became of a case. No torch."""

from pathlib import Path
from typing import Any, Literal

import msgspec

Status = Literal["passed", "failed", "error", "timed out", "left out", "not run"]
"""``failed``: it ran, and something is not as it must be. ``error``: it did not run to its end.
``left out``: this machine is not for it, or something that it needs is not there. ``not run``: the
minutes were up."""
BAD: tuple[Status, ...] = ("failed", "error", "timed out")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a case.

    Attributes:
        name: Name of the case.
        what: Purpose of the case, a sentence.
        status: How the case ended.
        summary: Result in one line.
        seconds: Seconds that it took.
        figures: Numbers and short texts, by name.
        log: Last lines that it printed, where something went wrong.
    """

    name: str
    what: str
    status: Status
    summary: str
    seconds: float = 0.0
    figures: dict[str, Any] = {}
    log: str = ""

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        draft = path.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(self))
        draft.replace(path)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the work of a case has to say, from its process."""

    status: Status
    summary: str
    figures: dict[str, Any] = {}


def read(path: Path) -> Outcome | None:
    """Read an outcome; None where there is none that is whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Outcome)
    except (OSError, msgspec.DecodeError):
        return None


def read_found(path: Path) -> Found | None:
    """Read what a process has left; None where it left nothing that is whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Found)
    except (OSError, msgspec.DecodeError):
        return None
