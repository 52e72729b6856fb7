"""Compare clean jobs with their references: none may be accused, and seeded bugs must be named.

    python -m integration_tests.jobs.clean --results DIR --part 1/2
    python -m integration_tests.jobs.clean --only padding --bugs

goes on where it was stopped. `nox -s clean` runs all of them.
"""

import sys
import time
from collections.abc import Sequence

from hp_base.command_line import Parser, require_files, run_command, say, write_named
from hp_base.errors import ConfigError, DifferenceError
from integration_tests.models.architectures.kept import can_be_cut, folder_of, read, write


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None: those of this process.

    Returns:
        Exit status, see `hp_base.errors`: 0 where no clean job is accused.
    """
    return run_command(_run, argv)


def _part(text: str) -> tuple[int, int]:
    numbers = [int(number) for number in text.split("/") if number.isdecimal()]
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError(f"--part ({text}) must be like 1/3")
    return numbers[0], numbers[1]


def _parser() -> Parser:
    parser = Parser(prog="clean", description=__doc__)
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="a part of them")
    parser.add_argument("--only", default="", metavar="NAME", help="those whose name has this")
    parser.add_argument("--bugs", action="store_true", help="look for seeded bugs as well")
    parser.add_argument("--table", metavar="FILE", help="what was found, as a page of Markdown")
    can_be_cut(parser)
    return parser


def _run(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    require_files(options, "table")
    from pathlib import Path  # noqa: PLC0415

    from integration_tests.jobs.clean.catalogue import catalogue  # noqa: PLC0415 - imports torch
    from integration_tests.jobs.clean.runs import ACCUSED, EQUAL, Found, judge  # noqa: PLC0415
    from integration_tests.jobs.clean.table import summary, table  # noqa: PLC0415
    from integration_tests.models.architectures.forks import prepare  # noqa: PLC0415

    jobs = {name: job for name, job in catalogue().items() if options.only in name}
    part, parts = options.part
    until = time.monotonic() + 60.0 * options.minutes if options.minutes else float("inf")
    prepare()
    with folder_of(options.results, "hp-clean-jobs-") as kept:
        folder = Path(kept)
        found = read(folder, Found)
        for name in [*jobs][part - 1 :: parts]:
            if name in found or time.monotonic() > until:
                continue
            found[name] = one = judge(jobs[name], bugs=options.bugs)
            write(folder, one)
            say(f"{name}: {one.state}{one.first and ': '}{one.first} {one.reason}".rstrip())
            for bug in one.bugs:
                if not bug.is_named:
                    told = bug.first or bug.reason or "not found"
                    say(f"      {bug.name}: {'not named: ' * bug.is_found}{told}")
    some = [one for name, one in sorted(found.items()) if name in jobs]
    if options.table:
        write_named("--table", options.table, table(some))
    say(summary(some))
    accused = sum(one.state == ACCUSED for one in some)
    if accused:
        raise DifferenceError(f"{accused} of {len(some)} clean jobs are called different")
    if not any(one.state == EQUAL for one in some):
        raise ConfigError(f"--only ({options.only}) must be in the name of a job")
    return 0


if __name__ == "__main__":
    sys.exit(main())
