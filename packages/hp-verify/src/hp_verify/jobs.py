"""Run two jobs and compare them: `hp-verify -- JOB --against -- REFERENCE`; imports no torch."""

import argparse
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from msgspec.structs import replace

from hp_base.command_line import new_folder, say
from hp_base.errors import ConfigError, HpError
from hp_base.numbers import real, whole
from hp_base.session import last_lines, raised_in, status_of
from hp_base.signals import ending
from hp_verify import __version__
from hp_verify.budget import Budget
from hp_verify.cache import kept_or_run
from hp_verify.comparing.compare import Floor, compare
from hp_verify.comparing.explain import explain
from hp_verify.comparing.findings import UPDATE, Comparison, Verdict
from hp_verify.comparing.recordings import CUT, NothingRecordedError, Recording, join
from hp_verify.recording.request import Focus, Request, environment
from hp_verify.recording.rules import read_rules

_SECONDS = 1800.0
_SHOWN = 12
_PAGE = "report.txt"
_STATES = {
    Verdict.EQUAL: "equal",
    Verdict.DIFFERENT: "NOT EQUAL",
    Verdict.NOT_COMPARABLE: "NOT COMPARABLE (no gradient, no weight)",
}
AGAINST = "--against"
_REFERENCE, _OTHER_SUMS, _JOB = "reference", "reference, other sums", "job"


class JobFailedError(HpError):
    """Tells that a job, or its reference, ended with a failure of its own.

    Args:
        message: Way in which the job ended, and the last lines of its log.
        recording: Steps up to the failure whose updates are whole; None: nothing was recorded.

    Attributes:
        so_far: What the job had computed by then, beside its reference; None: nothing.
    """

    def __init__(self, message: str, recording: Recording | None = None) -> None:
        super().__init__(message)
        self.recording = recording
        self.so_far: Comparison | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that stand before the first ``--``."""
    parser.add_argument(
        "--steps",
        type=whole("--steps", least=1),
        help="compare the first N updates of the weights alone (default: all of a short job, a "
        "spread up to the end of a long one)",
    )
    parser.add_argument("--float64", action="store_true", help="lift both jobs to float64")
    parser.add_argument(
        "--same-start", action="store_true", help="give the job the reference's first weights"
    )
    parser.add_argument(
        "--no-outputs", action="store_true", help="parameters alone, no outputs of modules"
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="do not run both jobs once more around a first difference, to say where exactly it "
        "lies and to write a program that shows it",
    )
    parser.add_argument("--seed", type=whole("--seed", least=0), default=0, help="of both (0)")
    parser.add_argument(
        "--seconds",
        type=real("--seconds"),
        default=_SECONDS,
        help=f"most that a job may take (default: {_SECONDS:g})",
    )
    parser.add_argument(
        "--rules", metavar="FILE", help="where the job's parameters lie, if nothing else tells"
    )
    parser.add_argument(
        "--keep", metavar="DIR", help="keep the recordings and the reproduction, in a new folder"
    )
    parser.add_argument("--verbose", action="store_true", help="print all that a page has")


def split(arguments: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Part flags, job and reference: ``FLAGS -- JOB --against -- REFERENCE``.

    Raises:
        ConfigError: When the job or the reference is missing.
    """
    end = list(arguments).index("--")
    flags, rest = list(arguments[:end]), list(arguments[end + 1 :])
    marks = [i for i, a in enumerate(rest[:-1]) if a == AGAINST and rest[i + 1] == "--"]
    if not marks:
        raise ConfigError("-- JOB must be followed by --against -- REFERENCE")
    job, reference = rest[: marks[0]], rest[marks[0] + 2 :]
    if not job or not reference:
        raise ConfigError("both the job and the reference must be commands")
    return flags, job, reference


def run(job: Sequence[str], reference: Sequence[str], options: argparse.Namespace) -> Comparison:
    """Verify a job, and print what was found.

    Args:
        job: Command of the job to judge.
        reference: Command of the reference.
        options: Parsed flags of `add_arguments`, and of `hp_verify.ci.add_arguments`.

    Raises:
        JobFailedError: When one of them failed.
    """
    shown = report if options.verbose else summary
    try:
        comparison = verify(
            job,
            reference,
            keep=Path(options.keep) if options.keep is not None else None,
            steps=options.steps,
            seed=options.seed,
            float64=options.float64,
            outputs=not options.no_outputs,
            same_start=options.same_start,
            rules=Path(options.rules) if options.rules else None,
            again=not options.once,
            seconds=options.seconds,
            minutes=options.minutes,
            cache=Path(options.cache) if options.cache else None,
            tell=say,
        )
    except JobFailedError as failed:
        if failed.so_far is not None:
            say(f"what the job computed before it failed:\n{shown(failed.so_far)}")
        raise
    say(shown(comparison))
    return comparison


def verify(
    job: Sequence[str],
    reference: Sequence[str],
    *,
    steps: int | None = None,
    seed: int = 0,
    float64: bool = False,
    outputs: bool = True,
    same_start: bool = False,
    rules: Path | None = None,
    again: bool = True,
    keep: Path | None = None,
    seconds: float = _SECONDS,
    minutes: float | None = None,
    cache: Path | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Comparison:
    """Run a reference three times, the job once, and compare; both again where they differ.

    Args:
        job: Command of the job to judge.
        reference: Command of the reference.
        steps: Updates of the weights that are compared, the first ones; None: all of a short job,
            a spread up to the end of a long one.
        seed: Seed of both.
        float64: Whether both are lifted to float64.
        outputs: Whether outputs of modules are compared, too.
        same_start: Whether the job begins with the reference's first weights.
        rules: File that says where the job's parameters lie; None: nothing need be said.
        again: Whether both run once more around a first difference, to show where exactly it lies.
        keep: A new folder for the recordings, the reproduction and the page; None: recordings are
            removed, and what tells of a difference is in a temporary folder, which stays.
        seconds: Most seconds that a job may take.
        minutes: Minutes for all runs together, which decide how many are made and how many steps
            of a long job are compared; None: as long as they take.
        cache: Folder in which recordings of references are kept, to be used in place of runs as
            long as nothing that they depend on changes; None: they are not kept.
        tell: Called with a line after each run.

    Returns:
        What differs, in the order in which it is computed; `report` says it in lines.

    Raises:
        JobFailedError: When one of them failed.
        ConfigError: When one cannot be started, or rules or the folder are wrong.
    """
    if rules is not None:
        read_rules(rules)  # before anything runs
    told = [f"{_JOB}: {shlex.join(job)}", f"{_REFERENCE}: {shlex.join(reference)}"]

    def tell_both(line: str) -> None:
        told.append(line)
        tell(line)

    with (
        TemporaryDirectory(prefix="hp-verify-job-", ignore_cleanup_errors=True)
        if keep is None
        else nullcontext(new_folder(str(keep)).resolve())
    ) as made:
        folder = Path(made)
        common = Request("", seed=seed, steps=steps or 0, float64=float64, outputs=outputs)
        beside = replace(common, reference=str(folder / _REFERENCE))
        place = str(rules.resolve()) if rules is not None else ""
        sides = {
            _REFERENCE: (reference, common),
            _OTHER_SUMS: (reference, beside),
            _JOB: (job, replace(beside, start=same_start, rules=place)),
        }
        budget = Budget(minutes, seconds)
        runs = _Runs(sides, folder, budget, cache, tell_both, last=steps or 0)
        actual, expected, floor = runs.first()
        comparison = compare(actual, expected, floor)
        if rules is not None:
            comparison.unaligned = _idle(rules, folder) | comparison.unaligned
        first = None if comparison.is_excused else comparison.first
        shown = folder if keep is not None else None
        if shown is None and comparison.verdict != Verdict.EQUAL:
            shown = Path(mkdtemp(prefix="hp-verify-reproduction-"))
        if again and first is not None and not budget.allows_second_runs():
            comparison.again = f"the {minutes:g} minutes leave no time for second runs"
        elif again and shown is not None and first is not None and first.phase != UPDATE:
            from hp_verify.reproducing.locate import look_again  # noqa: PLC0415 - imports torch

            inside = shown if keep is None else shown / "reproduction"
            look_again(comparison, (actual, expected), runs.again, inside, float64=float64)
        if shown is not None:
            most = len(comparison.unaligned) + len(comparison.differences)
            comparison.page = shown / _PAGE
            lines = "\n".join([*told, *_lines(comparison, most), ""])
            comparison.page.write_text(lines, encoding="utf-8")
    comparison.seconds = budget.seconds
    facts = expected.facts[0].items()
    seen = {name: text for name, text in facts if name not in ("rank", "ranks", "program")}
    comparison.versions = {**seen, "hp-verify": __version__}
    return comparison


@dataclass(slots=True)
class _Runs:
    """Runs a job and its reference as often as a comparison needs.

    Attributes:
        sides: Name of a program -> its command, and the request to it, without a folder.
        folder: An empty folder for the recordings.
        budget: Time for the runs.
        cache: Folder for recordings of references; None: they are not kept.
        tell: Called with a line after each run.
        last: Last step that a run must come to; 0: that of the reference, which is not known yet.
    """

    sides: Mapping[str, tuple[Sequence[str], Request]]
    folder: Path
    budget: Budget
    cache: Path | None
    tell: Callable[[str], object]
    last: int = 0

    def first(self) -> tuple[Recording, Recording, Floor]:
        """Run the reference three times and the job once.

        Returns:
            Recordings of the job and of the reference, and what rounding explains.
        """

        def referred(name: str, seed: int) -> Recording:
            found = self._recorded(_OTHER_SUMS if seed else _REFERENCE, name, disturb=seed)
            self.last = self.last or found.last
            return found

        asked = *self.sides[_REFERENCE], self.budget.minutes, __version__
        expected, floor = kept_or_run(
            self.cache, asked, self.folder, referred, self.budget, self.tell
        )
        self.last = self.last or expected.last
        try:
            actual = self._recorded(_JOB, _JOB)
        except JobFailedError as failed:
            if failed.recording is not None and failed.recording.steps:
                failed.so_far = compare(failed.recording, expected, floor)
            raise
        return actual, expected, floor

    def again(self, side: str, focus: Focus) -> Path:
        """Run the "job" or the "reference" once more, around a difference; return its folder."""
        self._recorded(side, f"{side}-again", focus=focus)
        return self.folder / f"{side}-again"

    def _recorded(
        self, side: str, name: str, *, disturb: int = 0, focus: Focus | None = None
    ) -> Recording:
        """Run a program under the recorder, and put together what its processes wrote."""
        command, common = self.sides[side]
        folder, who = self.folder / name, side if focus is None else f"{side}, once more"
        notes = self.cache is not None and name == _REFERENCE
        request = replace(common, folder=str(folder), disturb=disturb, focus=focus, opened=notes)
        folder.mkdir()
        began = time.monotonic()
        log = folder / "log.txt"
        step = self.last if focus is None else min(focus.step, self.last)
        try:
            status = status_of(
                command,
                log,
                seconds=(limit := self.budget.limit(name)),
                env=environment(request),
                has_enough=lambda: self.budget.is_enough(folder, step),
            )
        except OSError as error:
            raise ConfigError(
                f"{shlex.join(command)} cannot be started: {error.strerror}"
            ) from None
        took = time.monotonic() - began
        self.budget.seconds[name] = round(took, 1)
        recording = None
        with suppress(NothingRecordedError) if status != 0 else nullcontext():
            recording = join(folder)
        if status != 0:
            done = None if recording is None else recording.before_failing()
            may_be_long = (
                side != _JOB or self.budget.minutes or any(self.folder.glob(f"{_REFERENCE}*/{CUT}"))
            )
            if done is None or not (
                step in done.steps or (status is None and may_be_long and done.steps)
            ):
                ended = f"was not done after {limit:g} s" if status is None else ending(status)
                told = f"the {who} {ended}: {shlex.join(command)}\n{last_lines(log)}"
                told += f"\nthe {who} had made no update by then" * (done is None or not done.steps)
                raise JobFailedError(told, done)
            ended = f"was ended after {took:.0f} s" if status is None else ending(status)
            if step in done.steps:  # at its end, perhaps: torch with Gloo aborts there now and then
                raised = ": ".join(filter(None, (f"after all {self.last} steps", raised_in(log))))
                self.tell(f"note: the {who} {ended}, {raised}")
            else:
                (folder / CUT).touch()
                recording = done
                self.tell(f"note: the {who} {ended}, in step {done.last + 1}")
        assert recording is not None  # else `join` has failed
        ranks, steps = recording.num_ranks, recording.num_steps
        told = f"{ranks} process{'es' * (ranks != 1)}, {steps} step{'s' * (steps != 1)}"
        self.tell(f"{who}: {told}, {took:.1f} s")
        return recording


def _idle(rules: Path, folder: Path) -> dict[str, str]:
    """List the rules that fit no parameter of the job."""
    from hp_verify.recording.launches import parameters_of  # noqa: PLC0415 - imports torch

    idle = read_rules(rules).idle(parameters_of(folder / "job"))
    return {f"rule {name}": "it fits no parameter of the job" for name in idle}


def summary(comparison: Comparison) -> str:
    """Say in at most three lines what was found: the verdict, the first difference, and why."""
    lines, first, page = [_verdict(comparison)], comparison.first, comparison.page
    more = f"all of it: {page}" if page is not None else "--verbose lists them"
    if comparison.is_excused:
        lines.append(f"excused, as rounding decides a choice before it: {comparison.flip}")
    elif first is not None:
        lines.append(f"first difference: {first}")
        likely = [f"likely: {reason}" for reason in explain(comparison)[:1]]
        return "\n".join([*lines, "; ".join(likely + [more] * (page is not None))])
    if comparison.unaligned:
        reasons = Counter(comparison.unaligned.values()).most_common(2)
        told = ", ".join(f"{why} ({count})" for why, count in reasons)
        lines.append(f"{len(comparison.unaligned)} could not be compared: {told}; {more}")
    return "\n".join(lines)


def report(comparison: Comparison) -> str:
    """Say in lines all that was found: `print(report(comparison))`."""
    return "\n".join(_lines(comparison, _SHOWN))


def _verdict(comparison: Comparison) -> str:
    state = _STATES[comparison.verdict]
    return f"{state} over {comparison.over}, {comparison.num_compared:,} tensors and numbers"


def _lines(comparison: Comparison, most: int) -> list[str]:
    """Say what was found, with at most so many differences and tensors that were not compared."""
    first = comparison.first
    here = comparison.together
    lines = [f"FAIL  {difference}" for difference in here[:most]]
    more = {
        "more there": len(here) - len(lines),
        "after it": len(comparison.differences) - len(here),
    }
    lines += [f"      and {count} {where}" for where, count in more.items() if count]
    if comparison.unaligned:
        lines.append(f"{len(comparison.unaligned)} could not be compared:")
        shown = list(comparison.unaligned.items())[:most]
        lines += [f"      {name}: {why}" for name, why in shown]
        lines += [f"      and {len(comparison.unaligned) - most} more"] * (
            len(comparison.unaligned) > most
        )
    if first is not None:
        lines.append(f"first difference: {first}")
        lines += [f"likely: {reason}" for reason in explain(comparison)]
        lines += _exactly(comparison)
    largest = ", ".join(f"{phase} {error:.1e}" for phase, error in comparison.largest.items())
    if first is not None and comparison.flip is not None:
        lines.append(f"first other choice: {comparison.flip}")
    if comparison.is_excused:
        lines.append("excused: it follows from that choice, which rounding decides")
    return [*lines, f"{_verdict(comparison)}: {largest}"]


def _exactly(comparison: Comparison) -> list[str]:
    """Say what the second run found."""
    lines = [f"exactly: {comparison.exact}"] if comparison.exact else []
    if (made := comparison.reproduction) is not None:
        lines.append(f"reproduction: {shlex.join([sys.executable, str(made.path)])}")
        lines += [f"      {line}" for line in made.output.splitlines()]
    elif comparison.again:
        lines.append(f"no reproduction: {comparison.again}")
    return lines
