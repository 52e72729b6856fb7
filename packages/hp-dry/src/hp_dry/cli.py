"""The command ``hp-dry``. Nothing here imports torch before ranks are to be started."""

from collections.abc import Sequence
from pathlib import Path

from hp_base.command_line import Parser
from hp_base.environment import require_unstarted
from hp_base.errors import ConfigError
from hp_base.process import run_command
from hp_dry import __version__
from hp_dry.flags import add_flags, require_places


def main(argv: Sequence[str] | None = None) -> int:
    """Rehearse a torch script as ``torchrun`` would start it.

    Args:
        argv: Arguments; None: those of this process, which is then at its end.

    Returns:
        Exit status, see `hp_base.errors`: 0 where all ranks came to their end and fit together.
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
    from hp_dry.report.outcome import show  # noqa: PLC0415 - only what has run is shown
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
