"""Public reports: their table, jobs and page agree, and what hp-verify prints is read."""

import ast
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import pytest

from integration_tests.jobs.reports import environments
from integration_tests.jobs.reports.data import (
    DIFFERENT,
    EQUAL,
    FAILED,
    JOBS,
    Found,
    Report,
    Reports,
    key,
    reports,
    told,
)
from integration_tests.jobs.reports.table import is_shown, summary, table

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "tables" / "public-reports.md"


def test_each_report_has_a_job_and_each_job_a_report() -> None:
    some = reports().report
    assert len({report.name for report in some}) == len(some)
    used = {report.job for report in some}
    for job in sorted(used):
        tree = ast.parse((JOBS / job).read_text())
        names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        used |= {f"{name}.py" for name in names if (JOBS / f"{name}.py").exists()}
    assert used == {file.name for file in JOBS.glob("*.py")}


def test_the_page_has_a_row_for_each_report() -> None:
    lines = PAGE.read_text().splitlines()
    for report in reports().report:
        [row] = [line for line in lines if line.startswith(f"| {report.report} | {report.says}")]
        cells = row.split(" | ")
        assert cells[2] == f"{report.library} {report.before}"
        assert cells[4] == (f"{report.library} {report.after}" if report.after else "none yet")
        assert cells[3] == "not shown yet" or re.search(report.expected, cells[3]), row
        assert any(f"`{' '.join(report.command)}`" in line for line in lines)
    for other in reports().other:
        assert any(line.startswith(f"| {other.report} | {other.library} |") for line in lines)


REPORT = Report(
    name="a",
    report="b #1",
    says="c",
    library="d",
    before="1.0",
    after="1.1",
    job="e.py",
    expected="gradient .*: doubled",
)


def test_what_is_printed_is_read() -> None:
    printed = [
        "job: 2 processes, 3 steps, 8.2 s",
        "NOT EQUAL over 3 steps, 7 tensors and numbers",
        "first difference: step 1, gradient x: 1.0e+00",
        "likely: doubled; all of it: /tmp/report.txt",
    ]
    before = told(key(REPORT, "1.0"), printed, 8)
    assert (before.state, before.first) == (DIFFERENT, "step 1, gradient x: 1.0e+00")
    assert (before.likely, before.verdict) == ("doubled", printed[1])
    after = told(key(REPORT, "1.1"), ["equal over 3 steps"], 0)
    assert (after.state, after.verdict) == (EQUAL, "equal over 3 steps")
    failed = told("a@1", ["job failed", "[rank1]: ValueError: no", "the job made no update"], 1)
    assert failed == Found(name="a@1", state=FAILED, first="ValueError: no")

    found = {one.name: one for one in (before, after)}
    both = Reports(report=(REPORT,), other=())
    assert is_shown(REPORT, found)
    assert not is_shown(REPORT, {before.name: before})
    assert not is_shown(REPORT, {**found, before.name: after})
    assert not is_shown(REPORT, {**found, after.name: before})
    assert "1 reports run: 1 found with the release before the fix, 1 named" in summary(both, found)
    row = "| b #1 | c | d 1.0 | step 1, gradient x: 1.0e+00: doubled | d 1.1 | equal over 3 steps |"
    assert row in table(both, found)


@pytest.mark.parametrize(("library", "has_pin"), [("torch", False), ("transformers", True)])
def test_a_release_is_not_held_to_the_pins_of_this_repository(
    library: str, has_pin: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a session of nox has them in its environment; torch alone keeps its own."""
    given: list[tuple[list[str], Mapping[str, str]]] = []

    def install_into(
        _folder: Path, _python: str, requirements: Iterable[str], env: Mapping[str, str]
    ) -> str:
        given.append(([*requirements], env))
        return "no wheel"

    monkeypatch.setenv("UV_CONSTRAINT", "constraints.txt")
    monkeypatch.setattr(environments, "room_for", lambda _: ("python", ""))
    monkeypatch.setattr(environments, "install_into", install_into)
    report = msgspec.structs.replace(REPORT, library=library)
    found = environments.look_at(report, "1.0", tmp_path / "environment")
    assert (found.state, found.first) == (FAILED, "no environment: no wheel")
    [(requirements, env)] = given
    assert f"{library}==1.0" in requirements
    assert len([each for each in requirements if each.startswith("torch==2.")]) == has_pin
    assert "PATH" in env
    assert not [name for name in env if "CONSTRAINT" in name]
