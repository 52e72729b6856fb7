"""The command `hp-verify`. Nothing here imports torch before it is needed."""

import argparse
from collections.abc import Sequence

from hp_base.command_line import Parser
from hp_base.errors import ConfigError
from hp_base.process import run_command
from hp_verify import __version__, jobs
from hp_verify.files import commands as files

_USAGE = """hp-verify [FLAGS] -- JOB [ARGS] --against -- REFERENCE [ARGS]
       hp-verify --checkpoint A B [FLAGS]
       hp-verify --manifest FOLDER [--out FILE]
       hp-verify --curves A B [REPEATS] [FLAGS]"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments; None: those of this process, which is then at its end.

    Returns:
        Exit status: 0 equal, 8 different, others as `hp_base.errors` has them.
    """
    return run_command(_main, argv)


def _main(argv: Sequence[str]) -> int:
    flags, job, reference = jobs.split(argv) if _has_jobs(argv) else ([*argv], [], [])
    options = parser().parse_args(flags)
    asked = next((flag for flag in files.FLAGS if getattr(options, flag[2:]) is not None), None)
    if job and asked:
        raise ConfigError(f"{asked} must come without jobs behind --")
    if job:
        return jobs.run(job, reference, options)
    if asked is None:
        raise ConfigError(f"-- JOB must be given, or one of {', '.join(files.FLAGS)}")
    return files.run(options)


def _has_jobs(argv: Sequence[str]) -> bool:
    return "--" in argv and "--help" not in argv[: [*argv].index("--")]


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
    files.add_arguments(made)
    return made
