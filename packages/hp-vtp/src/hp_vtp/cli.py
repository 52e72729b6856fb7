"""The command `hp-vtp`: look at transfer plans without a cluster. Needs no torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from hp_vtp.cost import Links
from hp_vtp.explain import explain
from hp_vtp.placement import Placement, Replicated, Sharded
from hp_vtp.plan import ALGORITHMS, plan_transfer

ITEMSIZE = {
    "bfloat16": 2,
    "bool": 1,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint8": 1,
}


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 0, or 2 for a bad argument."""
    parser = _make_parser()
    args = parser.parse_args(argv)
    try:
        text = _explain(args)
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def _explain(args: argparse.Namespace) -> str:
    links = Links(
        cross_bandwidth=args.cross_gbit * 1e9 / 8,
        cross_latency=args.cross_us * 1e-6,
        local_bandwidth=args.local_gbit * 1e9 / 8,
        local_latency=args.local_us * 1e-6,
    )
    plan = plan_transfer(
        args.shape,
        num_sources=args.num_sources,
        num_destinations=args.num_destinations,
        itemsize=ITEMSIZE[args.dtype],
        source=args.source,
        destination=args.destination,
        source_lanes=_lanes(args.lanes, args.num_sources),
        destination_lanes=_lanes(args.lanes, args.num_destinations),
        algorithm=args.algorithm,
        links=links,
    )
    return explain(plan, links)


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hp-vtp", description=__doc__.split(":")[0], allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    sub = commands.add_parser(
        "explain",
        help="print a transfer plan, its cost and the bound",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = sub.add_argument
    add("--from", dest="num_sources", type=int, required=True, metavar="A", help="source ranks")
    add("--to", dest="num_destinations", type=int, required=True, metavar="B", help="receivers")
    add("--shape", type=_shape, required=True, help="global shape, such as 4096,1024")
    add("--dtype", choices=ITEMSIZE, default="bfloat16", metavar="DTYPE", help="element type")
    for end in ("source", "destination"):
        add(
            f"--{end}",
            type=_placement,
            default="replicated",
            metavar="PLACEMENT",
            help=f"replicated or sharded:DIM over the {end} stage",
        )
    add("--lanes", type=int, metavar="N", help="independent links of a stage; all ranks if more")
    add("--algorithm", choices=("auto", *ALGORITHMS), default="auto", help="which plan to make")
    default = Links()
    for end in ("cross", "local"):
        bandwidth: float = getattr(default, f"{end}_bandwidth")
        latency: float = getattr(default, f"{end}_latency")
        where = "between" if end == "cross" else "within"
        add(
            f"--{end}-gbit",
            type=float,
            default=bandwidth * 8 / 1e9,
            metavar="GBIT",
            help=f"Gbit/s of a link {where} stages",
        )
        add(
            f"--{end}-us",
            type=float,
            default=latency * 1e6,
            metavar="US",
            help=f"microseconds per message {where} stages",
        )
    return parser


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"shape ({text}) must be integers separated by commas"
        ) from None


def _placement(text: str) -> Placement:
    if text == "replicated":
        return Replicated()
    kind, _, dim = text.partition(":")
    if kind != "sharded" or not dim.isdigit():
        raise argparse.ArgumentTypeError(f"placement ({text}) must be replicated or sharded:DIM")
    return Sharded(int(dim))


def _lanes(lanes: int | None, ranks: int) -> int | None:
    return None if lanes is None or lanes > ranks else lanes
