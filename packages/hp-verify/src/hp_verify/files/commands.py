"""Run `hp-verify --checkpoint`, `--manifest` and `--curves`; imports torch when needed."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hp_base.command_line import say
from hp_base.errors import ConfigError, DifferenceError
from hp_base.folder import read_named, why_not
from hp_base.numbers import real

if TYPE_CHECKING:
    from hp_verify.files.checkpoints import CheckpointComparison
    from hp_verify.files.noise import CurveComparison

FLAGS = ("--checkpoint", "--manifest", "--curves")
_SHOWN = 12
_LEVEL = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of all three."""
    kinds = parser.add_mutually_exclusive_group()
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
    parser.add_argument("--ignore", metavar="REGEX", help="names that are not compared")
    parser.add_argument(
        "--names", metavar="FILE", help='JSON: names in B -> names in A, {"lm_head.weight": ...}'
    )
    parser.add_argument("--out", metavar="FILE", help="of --manifest: a new file")
    parser.add_argument("--pattern", metavar="REGEX", help="of a log: groups step and loss")
    parser.add_argument(
        "--level",
        type=real("--level"),
        default=_LEVEL,
        help=f"how often noise may be called a difference (default: {_LEVEL:g})",
    )


def run(options: argparse.Namespace) -> int:
    """Compare what is asked for.

    Args:
        options: Parsed flags of `add_arguments`, one of `FLAGS` among them.

    Returns:
        0: both are equal.

    Raises:
        DifferenceError: When they are not.
        CheckpointError: When a checkpoint is damaged or of no known format.
        DataError: When a curve cannot be read, or is too short.
        ConfigError: When the command line is wrong.
    """
    if options.manifest is not None:
        return _manifest(Path(options.manifest), Path(options.out) if options.out else None)
    if options.curves is not None:
        return _curves([Path(path) for path in options.curves], options.pattern, options.level)
    return _checkpoints(Path(options.checkpoint[0]), Path(options.checkpoint[1]), options)


def _checkpoints(first: Path, second: Path, options: argparse.Namespace) -> int:
    from hp_verify.files.checkpoints import compare  # noqa: PLC0415 - imports torch
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


def report_checkpoints(comparison: "CheckpointComparison") -> str:
    """Say in lines what was found; the first checkpoint is called A, the second B."""
    shown = [f"FAIL  {difference}" for difference in comparison.differences]
    for letter, names in zip("AB", (comparison.missing, comparison.extra), strict=True):
        shown += [f"FAIL  only in {letter}: {name} {why}" for name, why in names.items()]
    lines = shown[:_SHOWN] + [f"      and {len(shown) - _SHOWN} more"] * (len(shown) > _SHOWN)
    lines += [f"note: {note}" for note in comparison.notes[:_SHOWN]]
    lines += [f"      and {n} more" for n in [len(comparison.notes) - _SHOWN] if n > 0]
    lines += [f"{count} made: {how}" for how, count in list(comparison.made.items())[:_SHOWN]]
    for said, count in sorted(comparison.counts.items()):
        error = comparison.largest.get(said)
        lines.append(f"{count} {said}" + (f", by {error:.1e} at most" if error else ""))
    state = "equal" if comparison.is_equal else "NOT EQUAL"
    return "\n".join([*lines, state])


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
    from hp_verify.files.noise import compare_curves  # noqa: PLC0415 - imports numpy

    if len(paths) < 2:
        raise ConfigError("--curves must be followed by two curves or more")
    if not 0.0 < level < 0.5:
        raise ConfigError(f"--level ({level}) must be above 0 and below 0.5")
    first, second, *repeats = [read_curve(path, pattern) for path in paths]
    answer = compare_curves(first, second, repeats, level=level)
    say(_said(answer, level, len(repeats)))
    if answer.differs:
        raise DifferenceError(f"{paths[1]} differs from {paths[0]} from about step {answer.step}")
    return 0


def _said(answer: "CurveComparison", level: float, num_repeats: int) -> str:
    steps = f"{answer.num_steps} steps"
    if answer.not_finite:
        return f"DIFFERENT: at step {answer.step} one loss alone is not finite; {steps}"
    whose = f"{num_repeats} repeats" if num_repeats else "the difference's own residuals"
    noise = (
        f"noise by {whose}: {answer.noise:.2e} a step, correlation {answer.correlation:.2f}; "
        f"an offset of {answer.visible:.2e} over the last half would be seen\n"
    )
    if not answer.differs:
        chance = f"chance {answer.chance:.2g}, not below {level:g}"
        return f"{noise}not told apart over {steps} ({chance})"
    return (
        f"{noise}DIFFERENT from about step {answer.step}: by {answer.offset:+.3e} on the mean from "
        f"there (chance {answer.chance:.2g}, {steps})"
    )
