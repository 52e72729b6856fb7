"""Comparisons as a check of pull requests: several at once, in minutes, told as JSON and JUnit."""

import argparse
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.sax.saxutils import escape, quoteattr

import msgspec

from hp_base.command_line import require_files, require_folder, say, write_named
from hp_base.errors import ConfigError, DifferenceError, HpError, NotComparableError
from hp_base.folder import read_named, why_not
from hp_base.numbers import real
from hp_base.own_caches import user_cache
from hp_verify import jobs
from hp_verify.comparing.findings import Comparison, Verdict

_MINUTES = 10.0
_VERDICTS = {
    0: Verdict.EQUAL,
    DifferenceError.exit_code: Verdict.DIFFERENT,
    NotComparableError.exit_code: Verdict.NOT_COMPARABLE,
}
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Asked = tuple[list[str], list[str], argparse.Namespace]
"""A job, its reference, and parsed flags."""


@dataclass(slots=True)
class _Outcome:
    """Tells what came of a comparison: `comparison` is None where a program has failed."""

    name: str
    job: list[str]
    against: list[str]
    verdict: str = ""
    status: int = 0
    seconds: float = 0.0
    error: HpError | None = None
    comparison: Comparison | None = None

    def compare(self, options: argparse.Namespace) -> None:
        """Make the comparison."""
        began = time.monotonic()
        try:
            self.comparison = jobs.run(self.job, self.against, options)
            self.status = next(
                code for code, verdict in _VERDICTS.items() if verdict == self.comparison.verdict
            )
        except HpError as error:
            self.error, self.status = error, error.exit_code
        self.verdict = _VERDICTS.get(self.status, "failed")
        self.seconds = round(time.monotonic() - began, 1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of checks."""
    parser.add_argument(
        "--ci",
        action="store_true",
        help=f"for checks of pull requests: --minutes {_MINUTES:g}, and --cache in your own cache",
    )
    parser.add_argument(
        "--minutes",
        metavar="N",
        type=real("--minutes"),
        help="for all runs of a comparison: to keep to it fewer are made, and long programs ended",
    )
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="keep recordings of references, and do not run these again as long as neither their "
        "files nor arguments, variables, versions and this machine change",
    )
    parser.add_argument("--json", metavar="FILE", help="write what was found as JSON")
    parser.add_argument("--junit", metavar="FILE", help="write what was found as JUnit's XML")


def read(
    file: str, flags: Sequence[str], parse: Callable[[Sequence[str]], Asked]
) -> dict[str, Asked]:
    """Read a file of comparisons: name -> what stands behind `hp-verify` on its command line.

    Args:
        file: Path of the file.
        flags: Flags of all.
        parse: Parses a command line.

    Raises:
        ConfigError: When it is none, or a command line is wrong.
    """
    try:
        lines = msgspec.toml.decode(read_named(Path(file)), type=dict[str, str])
        words = {name: shlex.split(line, comments=True) for name, line in lines.items()}
        asked = {name: parse([*flags, *some]) for name, some in words.items()}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--jobs ({file}) must be a file of jobs: {why_not(error)}") from None
    if not asked or not all(job for job, _, _ in asked.values()):
        raise ConfigError(
            f'--jobs ({file}) must have lines: NAME = "-- JOB --against -- REFERENCE"'
        )
    return asked


def run(asked: Mapping[str, Asked], options: argparse.Namespace) -> int:
    """Make comparisons one after the other, print what is found, and write it into files.

    Args:
        asked: Name -> comparison.
        options: Parsed flags of `add_arguments`.

    Returns:
        0: each job is equal to its reference; else the status that is told of first: that of a
        difference, or the largest.

    Raises:
        HpError: When a program of the one comparison has failed.
    """
    require_files(options, "json", "junit")
    done: list[_Outcome] = []
    with TemporaryDirectory(prefix="hp-verify-kept-", ignore_cleanup_errors=True) as own:
        try:
            for name, (job, against, flags) in asked.items():
                usual = user_cache("hp-verify") if options.ci else own if options.jobs else None
                flags.cache = flags.cache or usual
                flags.minutes = flags.minutes or (_MINUTES if options.ci else None)
                require_folder("--cache", flags.cache)
                if options.jobs:
                    say(f"== {name}")
                    flags.keep = flags.keep and f"{flags.keep}/{name}"
                done.append(_Outcome(name, job, against))
                done[-1].compare(flags)
        finally:
            _write(options, done)
    if options.jobs:
        say("\n".join(f"{one.name}: {one.error or one.verdict}" for one in done))
    elif done[0].error is not None:
        raise done[0].error
    different = DifferenceError.exit_code
    return max((one.status for one in done), key=lambda code: (code == different, code))


def _write(options: argparse.Namespace, done: Sequence[_Outcome]) -> None:
    """Write the files that are asked for."""
    if options.json:
        write_named("--json", options.json, _json({"format": 1, "comparisons": done}))
    if options.junit:
        cases = "\n".join(map(_case, done))
        text = f'<testsuite name="hp-verify" tests="{len(done)}">\n{cases}\n</testsuite>\n'
        write_named("--junit", options.junit, _NO_XML.sub("?", text))


def _json(found: object) -> str:
    return msgspec.json.format(msgspec.json.encode(found, enc_hook=str)).decode()


def _case(one: _Outcome) -> str:
    """Return a comparison as a test case of JUnit's XML, with all that was found as its output."""
    found, failure = one.comparison, ""
    if one.status:
        kind, text = "error" if found is None else "failure", str(one.error)
        first, text = (text, text) if found is None else (found.first, jobs.report(found))
        message = quoteattr(str(first or one.verdict).partition("\n")[0])
        failure = f"\n<{kind} message={message}>{escape(text)}</{kind}>"
    about = f'classname="hp-verify" name={quoteattr(one.name)} time="{one.seconds}"'
    return (
        f"<testcase {about}>{failure}\n<system-out>{escape(_json(one))}</system-out>\n</testcase>"
    )
