"""What became of a case. No torch."""

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from hp_base.atomic_write import replace_file
from integration_tests.acceptance.cases import Case

Status = Literal["passed", "failed", "error", "timed out", "left out", "not run"]
"""``failed``: it ran, and something is not as it must be. ``error``: it did not run to its end.
``left out``: this machine is not for it, or something that it needs is not there. ``not run``: the
minutes were up."""
BAD: tuple[Status, ...] = ("failed", "error", "timed out")

T = TypeVar("T")


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the work of a case has to say, from its process, or what became of that.

    Attributes:
        status: How the case ended.
        summary: Result in one line.
        figures: Numbers and short texts, by name.
    """

    status: Status
    summary: str
    figures: dict[str, Any] = {}


class Outcome(Found, frozen=True, kw_only=True):
    """What became of a case.

    Attributes:
        name: Name of the case.
        what: Purpose of the case, a sentence.
        seconds: Seconds that it took.
        log: Last lines that it printed, where something went wrong.
    """

    name: str
    what: str
    seconds: float = 0.0
    log: str = ""

    @classmethod
    def of(cls, case: Case, found: Found, *, seconds: float = 0.0, log: str = "") -> "Outcome":
        """What was found, as that of a case."""
        told = msgspec.structs.asdict(found)
        return cls(name=case.name, what=case.what, seconds=round(seconds, 1), log=log, **told)


def write(path: Path, found: Found) -> None:
    """Write it as JSON."""
    replace_file(path, msgspec.json.encode(found))


def read(path: Path, kind: type[T]) -> T | None:
    """Read an `Outcome` or a `Found`; None where there is none that is whole."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
