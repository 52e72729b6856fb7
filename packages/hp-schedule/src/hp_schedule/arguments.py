"""The words of the command ``hp-schedule``: its subcommands and their options."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, Final, NoReturn, get_args

from hp_schedule.generators import SCHEDULES
from hp_schedule.passes.retention import Retention
from hp_schedule.simulation.channels import ChannelModel

GENERATORS: Final = {
    name: kind for kind in SCHEDULES.values() for name in (kind.name, kind.generate.__name__)
}
"""Schedules that `generate` makes, by their names and by the names of their functions."""


OPTIONS: Final = {
    name: annotation
    for kind in SCHEDULES.values()
    for name, annotation in kind.options.items()
    if name != kind.pairs
}
"""The options of all generators with their annotations; pairs, of any schedule, are --overlap."""


MODEL: Final = {
    "forward": "default: 1",
    "input-grad": "default: 1",
    "weight-grad": "default: 1",
    "first-scale": "of the first stage; default: 1",
    "last-scale": "of the last stage; default: 1",
    "latency": "of a message; default: 0",
    "message": "size of a message; default: 0",
    "bandwidth": "size per unit of time; default: without end",
    "recompute": "of a RECOMPUTE; default: of a forward",
    "kept-input": "memory a stage keeps until a RECOMPUTE; default: 0",
    "host-bandwidth": "microbatches copied to the host per unit of time; default: without end",
}
"""Options for the costs of a model whose stages are alike (`ModelCosts`), with their help."""


def flag(option: str) -> str:
    """Return how an option of a generator is written on the command line."""
    return "--" + option.removeprefix("num_").replace("_", "-")


def _reading(annotation: object) -> dict[str, Any]:
    """Return how a value is read: a switch, a number, or a number or else one of several words."""
    if annotation is bool:
        return {"action": argparse.BooleanOptionalAction}
    kinds = set(get_args(annotation)) - {NoneType} or {annotation}
    if len(kinds) == 1:
        return {"type": kinds.pop()}
    return {"type": lambda text: int(text) if text.isdecimal() else text}


_Adder = Callable[..., argparse.ArgumentParser]
"""Makes the parser of a subcommand: `add_parser` of argparse."""


class _Parser(argparse.ArgumentParser):
    """A parser that answers bad arguments in one line, without the usage, which --help prints."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser; `command` of its result is the name of the subcommand."""
    whole = _Parser(prog="hp-schedule", description="Pipeline schedules as data.")
    commands = whole.add_subparsers(required=True, metavar="COMMAND", dest="command")
    add: _Adder = commands.add_parser
    generate = _command(add, "generate", "make a schedule from its closed form")
    generate.add_argument("name", choices=[*GENERATORS])
    for option, annotation in OPTIONS.items():
        names = ", ".join(kind.name for kind in SCHEDULES.values() if option in kind.options)
        words = [f"{word}, " for part in get_args(annotation) for word in get_args(part)]
        generate.add_argument(
            flag(option),
            dest=option,
            help=f"of {names}" + (f": {''.join(words)}or a number" if words else ""),
            **_reading(annotation),
        )
    generate.add_argument(
        "--overlap", choices=["b_f", "f_b"], help="pair backwards and forwards in this order"
    )
    generate.add_argument("--communication", action="store_true", help="insert sends and receives")
    generate.add_argument("--csv", action="store_true", help="print torch's CSV")
    generate.add_argument("--output", "-o", type=Path, default=Path("-"), help="default: print")
    show = _command(add, "show", "draw a schedule", file=True)
    show.add_argument("--cells", action="store_true", help="as it stands, messages included")
    check = _command(add, "check", "prove that a schedule runs", file=True)
    check.epilog = (
        "exit status: 0 if it trains as it stands or is what a flag says, 1 if it is unsound, "
        "2 for bad input, 3 if it has no mistake but is not runnable as it stands"
    )
    check.add_argument("--communication", action="store_true", help="messages must be there")
    check.add_argument(
        "--forward-only", action="store_true", help="it is for evaluation, without backwards"
    )
    check.add_argument(
        "--sharded",
        action="store_true",
        help="the parameters of all stages are sharded, unless the file says of which",
    )
    check.add_argument(
        "--partial", action="store_true", help="status 0 also for what lacks something"
    )
    check.add_argument(
        "--channels",
        choices=get_args(ChannelModel),
        help="one communicator for each of these, and sends that wait for nobody; default: any "
        "machine",
    )
    for name in ("ranks", "stages", "microbatches"):
        check.add_argument(f"--{name}", type=int, help=f"{name} that there must be; default: any")
    check.add_argument("--memory", type=float, help="microbatches a rank may hold; default: all")
    check.add_argument(
        "--max-active-stages", type=int, help="stages a rank may hold gathered; default: all"
    )
    cost = _command(add, "simulate", "time, bubble and memory", file=True)
    _add_costs(cost)
    cost.add_argument(
        "--channels",
        choices=get_args(ChannelModel),
        default="edge",
        help="which messages share a queue; default: edge",
    )
    cost.add_argument("--blocking", action="store_true", help="messages hold up their ranks")
    cost.add_argument("--cores", type=int, help="that all ranks share; default: enough")
    cost.add_argument("--svg", type=Path, help="write a picture")
    cost.add_argument("--trace", type=Path, help="write a trace for ui.perfetto.dev")
    _add_search(add)
    convert = _command(add, "convert", "between JSON and torch's CSV", file=True)
    convert.add_argument("output", type=Path, nargs="?", default=Path("-"))
    convert.add_argument("--to", choices=["csv", "json"], help="default: the output's ending")
    convert.add_argument(
        "--waits", action="store_true", help="say in CSV where torch waits, as torch 2.15 wants it"
    )
    return whole


def _add_search(add: _Adder) -> None:
    find = _command(add, "search", "find a short schedule")
    find.add_argument(
        "--virtual",
        type=_numbers,
        help="stages per rank to try, as in 1,2,4; default: 1,2, or what --costs are for",
    )
    _add_costs(find)
    find.add_argument(
        "--memory", type=float, default=math.inf, help="microbatches a rank may hold; default: all"
    )
    find.add_argument(
        "--time-budget",
        type=float,
        help="seconds of processor time; default: 10 without --candidates",
    )
    find.add_argument("--candidates", type=int, help="stop after so many, for equal results")
    find.add_argument("--seed", type=int, default=0)
    find.add_argument(
        "--exact",
        type=float,
        default=0.0,
        help="effort of an exact engine, about seconds; needs hp-schedule[exact]; default: 0",
    )
    find.add_argument(
        "--keep-order", action="store_true", help="every stage takes the microbatches in order"
    )
    find.add_argument(
        "--blocking", action="store_true", help="what is sent holds up the rank that sends it"
    )
    find.add_argument(
        "--retention",
        choices=[*get_args(Retention), "both"],
        help="how microbatches may make room where --memory does not suffice",
    )
    find.add_argument("--whole-backward", action="store_true", help="do not split backwards")
    find.add_argument("--communication", action="store_true", help="insert sends and receives")
    find.add_argument("--output", "-o", type=Path, default=Path("-"), help="default: print")


def _add_costs(command: argparse.ArgumentParser) -> None:
    command.description = f"{command.description}; costs are those of one rank's share of the model"
    command.add_argument(
        "--costs",
        type=Path,
        help="JSON with those of every stage, or stage and microbatch, instead of the rest",
    )
    for name, text in MODEL.items():
        command.add_argument(f"--{name}", type=float, help=text)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"({text}) must be numbers as in 1,2,4") from None


def _command(add: _Adder, name: str, text: str, *, file: bool = False) -> argparse.ArgumentParser:
    """Add a subcommand that reads a schedule from a file, or makes one of some size."""
    command = add(name, help=text, description=text)
    command.add_argument("--json", action="store_true", help="machine-readable output")
    if file:
        command.add_argument("file", type=Path, help="JSON or torch's CSV; - for standard input")
    else:
        command.add_argument("--ranks", type=int, required=True)
        command.add_argument("--microbatches", type=int, required=True)
    return command
