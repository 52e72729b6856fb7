"""Flags of a dry run, whatever is rehearsed. No torch."""

import argparse

from hp_base.command_line import require_files, require_folder
from hp_base.numbers import whole

_MOST_DEVICES = 2**20


def add_flags(parser: argparse.ArgumentParser, *, gpus: str) -> None:
    """Add the flags that say which cluster is rehearsed, and what is left of it.

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
