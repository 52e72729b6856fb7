"""Compare jobs of public reports with one process, before and after the fix of each.

    python -m integration_tests.jobs.reports --results DIR --only transformers

goes on where it was stopped. `nox -s reports` runs all of them.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from hp_base.command_line import Parser, require_files, run_command, say, write_named
from hp_base.errors import ConfigError, DifferenceError
from integration_tests.jobs.reports.data import Found, key, reports
from integration_tests.jobs.reports.environments import look_at
from integration_tests.jobs.reports.table import is_shown, summary, table
from integration_tests.models.architectures.kept import can_be_cut, folder_of, read, write


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None: those of this process.

    Returns:
        Exit status, see `hp_base.errors`: 0 where each report is shown.
    """
    return run_command(_run, argv)


def _parser() -> Parser:
    parser = Parser(prog="reports", description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="those whose name has this")
    parser.add_argument("--again", action="store_true", help="run also what was run before")
    parser.add_argument("--table", metavar="FILE", help="what was found, as a page of Markdown")
    can_be_cut(parser)
    return parser


def _run(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    require_files(options, "table")
    all_reports = reports()
    some = [report for report in all_reports.report if options.only in report.name]
    if not some:
        raise ConfigError(f"--only ({options.only}) must be in the name of a report")
    until = time.monotonic() + 60.0 * options.minutes if options.minutes else float("inf")
    with folder_of(options.results, "hp-reports-") as kept:
        folder = Path(kept)
        folder.mkdir(parents=True, exist_ok=True)
        found = read(folder, Found)
        for report in some:
            for version in report.versions:
                name = key(report, version)
                if (name in found and not options.again) or time.monotonic() > until:
                    continue
                found[name] = one = look_at(report, version, folder / "environment")
                write(folder, one)
                say(f"{name}: {one.state}{one.first and ': '}{one.first} {one.likely}".rstrip())
    if options.table:
        write_named("--table", options.table, table(all_reports, found))
    say(summary(all_reports, found))
    left = [report.name for report in some if not is_shown(report, found)]
    if left:
        raise DifferenceError(f"reports that are not shown: {', '.join(left)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
