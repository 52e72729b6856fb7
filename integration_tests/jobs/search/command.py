"""The command ``python -m integration_tests.jobs.search``; torch is imported when it runs."""

import argparse
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hp_base.command_line import Parser, require_files, require_folder, say, write_named
from hp_base.errors import ConfigError
from hp_base.numbers import whole
from integration_tests.jobs.search.cases import DIFFERENT, FAMILIES, Outcome, cases_of, versions_of
from integration_tests.jobs.search.table import table
from integration_tests.models.architectures.kept import folder_of


class Found(msgspec.Struct, frozen=True):
    """What is known of a family.

    Attributes:
        versions: Package -> version that was tried.
        outcomes: What became of its combinations.
    """

    versions: dict[str, str]
    outcomes: list[Outcome]


def parser() -> argparse.ArgumentParser:
    """Return the flags of the command."""
    made = Parser(
        prog="python -m integration_tests.jobs.search",
        description="Run features of released libraries on two or four ranks, each beside one "
        "process or plain tensors, and tell what is different.",
        allow_abbrev=False,
    )
    made.add_argument("families", nargs="*", metavar="FAMILY", help="these (default: all)")
    made.add_argument("--only", metavar="REGEX", help="combinations of such names, and again")
    made.add_argument(
        "--minutes", type=whole("--minutes", least=1), help="begin nothing new after so many"
    )
    made.add_argument("--results", metavar="DIR", help="keep what is found, and go on there")
    made.add_argument("--table", metavar="FILE", help="what was found, as a page of Markdown")
    return made


def run(arguments: Sequence[str]) -> int:
    """Search, and tell.

    Args:
        arguments: What follows the command.

    Returns:
        0: whatever is different, which is a finding.

    Raises:
        ConfigError: When a family is asked for that there is not.
    """
    options = parser().parse_args(arguments)
    require_files(options, "table")
    require_folder("--results", options.results)
    unknown = [name for name in options.families if name not in FAMILIES]
    if unknown:
        raise ConfigError(f"FAMILY ({unknown[0]}) must be one of {', '.join(FAMILIES)}")
    until = time.monotonic() + 60.0 * options.minutes if options.minutes else float("inf")
    with folder_of(options.results, "hp-search-kept-") as kept:
        for family in options.families or FAMILIES:
            _search(family, Path(kept) / f"{family}.jsonl", options.only or "", until)
        found = {name: _read(Path(kept) / f"{name}.jsonl", name) for name in FAMILIES}
    found = {name: one for name, one in found.items() if one.outcomes}
    states = Counter(each.state for one in found.values() for each in one.outcomes)
    say(", ".join(f"{count} {state}" for state, count in sorted(states.items())))
    if options.table:
        pairs = {name: (one.versions, one.outcomes) for name, one in found.items()}
        write_named("--table", options.table, table(pairs))
    return 0


def _search(family: str, file: Path, only: str, until: float) -> None:
    """Run what is left of a family, and append what became of each combination to its file."""
    versions = versions_of(family)
    if not versions:
        say(f"{family}: {', '.join(FAMILIES[family])} must be installed")
        return
    from integration_tests.jobs.search.running import outcomes  # noqa: PLC0415 - needs torch

    known = {one.name for one in _read(file, family).outcomes}
    left = [
        case
        for case in cases_of(family)
        if (re.search(only, case.name) if only else case.name not in known)
    ]
    if not file.exists():
        file.write_bytes(msgspec.json.encode(versions) + b"\n")
    with file.open("ab") as kept:
        for one in outcomes(family, left) if left else ():
            kept.write(msgspec.json.encode(one) + b"\n")
            kept.flush()
            if one.state == DIFFERENT:
                say(f"{family}: {one.name}: {one.where}: {one.error}")
            if time.monotonic() > until:
                return


def _read(file: Path, family: str) -> Found:
    """Return what a file has of a family: the last outcome of each name; of other versions none."""
    if not file.exists():
        return Found({}, [])
    first, *lines = file.read_bytes().splitlines()
    versions = msgspec.json.decode(first, type=dict[str, str])
    installed = versions_of(family)
    if installed and versions != installed:
        file.unlink()
        return Found({}, [])
    some = [msgspec.json.decode(line, type=Outcome) for line in lines]
    return Found(versions, [*{one.name: one for one in some}.values()])
