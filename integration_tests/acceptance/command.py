"""The kit's loop: cases in their order until all are done or the minutes are up. No torch."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from hp_base.command_line import say
from hp_base.environment import external_world
from hp_base.errors import ConfigError, DifferenceError, HpError
from hp_base.numbers import real, whole
from hp_base.session import last_lines
from integration_tests.acceptance import process
from integration_tests.acceptance.cases import TIMED, Case, Place, cases_of, chosen, slug
from integration_tests.acceptance.outcome import BAD, Found, Outcome, Status, read, write
from integration_tests.acceptance.page import write_result

_LEAST_SECONDS = 5.0
"""Less than that is left for no case."""
_MOST_MINUTES = 1e5
_MOST_RANKS = 64
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the kit.

    Args:
        argv: Arguments of the command line; None: those of this process.

    Returns:
        0: what was run passed. 8: something did not. Others as for `hp`.
    """
    try:
        options = _parser().parse_args(argv)
        if external_world() is not None:
            from integration_tests.acceptance.nodes import main as over_nodes  # noqa: PLC0415 - imports torch

            return over_nodes(options)
        return Kit(options).run()
    except HpError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m integration_tests.acceptance",
        description="Find out whether hp-train is right and how fast it is on this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out", default="hp-kit", metavar="DIR", help="of the results (default: hp-kit)"
    )
    parser.add_argument(
        "--minutes",
        type=real("--minutes", below=_MOST_MINUTES),
        default=30.0,
        help="after which no more is begun, and what runs is ended (default: 30)",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--ranks",
        type=whole("--ranks", least=1, largest=_MOST_RANKS),
        default=0,
        metavar="N",
        help="of layouts at most, and GPUs (default: all GPUs, 4 ranks on one; 2 on a CPU)",
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="cases whose names begin so"
    )
    parser.add_argument("--quick", action="store_true", help="a few cases that stand for all")
    parser.add_argument("--again", action="store_true", help="run anew what did not pass")
    parser.add_argument("--list", action="store_true", help="say which cases there are, and stop")
    return parser


class Kit:
    """A run of the kit in a folder that keeps what was found before.

    Args:
        options: Parsed flags of the command.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._deadline = time.monotonic() + options.minutes * 60
        self.out = Path(options.out)
        self.work = self.out / "work"
        self._outcomes: dict[str, Outcome] = {}
        self._facts: dict[str, Any] = {}

    def run(self) -> int:
        """Look at the machine, run its cases, write what was found."""
        try:
            (self.out / "results").mkdir(parents=True, exist_ok=True)
            self.work.mkdir(exist_ok=True)
        except OSError as error:
            reason = error.strerror
            raise ConfigError(f"--out ({self.out}) must be a writable folder: {reason}") from None
        place = self._look()
        cases = chosen(cases_of(place), self._options.only, quick=self._options.quick)
        if not cases:
            raise ConfigError(f"--only ({' '.join(self._options.only)}) must name some case")
        if self._options.list:
            for case in cases:
                say(f"{case.name:<28}{case.left_out or case.what}")
            return 0
        try:
            for number, case in enumerate(cases, 1):
                self._keep(self._outcome_of(case, place), f"{number}/{len(cases)}")
                self._write(cases)
        except KeyboardInterrupt:
            self._write(cases)
            raise
        bad = [outcome.name for outcome in self._outcomes.values() if outcome.status in BAD]
        say(f"send back: {self.out / 'result.json'} and {self.out / 'result.html'}")
        return DifferenceError.exit_code if bad else 0

    def _look(self) -> Place:
        """Ask a process what the machine is; refuse results of another."""
        options = self._options
        figures = process.look(
            self.work, self.work / "machine", options, who="the machine", env=os.environ
        )
        known = self.out / "machine.json"
        encoded = msgspec.json.format(msgspec.json.encode(figures), indent=1)
        if known.exists() and known.read_bytes() != encoded:
            raise ConfigError(
                f"--out ({self.out}) has results of another machine, version or --ranks"
            )
        known.write_bytes(encoded)
        place = msgspec.convert(figures["place"], type=Place)
        if options.device == "cuda" and place.device != "cuda":
            raise ConfigError("--device (cuda) must be cpu or auto where there is no GPU")
        self._facts = figures["facts"]
        what = f"{place.num_gpus} x {place.name}" if place.num_gpus else "CPU"
        say(f"{what}, layouts of up to {place.max_ranks} ranks, {options.minutes:g} minutes")
        return place

    def _outcome_of(self, case: Case, place: Place) -> Outcome:
        known = read(self._file(case.name), Outcome)
        is_final = known is not None and (known.status not in BAD or not self._options.again)
        if known is not None and is_final and known.status not in ("not run", "left out"):
            return known
        if case.left_out:
            return _outcome(case, "left out", case.left_out)
        for name in case.needs:
            found = self._outcomes.get(name)
            if found is not None and found.status != "passed":
                return _outcome(case, "not run", f"needs {name}, which has not passed")
        left = self._deadline - time.monotonic()
        if left < _LEAST_SECONDS:
            return _outcome(case, "not run", "the minutes were up")
        return self._run(case, place, min(case.seconds, left), is_cut=left < case.seconds)

    def _run(self, case: Case, place: Place, seconds: float, *, is_cut: bool) -> Outcome:
        folder = self.work / "cases" / slug(case.name)
        task = {"work": str(self.work.resolve()), "case": asdict(case), "place": place}
        began = time.monotonic()
        # What is timed is run as everyone runs it; a person's own settings are kept.
        checks = {} if case.work in TIMED else process.checking(folder)
        env = {**checks, **os.environ, **case.env}
        found = process.run(task, folder, seconds=seconds, env=env)
        spent = time.monotonic() - began
        if found.status == "timed out" and is_cut:
            found = Found(status="not run", summary="the minutes were up while it ran")
        if warnings := process.nccl_warnings(folder):
            found = replace(found, figures={**found.figures, "NCCL warnings": warnings})
        log = last_lines(folder / process.LOG) if found.status in BAD or warnings else ""
        return Outcome.of(case, found, seconds=spent, log=log)

    def _keep(self, outcome: Outcome, place: str) -> None:
        self._outcomes[outcome.name] = outcome
        write(self._file(outcome.name), outcome)
        spent = f"{outcome.seconds:5.0f} s" if outcome.seconds else " " * 7
        say(f"{place:>7} {spent}  {outcome.status:<10}{outcome.name}: {outcome.summary}")

    def _file(self, name: str) -> Path:
        return self.out / "results" / f"{slug(name)}.json"

    def _write(self, cases: Sequence[Case]) -> None:
        """Write both files anew, after every case: whatever comes next, they are there."""
        outcomes = [
            self._outcomes.get(case.name) or _outcome(case, "not run", "it was not its turn yet")
            for case in cases
        ]
        write_result(self.out, self._facts, outcomes)


def _outcome(case: Case, status: Status, summary: str) -> Outcome:
    """Of a case that is not run."""
    return Outcome.of(case, Found(status=status, summary=summary))
