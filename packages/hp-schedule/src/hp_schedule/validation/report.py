"""What a validation found."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from hp_schedule.errors import DeadlockError, ScheduleError
from hp_schedule.render.timetable import step_grid
from hp_schedule.schedule import Schedule

MAX_FINDINGS: Final = 20
"""A report stops here: one mistake can break every later step."""


class FindingKind(Enum):
    """The rule that is broken."""

    PLACEMENT = "placement"
    """A step stands on another rank than its stage."""
    DUPLICATE = "duplicate"
    """A step stands twice."""
    MISSING = "missing"
    """A step is not there."""
    ORDER = "order"
    """A step stands before one of its own rank that it needs."""
    UNNEEDED = "unneeded"
    """A message has nobody to go to or to come from."""
    MESSAGE_ORDER = "message_order"
    """Receives of an edge stand in another order than its sends."""
    DEADLOCK = "deadlock"
    """Ranks wait for each other."""
    FSDP = "fsdp"
    """Parameters are used while sharded, or gradients arrive after they were reduced."""
    MEMORY = "memory"
    """Activations in flight exceed the limit."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule.

    Attributes:
        kind: The rule.
        message: What is wrong; begins with the rank and the cell.
        rank: The rank whose row is wrong.
        position: The cell in that row; None for a step that is missing.
    """

    kind: FindingKind
    message: str
    rank: int
    position: int | None

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.message}"


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The result of `hp_schedule.validate`; true in a condition if nothing was found.

    Attributes:
        schedule: What was checked.
        findings: Broken rules, at most 20; deadlocks are looked for only in schedules that break
            no other rule.
    """

    schedule: Schedule
    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return not self.findings

    def raise_if_failed(self) -> None:
        """Raise if anything was found.

        Raises:
            DeadlockError: If the ranks would wait for each other.
            ScheduleError: If another rule is broken. The message has all findings, and the
                timetable around the first with its cell marked.
        """
        if not self.findings:
            return
        first = self.findings[0]
        position = len(self.schedule.steps[first.rank])
        mark = (first.rank, position if first.position is None else first.position)
        lines = [str(finding) for finding in self.findings]
        text = "\n".join([*lines, "", step_grid(self.schedule, mark=mark)])
        deadlocked = first.kind is FindingKind.DEADLOCK
        raise DeadlockError(text) if deadlocked else ScheduleError(text)
