"""Comparisons as a check of pull requests: several at once, in minutes, told as JSON and JUnit."""

import argparse
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias
from xml.etree import ElementTree as ET

import msgspec

from hp_base.command_line import require_files, require_folder, say, write_named
from hp_base.errors import (
    ConfigError,
    DifferenceError,
    HpError,
    NotComparableError,
    RunFailedError,
)
from hp_base.folder import read_named, why_not
from hp_base.numbers import real
from hp_base.own_caches import user_cache
from hp_verify import jobs
from hp_verify.comparing.findings import Comparison, Verdict

_MINUTES = 10.0
_DIFFERENT = DifferenceError.exit_code
_VERDICTS = {
    0: Verdict.EQUAL,
    _DIFFERENT: Verdict.DIFFERENT,
    NotComparableError.exit_code: Verdict.NOT_COMPARABLE,
}
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Asked: TypeAlias = tuple[list[str], list[str], argparse.Namespace]
"""A job, its reference, and parsed flags."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Tells what came of a comparison: `comparison` is None where a program has failed."""

    name: str
    job: list[str]
    against: list[str]
    verdict: str
    status: int
    seconds: float
    error: HpError | None
    comparison: Comparison | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of checks."""
    add = parser.add_argument
    add(
        "--ci",
        action="store_true",
        help=f"for checks of pull requests: --minutes {_MINUTES:g}, and --cache in your own cache",
    )
    add(
        "--minutes",
        metavar="N",
        type=real("--minutes"),
        help="for all runs of a comparison: to keep to it fewer are made, and long programs ended",
    )
    add(
        "--cache",
        metavar="DIR",
        help="keep recordings of references, and do not run these again as long as neither their "
        "files nor arguments, variables, versions and this machine change",
    )
    add("--json", metavar="FILE", help="write what was found as JSON")
    add("--junit", metavar="FILE", help="write what was found as JUnit's XML")


def read(file: Path, parse: Callable[[list[str]], Asked]) -> dict[str, Asked]:
    """Read a file of comparisons: name -> what stands behind `hp-verify` on its command line.

    Raises:
        ConfigError: When it is none, or a command line is wrong.
    """
    try:
        lines = msgspec.toml.decode(read_named(file), type=dict[str, str])
        asked = {name: parse(shlex.split(line, comments=True)) for name, line in lines.items()}
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
        0: each job is equal to its reference; else the status of the one comparison.

    Raises:
        HpError: That of the one comparison; of several one that counts those that are not equal.
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
                done.append(_compare(name, job, against, flags))
        finally:
            _write(options, done)
    failed = [one for one in done if one.error is not None]
    if not options.jobs and done[0].error is not None:
        if done[0].comparison is not None:  # which was printed
            return done[0].status
        raise done[0].error
    if not failed:
        return 0
    say("\n".join(f"{one.name}: {one.error or one.verdict}" for one in done))
    status = max(failed, key=lambda one: (one.status == _DIFFERENT, one.status)).status
    raise RunFailedError(f"{len(failed)} of {len(done)} jobs are not equal", status=status)


def _compare(
    name: str, job: list[str], against: list[str], options: argparse.Namespace
) -> _Outcome:
    began, failed, found = time.monotonic(), None, list[Comparison]()
    try:
        jobs.run(job, against, options, found=found.append)
    except HpError as error:
        failed = error
    status, seconds = failed.exit_code if failed else 0, round(time.monotonic() - began, 1)
    verdict = _VERDICTS.get(status, "failed")
    found_one = found[0] if found else None
    return _Outcome(name, job, against, verdict, status, seconds, failed, found_one)


def _write(options: argparse.Namespace, done: Sequence[_Outcome]) -> None:
    """Write the files that are asked for."""
    if options.json:
        made = msgspec.json.encode({"format": 1, "comparisons": done}, enc_hook=str)
        write_named("--json", options.json, msgspec.json.format(made).decode())
    if options.junit:
        write_named("--junit", options.junit, _NO_XML.sub("?", _junit(done)))


def _junit(done: Sequence[_Outcome]) -> str:
    """Return JUnit's XML: a test case for each comparison, with numbers of all its phases."""
    suite = ET.Element("testsuite", name="hp-verify", tests=str(len(done)))
    for outcome in done:
        about = {"classname": "hp-verify", "name": outcome.name, "time": str(outcome.seconds)}
        case, found = ET.SubElement(suite, "testcase", about), outcome.comparison or Comparison()
        properties = ET.SubElement(case, "properties")
        for kind, told in (
            ("version of ", found.versions),
            ("seconds of ", found.seconds),
            ("error of ", found.largest),
            ("not compared: ", found.unaligned),
        ):
            for name, value in told.items():
                ET.SubElement(properties, "property", name=f"{kind}{name}", value=str(value))
        if outcome.error is not None:
            kind, text = (
                "failure" if outcome.verdict == "different" else "error",
                str(outcome.error),
            )
            ET.SubElement(case, kind, message=text.partition("\n")[0]).text = text
        if outcome.comparison is not None:
            ET.SubElement(case, "system-out").text = jobs.report(found)
    return ET.tostring(suite, encoding="unicode", xml_declaration=True)
