"""The command ``hp-dry``, and the flags of every dry run. No torch until ranks are started."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from hp_base.command_line import Parser, require_files, require_folder, run_command
from hp_base.environment import require_unstarted
from hp_base.errors import ConfigError
from hp_base.numbers import whole
from hp_dry import __version__

_MOST_DEVICES = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse a torch script as ``torchrun`` would start it.

    Args:
        argv: Arguments; None: the arguments of this process, which then exits.

    Returns:
        Exit status, see `hp_base.errors`: 0 if all ranks ended and match each other.
    """
    return run_command(_main, argv)


def _main(argv: Sequence[str]) -> int:
    end = list(argv).index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:end])
    script = list(argv[end + 1 :])
    if not script:
        raise ConfigError("-- must be followed by a script: hp-dry --gpus 2 -- train.py")
    if not Path(script[0]).is_file():
        raise ConfigError(f"-- {script[0]} must be a Python script")
    require_unstarted("hp-dry")
    require_places(options)
    from hp_dry.rehearsal import show  # noqa: PLC0415 - only after a check of the flags
    from hp_dry.script import rehearse_script  # noqa: PLC0415 - imports torch

    found = rehearse_script(
        script,
        num_ranks=options.gpus or 1,
        ranks=options.rank,
        gpus_per_node=options.gpus_per_node,
    )
    return show(*found, options)


def _parser() -> Parser:
    parser = Parser(
        prog="hp-dry",
        usage="%(prog)s [FLAGS] -- SCRIPT [ARGUMENTS]",
        description="Run a torch script on GPUs that are not there: memory, launches, deadlocks.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hp-dry {__version__}")
    add_flags(parser, gpus="ranks of the script, each with a device (default: 1)")
    return parser


def add_flags(parser: argparse.ArgumentParser, *, gpus: str) -> None:
    """Add the flags for the cluster of a dry run and for its output.

    Args:
        parser: Parser of a command.
        gpus: Help of ``--gpus``.
    """
    number = whole("--gpus", least=1, largest=_MOST_DEVICES)
    parser.add_argument("--gpus", type=number, metavar="N", help=gpus)
    parser.add_argument(
        "--gpus-per-node",
        type=whole("--gpus-per-node", least=1, largest=_MOST_DEVICES),
        default=8,
        metavar="N",
        help="devices of a machine (default: 8)",
    )
    parser.add_argument(
        "--rank",
        type=whole("--rank", least=0, largest=_MOST_DEVICES),
        action="append",
        default=[],
        metavar="R",
        help="run this rank too, whatever class it is of; may be given again",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--html", metavar="FILE", help="write a page that stands alone")
    parser.add_argument("--svg", metavar="FILE", help="draw the memory over the step")
    parser.add_argument("--traces", metavar="DIR", help="keep what every rank did, in a folder")


def require_places(options: argparse.Namespace) -> None:
    """Refuse files and folders that cannot be written, before anything is run.

    Raises:
        ConfigError: Naming the flag.
    """
    require_files(options, "html", "svg")
    require_folder("--traces", options.traces)
