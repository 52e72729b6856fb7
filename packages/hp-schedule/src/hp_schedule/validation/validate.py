"""The entry point of the checks."""

from itertools import islice

from hp_schedule.schedule import Schedule
from hp_schedule.validation.rendezvous import Rendezvous
from hp_schedule.validation.report import MAX_FINDINGS, ValidationReport
from hp_schedule.validation.rows import RowCheck


def validate(
    schedule: Schedule, *, forward_only: bool | None = None, communication: bool | None = None
) -> ValidationReport:
    """Prove that a schedule can run and does every step once, or find why not.

    Checked are: each step on the rank of its stage; each forward and each backward (whole, or
    split in two) exactly once; no step before what it needs on its own rank; every value that
    another rank needs sent once and received once, in the same order on each directed edge; FSDP
    steps around the compute steps they serve; and that the rows run to their end even if sends
    block until their receives are posted, with one channel per directed edge. Linear in the
    number of steps.

    Args:
        schedule: Any.
        forward_only: Whether there must be no backward at all; default: whether there is none.
        communication: Whether messages must be there; default: whether there are any. Without,
            the order of the compute steps is checked as if values were everywhere at once.
    """
    if forward_only is None:
        forward_only = schedule.is_forward_only
    if communication is None:
        communication = schedule.has_communication
    rows = RowCheck(schedule, forward_only=forward_only, communication=communication)
    findings = tuple(islice(rows.findings(), MAX_FINDINGS))
    if not findings:
        deadlock = Rendezvous(schedule, communication=communication).deadlock()
        findings = () if deadlock is None else (deadlock,)
    return ValidationReport(schedule, findings)
