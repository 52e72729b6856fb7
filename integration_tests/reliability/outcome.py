"""What a series of cases came to."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """A series of cases.

    Attributes:
        name: What was done.
        cases: How often.
        failures: A line for each case that went wrong.
        seconds: Wall time of all.
        notes: Figures worth a line.
    """

    name: str
    cases: int
    failures: Sequence[str]
    seconds: float
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        good = self.cases - len(self.failures)
        head = f"{self.name}: {good} of {self.cases} good, {self.seconds:.0f} s"
        lines = [*(f"  {note}" for note in self.notes)]
        return "\n".join([head, *lines, *(f"  FAILED {line}" for line in self.failures[:20])])


@contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send what this process and its children print to a file meanwhile."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with path.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, number)
            os.close(descriptor)
