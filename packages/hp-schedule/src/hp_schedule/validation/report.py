"""The report of a validation."""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from hp_schedule.render import step_grid
from hp_schedule.schedule import DeadlockError, Schedule, ScheduleError

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
    RETENTION = "retention"
    """What a microbatch keeps in a stage is run again as well as copied away."""
    MEMORY = "memory"
    """Activations in flight exceed the limit."""


class Lacking(Enum):
    """A part that a schedule without a mistake lacks, and that it needs to train as it stands."""

    BACKWARD = "backward"
    """It is forward only."""
    COMMUNICATION = "communication"
    """It has compute steps only: stages of different ranks send and receive nothing."""
    REDUCE_GRAD = "reduce_grad"
    """Gradients of stages whose parameters are sharded are never reduced."""

    def __str__(self) -> str:
        return {
            Lacking.BACKWARD: "forward only: backwards are missing",
            Lacking.COMMUNICATION: "compute steps only: sends and receives are missing",
            Lacking.REDUCE_GRAD: (
                "without REDUCE_GRAD: gradients of sharded stages are never reduced"
            ),
        }[self]


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule.

    Attributes:
        kind: The rule.
        message: Description of the mistake; begins with the rank and the cell.
        rank: The rank whose row is wrong.
        position: The cell in that row; None for a step that is missing.
    """

    kind: FindingKind
    message: str
    rank: int
    position: int | None

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.message}"


def finding_at(kind: FindingKind, text: str, rank: int, position: int | None) -> Finding:
    """Return a finding whose message begins with the rank and, if there is one, the cell."""
    where = f"rank {rank}" if position is None else f"rank {rank}, cell {position}"
    return Finding(kind, f"{where}: {text}", rank, position)


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The result of `hp_schedule.validate`; true in a condition if nothing was found.

    Attributes:
        schedule: Schedule that was checked.
        findings: Broken rules, at most 20; deadlocks are looked for only in schedules that break
            no other rule.
        lacking: Parts that are absent altogether, unless the caller has said that they must be
            there (then their absence is a finding) or must not.
    """

    schedule: Schedule
    findings: tuple[Finding, ...]
    lacking: tuple[Lacking, ...] = ()

    def __bool__(self) -> bool:
        return not self.findings

    @property
    def is_runnable(self) -> bool:
        """Tell whether it trains as it stands, or fits the purpose that the caller has given."""
        return not self.findings and not self.lacking

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
