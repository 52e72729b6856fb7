"""Verify, or only list, configs that have every pair of a feature and a setting.

    python -m integration_tests.layouts.pairs CONFIG --data TEXT --results FILE --part 1/4

goes on where it was stopped. Overrides like mesh.pp=2 set keys of the config. `nox -s verify` runs
it for the config of this folder.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hp_base.command_line import Parser, require_files, run_command, say, scratch, write_named
from hp_base.environment import require_unstarted
from hp_base.errors import ConfigError, DifferenceError
from hp_base.numbers import whole
from hp_train.verify.command import LOOKS
from hp_train.verify.pairs import BOUNDS
from hp_train.verify.program import TRAINER, Program
from hp_train.verify.shrinking import shrink
from hp_trainer.config.options import checked_config, resolve, split_overrides
from integration_tests.layouts.pairs.covering import Design, cover
from integration_tests.layouts.pairs.designed import Designed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None: those of this process, which is then at its end.

    Returns:
        Exit status, see `hp_base.errors`: 0 where all configs equal one process.
    """
    return run_command(_run, argv)


def _run(argv: Sequence[str]) -> int:
    overrides, rest = split_overrides(argv)
    options = _parser().parse_args(rest)
    require_unstarted("pairs")
    require_files(options, "list")
    part, num_parts = options.part
    given: list[tuple[str, object]] = [*overrides]
    if options.data:
        given.append(("data.paths", options.data))
    config = checked_config(resolve(options.config, given).config, dtype=options.dtype)
    if options.shrink:
        [config] = shrink([config])
    program = Program(steps=options.steps)
    design = cover(program.applied_to(config), num_processes=options.processes, seed=options.seed)
    say(_shown(design))
    if options.list:
        write_named("--list", options.list, "".join(f"{line}\n" for line in design.lines()))
        return 0
    say(f"looks at {LOOKS}")
    say(f"{len(design.configs)} configs beside one process each: {program}")
    sys.path.insert(0, str(Path.cwd()))  # a job may be next to the config
    equal, failed = set(), 0
    with scratch("pairs-", options.keep) as folder:
        designed = Designed(design, program, folder, options.job, options.results)
        for index, row in designed.rows(part, num_parts):
            say(f"config {index + 1}: {row}")
            equal |= {index} if row.ok else set()
            failed += not row.ok
    covered = [where for where in design.pairs.values() if isinstance(where, int)]
    num_equal = sum(where in equal for where in covered)
    say(f"{num_equal} of {len(covered)} pairs are in {len(equal)} configs that are equal")
    if failed:
        raise DifferenceError(f"{failed} of {failed + len(equal)} configs differ")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="pairs", description=__doc__)
    add = parser.add_argument
    add("config", metavar="CONFIG", help="a small .toml file, which pairs are changes of")
    add("--data", metavar="PATH", nargs="+", help="text to train on")
    add("--steps", type=whole("--steps", least=1), default=2, help="updates of the weights")
    add("--dtype", choices=list(BOUNDS), default="float64", help="to compute in")
    add("--shrink", action="store_true", help="make widths and batch small first")
    add("--job", metavar="MODULE:CALLABLE", default=TRAINER, help="builds the job of a rank")
    add("--seed", type=whole("--seed", least=0), default=0, help="of the order of changes")
    most = whole("--processes", least=2, largest=1024)
    add("--processes", type=most, default=4, help="most processes of a config")
    add("--part", type=_part, default=(1, 1), metavar="K/N", help="the Kth of N parts alone")
    add("--list", metavar="FILE", help="only write where every pair is, or the rule against it")
    add("--results", type=Path, metavar="FILE", help="keep what is found, and go on there")
    add("--keep", metavar="DIR", help="keep what the ranks recorded, in a new folder")
    return parser


def _part(text: str) -> tuple[int, int]:
    numbers = [int(number) for number in text.split("/") if number.isdecimal()]
    if len(numbers) != 2 or not 1 <= numbers[0] <= numbers[1]:
        raise ConfigError(f"--part ({text}) must be like 1/3")
    return numbers[0], numbers[1]


def _shown(design: Design) -> str:
    reasons = Counter(design.refused.values())
    refused = (f"  {number} refused: {why}" for why, number in reasons.most_common())
    kinds = Counter(design.left_out.values())
    left = (f"  {number} keys or values left out: {why}" for why, number in kinds.most_common())
    return "\n".join([str(design), *refused, *left])


if __name__ == "__main__":
    sys.exit(main())
