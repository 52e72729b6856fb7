"""`hp-verify -- JOB --against -- REFERENCE`: both jobs run and compared. No torch is imported."""

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from hp_base.command_line import say
from hp_base.errors import ConfigError, DifferenceError, HpError
from hp_base.numbers import real, whole
from hp_base.session import last_lines, status_of
from hp_base.signals import ending
from hp_verify.comparing.compare import UPDATE, Comparison, Floor, Place, compare, with_floor
from hp_verify.comparing.explain import explain
from hp_verify.comparing.joined import NothingRecordedError, Recording, join
from hp_verify.recording.request import Focus, Request, environment
from hp_verify.recording.rules import read_rules

_STEPS = 3
_SECONDS = 1800.0
_SHOWN = 12
AGAINST = "--against"


class JobFailedError(HpError):
    """A job ended with a failure of its own.

    Args:
        message: How it ended, and its last lines.
        recording: What it had recorded; None: nothing.
    """

    def __init__(self, message: str, recording: Recording | None = None) -> None:
        super().__init__(message)
        self.recording = recording


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that stand before the first ``--``."""
    parser.add_argument(
        "--steps",
        type=whole("--steps", least=1),
        default=_STEPS,
        help=f"updates of the weights (default: {_STEPS})",
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


def run(job: Sequence[str], reference: Sequence[str], options: argparse.Namespace) -> int:
    """Verify a job, and print what was found.

    Args:
        job: Command of the job to judge.
        reference: Command of the reference.
        options: Parsed flags of `add_arguments`.

    Returns:
        0: the job is equal to its reference.

    Raises:
        DifferenceError: When it is not.
        JobFailedError: When one of them failed.
    """
    if options.rules:
        read_rules(Path(options.rules))  # before anything runs
    with _folder(options.keep) as folder:
        comparison = verify(
            job,
            reference,
            folder,
            steps=options.steps,
            seed=options.seed,
            float64=options.float64,
            outputs=not options.no_outputs,
            same_start=options.same_start,
            rules=options.rules,
            again=not options.once,
            is_kept=options.keep is not None,
            seconds=options.seconds,
        )
        say(report(comparison))
    if not comparison.num_compared:
        raise DifferenceError("nothing of the job could be laid beside its reference")
    if comparison.first is not None:
        raise DifferenceError(f"the jobs differ, first at {comparison.first}")
    return 0


def verify(
    job: Sequence[str],
    reference: Sequence[str],
    folder: Path,
    *,
    steps: int = _STEPS,
    seed: int = 0,
    float64: bool = False,
    outputs: bool = True,
    same_start: bool = False,
    rules: str | None = None,
    again: bool = True,
    is_kept: bool = True,
    seconds: float = _SECONDS,
) -> Comparison:
    """Run a reference three times, the job once, and compare; both again where they differ.

    Args:
        job: Command of the job to judge.
        reference: Command of the reference.
        folder: An empty folder for the recordings.
        steps: Updates of the weights that are compared.
        seed: Seed of both.
        float64: Whether both are lifted to float64.
        outputs: Whether outputs of modules are compared, too.
        same_start: Whether the job begins with the reference's first weights.
        rules: File that says where the job's parameters lie; None: nothing need be said.
        again: Whether both run once more around a first difference, to show where exactly it lies.
        is_kept: Whether the reproduction goes to `folder`, or to a folder of its own.
        seconds: Most seconds that a job may take.

    Raises:
        JobFailedError: When one of them failed.
        ConfigError: When one cannot be started.
    """
    common: dict[str, Any] = {"seed": seed, "steps": steps, "float64": float64, "outputs": outputs}
    theirs = str(folder / "reference")

    def referred(name: str, seed: int) -> Recording:
        who = "reference, other sums" if seed else "reference"
        known = theirs if seed else ""
        asked = Request(str(folder / name), reference=known, disturb=seed, **common)
        return _recorded(reference, asked, who, seconds)

    expected, floor = with_floor(referred)
    of_job: dict[str, Any] = {
        "reference": theirs,
        "start": same_start,
        "rules": str(Path(rules).resolve()) if rules else "",
        **common,
    }
    asked = Request(str(folder / "job"), **of_job)
    try:
        actual = _recorded(job, asked, "job", seconds)
    except JobFailedError as failed:
        say(_before_failing(failed.recording, expected, floor))
        raise
    comparison = compare(actual, expected, floor)
    if rules:
        from hp_verify.recording.launches import parameters_of  # noqa: PLC0415 - imports torch

        idle = read_rules(Path(rules)).idle(parameters_of(folder / "job"))
        told = {f"rule {name}": "it fits no parameter of the job" for name in idle}
        comparison.unaligned = told | comparison.unaligned
    if comparison.first is None or comparison.first.phase == UPDATE or not again:
        return comparison

    def once_more(side: str, focus: Focus) -> Path:
        place = folder / f"{side}-again"
        asked = Request(str(place), focus=focus, **(of_job if side == "job" else common))
        _recorded(job if side == "job" else reference, asked, f"{side}, once more", seconds)
        return place

    from hp_verify.reproducing.locate import look_again  # noqa: PLC0415 - imports torch

    kept = folder if is_kept else Path(mkdtemp(prefix="hp-verify-reproduction-"))
    look_again(
        comparison,
        (actual, expected),
        once_more,
        kept / "reproduction" if is_kept else kept,
        float64=float64,
    )
    return comparison


def _recorded(command: Sequence[str], request: Request, who: str, seconds: float) -> Recording:
    folder = Path(request.folder)
    folder.mkdir()
    began = time.monotonic()
    log = folder / "log.txt"
    try:
        status = status_of(command, log, seconds=seconds, env=environment(request))
    except OSError as error:
        raise ConfigError(f"{shlex.join(command)} cannot be started: {error.strerror}") from None
    took = time.monotonic() - began
    recording = None
    with suppress(NothingRecordedError) if status != 0 else nullcontext():
        recording = join(folder)
    # At its end, perhaps: torch with Gloo aborts there now and then.
    is_done = recording is not None and recording.is_whole(request.steps)
    if recording is None or (status != 0 and not (status and is_done)):
        ended = f"was not done after {seconds:g} s" if status is None else ending(status)
        told = f"the {who} {ended}: {shlex.join(command)}\n{last_lines(log)}"
        raise JobFailedError(told, recording)
    if status:
        say(f"note: the {who} {ending(status)}, after all {request.steps} steps")
    ranks = f"{recording.num_ranks} process{'es' * (recording.num_ranks != 1)}"
    say(f"{who}: {ranks}, {recording.num_steps} steps, {took:.1f} s")
    return recording


def _before_failing(recording: Recording | None, expected: Recording, floor: Floor) -> str:
    """Return how far a job that has failed had come, and whether it was right until then."""
    done = None if recording is None else recording.before_failing()
    if done is None or not done.steps:
        return "the job had made no update when it failed"
    last = max(done.steps)
    known = Recording({i: s for i, s in expected.steps.items() if i <= last}, expected.facts)
    comparison = compare(done, known, floor)
    return f"what the job computed before it failed:\n{report(comparison)}"


def report(comparison: Comparison) -> str:
    """Return what was found, in lines."""
    first = comparison.first
    here = [p for p in comparison.differences if first and _where(p) == _where(first)]
    lines = [f"FAIL  {place}" for place in here[:_SHOWN]]
    more = {
        "more there": len(here) - len(lines),
        "after it": len(comparison.differences) - len(here),
    }
    lines += [f"      and {count} {where}" for where, count in more.items() if count]
    if comparison.unaligned:
        lines.append(f"{len(comparison.unaligned)} could not be compared:")
        shown = list(comparison.unaligned.items())[:_SHOWN]
        lines += [f"      {name}: {why}" for name, why in shown]
        lines += [f"      and {len(comparison.unaligned) - _SHOWN} more"] * (
            len(comparison.unaligned) > _SHOWN
        )
    if first is not None:
        lines.append(f"first difference: {first}")
        lines += [f"likely: {reason}" for reason in explain(comparison)]
        lines += _exactly(comparison)
    largest = ", ".join(f"{phase} {error:.1e}" for phase, error in comparison.largest.items())
    state = "equal" if first is None else "NOT EQUAL"
    lines.append(
        f"{state} over {comparison.num_steps} steps, {comparison.num_compared:,} tensors and "
        f"numbers: {largest}"
    )
    return "\n".join(lines)


def _exactly(comparison: Comparison) -> list[str]:
    """Return what the second run found."""
    lines = [f"exactly: {comparison.exact}"] if comparison.exact else []
    if (made := comparison.reproduction) is not None:
        lines.append(f"reproduction: {shlex.join([sys.executable, str(made.path)])}")
        lines += [f"      {line}" for line in made.output.splitlines()]
    elif comparison.again:
        lines.append(f"no reproduction: {comparison.again}")
    return lines


def _where(place: Place) -> tuple[int, str]:
    return place.step, place.phase


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        try:
            Path(keep).mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"--keep ({keep}) must be a folder that can be made: {error.strerror}"
            ) from None
        yield Path(keep).resolve()
        return
    with TemporaryDirectory(prefix="hp-verify-job-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
