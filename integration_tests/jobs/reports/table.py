"""A page about public reports: found at the version before a fix, silent at the version after."""

import re
from collections.abc import Mapping

from integration_tests.jobs.reports.data import (
    DIFFERENT,
    EQUAL,
    FAILED,
    Found,
    Report,
    Reports,
    key,
)

_HEAD = """# Public reports, in the libraries that were released with them

Written by `nox -s reports` (`integration_tests/jobs/reports`). Each job uses a feature of a library
as its user would, on two ranks of Gloo, and is compared with the same job in one process:
with the newest release that has the bug of a public report, and with the first release without it.
Nothing of a library is changed. Where no fix was released, there is only the release before.
"""


def is_shown(report: Report, found: Mapping[str, Found]) -> bool:
    """Tell whether a report was found before its fix, was named, and is silent after it."""
    before = found.get(key(report, report.before))
    if before is None or not is_named(report, before):
        return False
    after = found.get(key(report, report.after))
    return not report.after or (after is not None and after.state == EQUAL)


def is_named(report: Report, before: Found) -> bool:
    """Tell whether what was found before the fix is called different, and is what it must be."""
    told = f"{before.first}: {before.likely}"
    return before.state in (DIFFERENT, FAILED) and re.search(report.expected, told) is not None


def summary(reports: Reports, found: Mapping[str, Found]) -> str:
    """Say in lines what was found."""
    tried = [r for r in reports.report if key(r, r.before) in found]
    fixed = [r for r in tried if r.after]
    named = [r for r in tried if is_named(r, found[key(r, r.before)])]
    seen = [r for r in tried if r in named or found[key(r, r.before)].state == DIFFERENT]
    silent = [r for r in fixed if (f := found.get(key(r, r.after))) and f.state == EQUAL]
    left = len(reports.report) - len(tried)
    return (
        f"{len(tried)} reports run: {len(seen)} found with the release before the fix, "
        f"{len(named)} named\n"
        f"{len(fixed)} of them have a release with the fix: {len(silent)} are silent there\n"
        f"{left} more have a job that shows nothing yet\n"
        f"{len(reports.other)} rows of others are not run, for the reasons below"
    )


def table(reports: Reports, found: Mapping[str, Found]) -> str:
    """Return the page."""
    lines = [_HEAD, *(f"- {line}" for line in summary(reports, found).splitlines()), ""]
    lines += ["| report | what it tells | release before | first difference | release after | |"]
    lines += ["|---" * 6 + "|"]
    for report in reports.report:
        before = found.get(key(report, report.before))
        after = found.get(key(report, report.after))
        cells = [
            report.report,
            report.says,
            f"{report.library} {report.before}",
            _told(before),
            f"{report.library} {report.after}" if report.after else "none yet",
            _after(report, after),
        ]
        lines.append(f"| {' | '.join(_cell(cell) for cell in cells)} |")
    lines += ["", "## How each was run", ""]
    for report in reports.report:
        lines.append(f"- {report.report}: `{' '.join(report.command)}`{_how(report, found)}")
    lines += ["", "## Not run", "", "| report | library | why |", "|---|---|---|"]
    lines += [f"| {o.report} | {o.library} | {_cell(o.why)} |" for o in reports.other]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _told(before: Found | None) -> str:
    if before is None:
        return "not shown yet"
    told = f"{before.first}: {before.likely}" if before.likely else before.first or before.verdict
    return told if before.state == DIFFERENT else f"{before.state}: {told}"


def _after(report: Report, after: Found | None) -> str:
    if not report.after:
        return ""
    if after is None:
        return "not shown yet"
    if after.state == EQUAL:
        return after.verdict
    return f"{after.state}: {after.first} {after.likely}".strip()


def _how(report: Report, found: Mapping[str, Found]) -> str:
    before = found.get(key(report, report.before))
    versions = f" ({before.versions})" if before is not None and before.versions else ""
    return f"{versions}. {report.note}" if report.note else versions
