"""The command `hp-verify`. Nothing here imports torch before it is needed."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from hp_base.command_line import Parser, run_command, say
from hp_base.errors import ConfigError, DifferenceError
from hp_base.folder import read_named, why_not
from hp_base.numbers import real
from hp_verify import __version__, ci, jobs

_USAGE = """hp-verify [FLAGS] -- JOB [ARGS] --against -- REFERENCE [ARGS]
       hp-verify [FLAGS] --jobs FILE
       hp-verify --checkpoint A B [FLAGS]
       hp-verify --manifest FOLDER [--out FILE]
       hp-verify --curves A B [REPEATS] [FLAGS]"""
_FLAGS = ("--checkpoint", "--manifest", "--curves", "--jobs")
_LEVEL = 0.01


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None: those of this process, which is then at its end.

    Returns:
        Exit status: 0 equal, 8 different, 12 not comparable, others as `hp_base.errors` has them.
    """
    return run_command(_main, argv)


def _main(argv: Sequence[str]) -> int:
    job, reference, options = _parsed(argv)
    asked = next((flag for flag in _FLAGS if getattr(options, flag[2:]) is not None), None)
    if job and asked:
        raise ConfigError(f"{asked} must come without jobs behind --")
    if job or asked == "--jobs":
        one = {"job": (job, reference, options)}
        return ci.run(ci.read(options.jobs, argv, _parsed) if asked else one, options)
    if asked is None:
        raise ConfigError(f"-- JOB must be given, or one of {', '.join(_FLAGS)}")
    if options.manifest is not None:
        return _manifest(Path(options.manifest), Path(options.out) if options.out else None)
    if options.curves is not None:
        return _curves([Path(path) for path in options.curves], options.pattern, options.level)
    return _checkpoints(Path(options.checkpoint[0]), Path(options.checkpoint[1]), options)


def _parsed(argv: Sequence[str]) -> ci.Asked:
    """Parse flags, and what may follow them: a job and its reference."""
    has_jobs = "--" in argv and "--help" not in argv[: argv.index("--")]
    flags, job, reference = jobs.split(argv) if has_jobs else ([*argv], [], [])
    return job, reference, parser().parse_args(flags)


def parser() -> argparse.ArgumentParser:
    """Make the parser of all flags."""
    made = Parser(
        prog="hp-verify",
        usage=_USAGE,
        description="Run two training programs as they are, anybody's, and name the first number "
        "that differs; or compare checkpoints, weights in an engine, or curves of losses.",
        allow_abbrev=False,
    )
    made.add_argument("--version", action="version", version=f"hp-verify {__version__}")
    jobs.add_arguments(made)
    ci.add_arguments(made)
    kinds = made.add_mutually_exclusive_group()
    kinds.add_argument(
        "--checkpoint",
        nargs=2,
        metavar=("A", "B"),
        help="whether B has the tensors of A, whatever their formats and names",
    )
    kinds.add_argument(
        "--manifest",
        metavar="FOLDER",
        help="print names, shapes, dtypes and digests of a checkpoint, to be B elsewhere",
    )
    kinds.add_argument(
        "--curves",
        nargs="+",
        metavar="CURVE",
        help="whether the losses of B differ from those of A by more than noise: A B, and repeats "
        "of A behind them",
    )
    told = "TOML: several comparisons, each as NAME = 'FLAGS -- JOB --against -- REFERENCE'"
    kinds.add_argument("--jobs", metavar="FILE", help=told)
    made.add_argument("--ignore", metavar="REGEX", help="names that are not compared")
    made.add_argument(
        "--names", metavar="FILE", help='JSON: names in B -> names in A, {"lm_head.weight": ...}'
    )
    made.add_argument("--out", metavar="FILE", help="of --manifest: a new file")
    made.add_argument("--pattern", metavar="REGEX", help="of a log: groups step and loss")
    made.add_argument(
        "--level",
        type=real("--level"),
        default=_LEVEL,
        help=f"how often noise may be called a difference (default: {_LEVEL:g})",
    )
    return made


def _checkpoints(first: Path, second: Path, options: argparse.Namespace) -> int:
    from hp_verify.files.checkpoints import compare, report_checkpoints  # noqa: PLC0415 - imports torch
    from hp_verify.files.sources import opened_source  # noqa: PLC0415

    names = read_names(Path(options.names)) if options.names else {}
    with opened_source(first) as ours, opened_source(second) as theirs:
        for letter, source in zip("AB", (ours, theirs), strict=True):
            say(f"{letter}: {source.path}, {source.format}, {len(source.tensors)} tensors")
        comparison = compare(ours, theirs, ignore=options.ignore, names=names)
    say(report_checkpoints(comparison))
    if not comparison.is_equal:
        count = len(comparison.differences) + len(comparison.missing) + len(comparison.extra)
        raise DifferenceError(f"the checkpoints differ in {count} tensors")
    return 0


def read_names(file: Path) -> Mapping[str, str]:
    """Read what two checkpoints call the same tensors: names in the second -> in the first.

    Raises:
        ConfigError: When the file is no JSON object of names.
    """
    try:
        names = json.loads(read_named(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--names ({file}) must be a JSON file: {why_not(error)}") from None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(f"--names ({file}) must be an object of names")
    return names


def _manifest(folder: Path, out: Path | None) -> int:
    from hp_verify.files.checkpoints import write_manifest  # noqa: PLC0415 - imports torch

    path = out if out is not None else Path(f"{folder.name}.manifest.json")
    say(f"wrote {path}, {write_manifest(folder, path)} tensors")
    return 0


def _curves(paths: Sequence[Path], pattern: str | None, level: float) -> int:
    from hp_verify.files.curves import read_curve  # noqa: PLC0415
    from hp_verify.files.noise import compare_curves, report_curves  # noqa: PLC0415 - imports numpy

    if len(paths) < 2:
        raise ConfigError("--curves must be followed by two curves or more")
    if not 0.0 < level < 0.5:
        raise ConfigError(f"--level ({level}) must be above 0 and below 0.5")
    first, second, *repeats = [read_curve(path, pattern) for path in paths]
    answer = compare_curves(first, second, repeats, level=level)
    say(report_curves(answer, level, len(repeats)))
    if answer.differs:
        raise DifferenceError(f"{paths[1]} differs from {paths[0]} from about step {answer.step}")
    return 0
