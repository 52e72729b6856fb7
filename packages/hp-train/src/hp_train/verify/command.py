"""The command ``hp verify``. Nothing here imports torch before ranks are to be started."""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hp_base.command_line import say, scratch
from hp_base.environment import require_unstarted
from hp_base.errors import ConfigError, DifferenceError
from hp_base.messages import shown
from hp_base.numbers import real, whole
from hp_plan.layouts.space import sample_layouts
from hp_train.verify.pairs import (
    BOUNDS,
    ORACLE,
    described,
    differing_keys,
    families,
    must_be_exact,
    require_comparable,
)
from hp_train.verify.program import TRAINER, Program
from hp_train.verify.shrinking import shrink
from hp_trainer.config import Config
from hp_trainer.config.options import (
    Resolved,
    checked_config,
    one_process,
    resolve,
    split_overrides,
)
from hp_trainer.plugins import planned_steps

if TYPE_CHECKING:
    from hp_train.verify.runs import Runs, Verdict

SUMMARY = "run two layouts on the same batches and compare all they compute"
"""What the command does, for `hp --help`."""
LOOKS = (
    "tokens and targets, losses, gradients, their norm, learning rate, Adam's moments, weights, "
    "correction biases, evaluation, what is saved and what is loaded"
)
_PROCESSES = "2:8"
_MOST_RANKS = 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="another config, or overrides of this one like mesh.pp=1,pipeline.schedule=gpipe "
        "(default: one process; of one process: oracle, which is plain torch)",
    )
    parser.add_argument(
        "--steps",
        type=whole("--steps", least=1),
        default=8,
        help="updates of the weights (default: 8)",
    )
    parser.add_argument(
        "--dtype", choices=list(BOUNDS), default="float64", help="to compute in (default: float64)"
    )
    parser.add_argument(
        "--bound",
        type=real("--bound", below=1.0),
        help="largest relative error that is equal; 0: every bit",
    )
    parser.add_argument(
        "--shrink", action="store_true", help="make widths and batch small; divisibility stays"
    )
    parser.add_argument(
        "--job", metavar="MODULE:CALLABLE", help="builds the training job of a rank, see the docs"
    )
    parser.add_argument(
        "--generate",
        type=whole("--generate", least=1),
        metavar="N",
        help="verify N layouts that the config allows",
    )
    parser.add_argument(
        "--seed", type=whole("--seed", least=0), default=0, help="of those layouts (default: 0)"
    )
    parser.add_argument(
        "--processes",
        metavar="A:B",
        default=_PROCESSES,
        help=f"of those layouts (default: {_PROCESSES})",
    )
    parser.add_argument(
        "--part", metavar="K/N", default="1/1", help="only the Kth of N parts of those layouts"
    )
    parser.add_argument(
        "--keep", metavar="DIR", help="keep what the ranks recorded, in a new folder"
    )


def run(resolved: Resolved, options: argparse.Namespace) -> int:
    """Verify a config.

    Args:
        resolved: The config.
        options: Parsed options of `add_arguments`, and `overrides` from the command line.

    Returns:
        0: the layouts are equal.

    Raises:
        DifferenceError: When they are not.
        RunFailedError: When one of them could not be run.
    """
    require_unstarted("hp verify")
    _refuse_combinations(options)
    program = Program(steps=options.steps)
    config = checked_config(resolved.config, dtype=options.dtype)
    others = [] if options.generate else _others(config, options)
    for other in others:
        require_comparable(config, other)
    configs = [config, *others]
    if options.shrink:
        configs = shrink(configs)
    config, *others = map(program.applied_to, configs)
    if options.generate:
        others = _generated(config, options)
    if any(each.data.packing == "planned" for each in [config, *others]):
        planned_steps()  # which ranks load
    num_runs = 1 + len(others)
    say(f"looks at {LOOKS}")
    say(f"{num_runs} run{'s' if num_runs > 1 else ''}: {program}")
    # What follows imports torch, and so does the server that ranks are forked from.
    from hp_train.verify.runs import Runs  # noqa: PLC0415

    sys.path.insert(0, str(Path.cwd()))  # a job may be next to the config
    with scratch("hp-verify-", options.keep) as folder:
        runs = Runs(
            folder,
            base=config,
            program=program,
            every_tensor=options.generate is None,
            num_runs=num_runs,
            job=options.job or TRAINER,
        )
        if options.generate is None:
            _verify_one(runs, config, others, options)
        else:
            known = options.job is None and not _unknown_to_oracle(config)
            _verify_all(runs, others, has_oracle=known)
    return 0


def _refuse_combinations(options: argparse.Namespace) -> None:
    if options.generate is None:
        if options.part != "1/1":
            raise ConfigError(f"--part ({options.part}) is of the layouts of --generate")
    elif options.against is not None or options.bound is not None:
        raise ConfigError("--generate compares with one process: no --against, no --bound")
    if options.against == ORACLE and options.job is not None:
        raise ConfigError(f"--against oracle knows the models of hp-train, not --job {options.job}")


def _unknown_to_oracle(config: Config) -> str:
    """Return what of a config the oracle does not know; nothing if it can train so."""
    if config.model.is_own:
        return f"no model of {config.model.origin}"
    if config.train.optimizer != "adamw":
        return f"no train.optimizer ({shown(config.train.optimizer)})"
    if config.data.packing != "stream":
        return f"no padding of data.packing ({shown(config.data.packing)})"
    return ""


def _others(config: Config, options: argparse.Namespace) -> list[Config]:
    """Return what to compare with: another config, or none for the oracle.

    Raises:
        ConfigError: When it would be compared with itself.
    """
    unknown = _unknown_to_oracle(config)
    if options.against == ORACLE and unknown:
        raise ConfigError(f"--against oracle knows {unknown}")
    alone = options.against is None and config.world_size == 1 and options.job is None
    if options.against == ORACLE or (alone and not unknown):
        return []
    other = one_process(config) if options.against is None else _given(options)
    if not differing_keys(config, other):
        what = "one process" if options.against is None else f"--against {options.against}"
        raise ConfigError(f"{what} is the same training: there is nothing to compare")
    return [other]


def _given(options: argparse.Namespace) -> Config:
    if "=" not in options.against:
        return checked_config(resolve(options.against).config, dtype=options.dtype)
    # A comma inside a list parts no overrides.
    overrides, rest = split_overrides(re.split(r",(?![^\[]*\])", options.against))
    if rest:
        raise ConfigError(f"--against ({rest[0]}) must be section.key=value")
    other = resolve(options.config, {**dict(options.overrides), **dict(overrides)}.items())
    return checked_config(other.config, dtype=options.dtype)


def _generated(config: Config, options: argparse.Namespace) -> list[Config]:
    processes = _processes(options.processes)
    part, num_parts = _part(options)
    sample = sample_layouts(config, options.generate, seed=options.seed, num_processes=processes)
    if not sample.layouts:
        low, high = processes[0], processes[-1]
        raise ConfigError(f"no layout of {low} to {high} processes is allowed for this config")
    sizes = Counter(layout.world_size for layout in sample.layouts)
    say(
        f"{len(sample.layouts)} layouts drawn from {sample.num_meshes} meshes that the config "
        f"allows, with {sample.num_covered} of {sample.num_pairs} pairs of settings; processes: "
        + ", ".join(f"{sizes[size]} x {size}" for size in sorted(sizes))
    )
    found = families(sample.layouts)[part - 1 :: num_parts]
    layouts = [layout for family in found for layout in family]
    if num_parts > 1:
        say(f"part {part} of {num_parts}: {len(layouts)} of them")
    return layouts


def _processes(given: str) -> range:
    low, high = _two_numbers(given, ":")
    if not 1 <= low <= high <= _MOST_RANKS:
        raise ConfigError(f"--processes ({given}) must be like 2:8, at most {_MOST_RANKS}")
    return range(low, high + 1)


def _part(options: argparse.Namespace) -> tuple[int, int]:
    part, num_parts = _two_numbers(options.part, "/")
    if not 1 <= part <= num_parts:
        raise ConfigError(f"--part ({options.part}) must be like 1/3")
    return part, num_parts


def _two_numbers(text: str, between: str) -> tuple[int, int]:
    """Return the whole numbers on either side of a mark; zeros where one is missing."""
    one, _, other = text.partition(between)
    return (int(one), int(other)) if one.isdecimal() and other.isdecimal() else (0, 0)


def _verify_one(
    runs: "Runs", config: Config, others: Sequence[Config], options: argparse.Namespace
) -> None:
    against, why = ORACLE, ""
    for other in others:
        exact = must_be_exact(config, other)
        why = " (they differ in nothing that may change a bit)" if exact else ""
        against = described(other, config)
    say(f"{described(config, config)}  against  {against}{why}, in {options.dtype}")
    comparison = runs.compare(config, others[0] if others else None, bound=options.bound)
    say(str(comparison))
    if not comparison.ok:
        where = comparison.first or comparison.flaws[0]
        raise DifferenceError(f"the layouts differ, first at {where}")


def _verify_all(runs: "Runs", layouts: Sequence[Config], *, has_oracle: bool) -> None:
    from hp_train.verify.runs import judge_all  # noqa: PLC0415 - imports torch

    verdicts: list[Verdict] = []
    for verdict in judge_all(runs, layouts, has_oracle=has_oracle):
        say(str(verdict))
        verdicts.append(verdict)
    say(summary(verdicts))
    failed = [verdict for verdict in verdicts if not verdict.ok]
    if failed:
        raise DifferenceError(f"{len(failed)} of {len(verdicts)} comparisons failed")


def summary(verdicts: Sequence["Verdict"]) -> str:
    """Return what many comparisons showed, in lines."""
    others = [verdict for verdict in verdicts if verdict.against != ORACLE]
    compared = [verdict.comparison for verdict in others if verdict.comparison is not None]
    bounded = [comparison for comparison in compared if comparison.bound > 0]
    exact = [comparison for comparison in compared if comparison.bound == 0]
    largest: dict[str, float] = {}
    for comparison in bounded:
        for quantity, error in comparison.errors.items():
            largest[quantity] = max(error, largest.get(quantity, 0.0))
    errors = ", ".join(f"{quantity} {error:.1e}" for quantity, error in largest.items())
    return "\n".join(
        [
            *(
                f"one process {'equals' if verdict.ok else 'DOES NOT EQUAL'} the oracle"
                for verdict in verdicts
                if verdict.against == ORACLE
            ),
            (
                f"{sum(c.ok for c in bounded)} of {len(bounded)} layouts equal one process, "
                f"{sum(c.bitwise for c in bounded)} of them bitwise; largest errors: {errors}"
            ),
            f"{sum(c.ok for c in exact)} of {len(exact)} pairs that must be bitwise equal are",
            f"{sum(verdict.comparison is None for verdict in verdicts)} could not be run",
        ]
    )
