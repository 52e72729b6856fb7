"""The command ``hp verify``. Nothing here imports torch before ranks are to be started."""

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hp_train.config import Config
from hp_train.environment import external_world
from hp_train.errors import ConfigError, DifferenceError, HpError
from hp_train.options import Resolved, resolve, split_overrides
from hp_train.space import sample_layouts
from hp_train.verify.pairs import (
    BOUNDS,
    checked_config,
    described,
    families,
    must_be_exact,
    one_process,
    require_comparable,
)
from hp_train.verify.shrinking import shrink

if TYPE_CHECKING:
    from hp_train.verify.runs import Runs, Verdict

FLAGS = (
    "--against",
    "--bound",
    "--dtype",
    "--generate",
    "--job",
    "--keep",
    "--part",
    "--processes",
    "--seed",
    "--shrink",
    "--steps",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="another config, or overrides of this one like mesh.pp=1,pipeline.schedule=gpipe "
        "(default: one process)",
    )
    parser.add_argument("--steps", type=int, default=3, help="updates of the weights (default: 3)")
    parser.add_argument(
        "--dtype", choices=list(BOUNDS), default="float64", help="to compute in (default: float64)"
    )
    parser.add_argument(
        "--bound", type=float, help="largest relative error that is equal; 0: every bit"
    )
    parser.add_argument(
        "--shrink", action="store_true", help="make widths and batch small; divisibility stays"
    )
    parser.add_argument(
        "--job", metavar="MODULE:CALLABLE", help="builds the training job of a rank, see the docs"
    )
    parser.add_argument(
        "--generate", type=int, metavar="N", help="verify N layouts that the config allows"
    )
    parser.add_argument("--seed", type=int, default=0, help="of those layouts (default: 0)")
    parser.add_argument(
        "--processes", metavar="A:B", default="2:8", help="of those layouts (default: 2:8)"
    )
    parser.add_argument(
        "--part", metavar="K/N", default="1/1", help="only the Kth of N parts of those layouts"
    )
    parser.add_argument(
        "--keep", metavar="DIR", help="keep what the ranks recorded, in a new folder"
    )


def run(
    resolved: Resolved, options: argparse.Namespace, given: Sequence[tuple[str, object]]
) -> int:
    """Verify a config.

    Args:
        resolved: The config.
        options: Of `add_arguments`.
        given: Overrides from the command line.

    Returns:
        0: the layouts are equal.

    Raises:
        DifferenceError: When they are not.
        RunFailedError: When one of them could not be run.
    """
    if external_world() is not None:
        raise ConfigError("hp verify starts processes of its own: not under torchrun or srun")
    if options.steps < 1:
        raise ConfigError(f"--steps ({options.steps}) must be at least 1")
    config = checked_config(resolved.config, dtype=options.dtype)
    if options.generate is None:
        if options.part != "1/1":
            raise ConfigError(f"--part ({options.part}) is of the layouts of --generate")
        other = _other(resolved, options, given)
        require_comparable(config, other)
        if options.shrink:
            config, other = shrink([config, other])
        layouts = [config]
    else:
        if options.against is not None or options.bound is not None:
            raise ConfigError("--generate compares with one process: no --against, no --bound")
        if options.shrink:
            [config] = shrink([config])
        layouts, other = _generated(config, options), None
    # What follows imports torch, and so does the server that ranks are forked from.
    from hp_train.verify.rank import TRAINER  # noqa: PLC0415
    from hp_train.verify.runs import Runs  # noqa: PLC0415

    sys.path.insert(0, str(Path.cwd()))  # a job may be next to the config
    # Of many layouts the curves of all steps, and tensors where they start and where they end.
    tensor_steps = () if other is not None else tuple({1, options.steps})
    with _scratch(options.keep) as scratch:
        runs = Runs(
            scratch,
            base=config,
            steps=options.steps,
            tensor_steps=tensor_steps,
            job=options.job or TRAINER,
        )
        if other is None:
            _verify_all(runs, layouts)
        else:
            _verify_two(runs, config, other, options)
    return 0


def _other(
    resolved: Resolved, options: argparse.Namespace, given: Sequence[tuple[str, object]]
) -> Config:
    if options.against is None:
        return checked_config(one_process(resolved.config), dtype=options.dtype)
    if "=" not in options.against:
        return checked_config(resolve(options.against).config, dtype=options.dtype)
    # A comma inside a list parts no overrides.
    overrides, rest = split_overrides(re.split(r",(?![^\[]*\])", options.against))
    if rest:
        raise ConfigError(f"--against ({rest[0]}) must be section.key=value")
    other = resolve(options.config, [*({**dict(given), **dict(overrides)}).items()])
    return checked_config(other.config, dtype=options.dtype)


def _generated(config: Config, options: argparse.Namespace) -> list[Config]:
    try:
        low, high = map(int, options.processes.split(":"))
    except ValueError:
        raise ConfigError(f"--processes ({options.processes}) must be like 2:8") from None
    part, num_parts = _part(options.part)
    sample = sample_layouts(
        config, options.generate, seed=options.seed, num_processes=range(low, high + 1)
    )
    if not sample.layouts:
        raise ConfigError(f"no layout of {low} to {high} processes is allowed for this config")
    sizes = Counter(layout.world_size for layout in sample.layouts)
    _say(
        f"{len(sample.layouts)} layouts drawn from {sample.num_meshes} meshes that the config "
        f"allows, with {sample.num_covered} of {sample.num_pairs} pairs of settings; processes: "
        + ", ".join(f"{sizes[size]} x {size}" for size in sorted(sizes))
    )
    found = families(sample.layouts)[part - 1 :: num_parts]
    layouts = [layout for family in found for layout in family]
    if num_parts > 1:
        _say(f"part {part} of {num_parts}: {len(layouts)} of them")
    return layouts


def _part(text: str) -> tuple[int, int]:
    """Which part, counted from 1, and of how many."""
    part, of, num_parts = text.partition("/")
    if of and part.isdecimal() and num_parts.isdecimal() and 1 <= int(part) <= int(num_parts):
        return int(part), int(num_parts)
    raise ConfigError(f"--part ({text}) must be like 1/3")


@contextmanager
def _scratch(keep: str | None) -> Iterator[Path]:
    """A folder for recordings. After a failure it stays: the launcher has told of files in it."""
    folder = Path(tempfile.mkdtemp(prefix="hp-verify-")) if keep is None else _new_folder(keep)
    ended = False
    try:
        yield folder
        ended = True
    except HpError as error:
        ended = error.exit_code > 128  # somebody wanted that
        raise
    finally:
        if ended and keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _new_folder(keep: str) -> Path:
    folder = Path(keep)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        reason = error.strerror
        raise ConfigError(f"--keep ({keep}) must be a folder that can be made: {reason}") from None
    return folder


def _verify_two(runs: "Runs", config: Config, other: Config, options: argparse.Namespace) -> None:
    names = described(config, config), described(other, config)
    exact = must_be_exact(config, other)
    why = " (they differ in nothing that may change a bit)" if exact else ""
    _say(f"{names[0]}  against  {names[1]}{why}: {options.steps} steps in {options.dtype}")
    comparison = runs.compare(config, other, bound=options.bound)
    _say(str(comparison))
    if not comparison.ok:
        where = comparison.first or comparison.flaws[0]
        raise DifferenceError(f"the layouts differ, first at {where}")


def _verify_all(runs: "Runs", layouts: Sequence[Config]) -> None:
    from hp_train.verify.runs import judge_all  # noqa: PLC0415 - imports torch

    verdicts: list[Verdict] = []
    for verdict in judge_all(runs, layouts):
        _say(str(verdict))
        verdicts.append(verdict)
    _say(summary(verdicts))
    failed = [verdict for verdict in verdicts if not verdict.ok]
    if failed:
        raise DifferenceError(f"{len(failed)} of {len(verdicts)} comparisons failed")


def summary(verdicts: Sequence["Verdict"]) -> str:
    """What many comparisons showed, in lines."""
    compared = [verdict.comparison for verdict in verdicts if verdict.comparison is not None]
    bounded = [comparison for comparison in compared if comparison.bound > 0]
    exact = [comparison for comparison in compared if comparison.bound == 0]
    largest: dict[str, float] = {}
    for comparison in bounded:
        for quantity, error in comparison.errors.items():
            largest[quantity] = max(error, largest.get(quantity, 0.0))
    errors = ", ".join(f"{quantity} {error:.1e}" for quantity, error in largest.items())
    return "\n".join(
        [
            (
                f"{sum(c.ok for c in bounded)} of {len(bounded)} layouts equal one process, "
                f"{sum(c.bitwise for c in bounded)} of them bitwise; largest errors: {errors}"
            ),
            f"{sum(c.ok for c in exact)} of {len(exact)} pairs that must be bitwise equal are",
            f"{len(verdicts) - len(compared)} could not be run",
        ]
    )


def _say(text: str) -> None:
    sys.stdout.write(text + os.linesep)
    sys.stdout.flush()
