"""Public reports, as `reports.toml` has them, and what was found of each."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

FOLDER = Path(__file__).parent
JOBS = FOLDER / "jobs"
EQUAL, DIFFERENT, NOTHING, FAILED = "equal", "different", "not comparable", "failed"


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A report of a bug in a library that was released with it.

    Attributes:
        name: Name of the report here.
        report: Owner's name and number of its thread, or of several.
        says: Symptom that it tells of.
        library: Name of the library in the registry.
        before: Newest version that has the bug.
        after: First version without it; empty: none was released.
        job: File below `jobs`.
        expected: Regular expression that the first difference and its likely cause must match.
        arguments: Arguments of the job.
        reference: Arguments of the job in one process.
        options: Flags of hp-verify.
        requires: Other requirements of the environment.
        python: Minor version of Python.
        note: What a reader should know of this row.
    """

    name: str
    report: str
    says: str
    library: str
    before: str
    job: str
    expected: str
    after: str = ""
    arguments: tuple[str, ...] = ()
    reference: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    python: str = "3.11"
    note: str = ""

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of the library that the job runs with."""
        return (self.before, self.after) if self.after else (self.before,)

    @property
    def command(self) -> list[str]:
        """Command line that compares the job with one process."""
        job = ["torchrun", "--nproc-per-node", "2", self.job, *self.arguments]
        return ["hp-verify", *self.options, "--", *job, "--against", "--", *self.against]

    @property
    def against(self) -> list[str]:
        """Command line of the reference."""
        return ["python", self.job, *self.reference]


class Other(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A report that is not run here.

    Attributes:
        report: Owner's name and number of its thread, or of several.
        library: Name of the library.
        why: Reason why it is not run.
    """

    report: str
    library: str
    why: str


class Reports(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All public reports that are looked at.

    Attributes:
        report: Reports that are run.
        other: Reports that are not.
    """

    report: tuple[Report, ...]
    other: tuple[Other, ...]


class Found(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was found of a report with one version of its library.

    Attributes:
        name: Name of the report, "@", version of the library.
        state: `EQUAL`, `DIFFERENT`, `NOTHING` or `FAILED`.
        first: First difference; of a failure, its last line.
        likely: Likely causes.
        verdict: Last line of the comparison.
        versions: Versions of Python, torch and the library.
        seconds: Seconds that it took.
    """

    name: str
    state: str
    first: str = ""
    likely: str = ""
    verdict: str = ""
    versions: str = ""
    seconds: float = 0.0


def reports() -> Reports:
    """Return all public reports that are looked at."""
    return msgspec.toml.decode((FOLDER / "reports.toml").read_bytes(), type=Reports)


def key(report: Report, version: str) -> str:
    """Return the name of what is found of a report with a version."""
    return f"{report.name}@{version}"


def told(name: str, lines: Sequence[str], status: int) -> Found:
    """Return what hp-verify has told of a report with a version.

    Args:
        name: Name as of `key`.
        lines: Lines that it printed.
        status: Its exit status.
    """
    state = {0: EQUAL, 8: DIFFERENT, 12: NOTHING}.get(status, FAILED)
    first = _after("first difference: ", lines)
    if state == FAILED:
        errors = (line for line in lines if "Error: " in line)
        first = next(errors, "").rpartition("]: ")[2]
    verdicts = (n for n in lines if n.startswith(("equal ", "NOT EQUAL ", "not comparable")))
    likely = _after("likely: ", lines).partition("; all of it: ")[0]
    return Found(name=name, state=state, first=first, likely=likely, verdict=next(verdicts, ""))


def _after(beginning: str, lines: Sequence[str]) -> str:
    return next((n.removeprefix(beginning) for n in lines if n.startswith(beginning)), "")
