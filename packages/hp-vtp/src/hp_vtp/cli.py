"""The command `hp-vtp`: look at layouts and transfer plans without a cluster. Needs no torch."""

import argparse
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from hp_vtp.plan import Links
from hp_vtp.plan.explain import describe_layout, explain
from hp_vtp.plan.planner import ALGORITHMS, plan_transfer
from hp_vtp.topology import PipelineLayout
from hp_vtp.topology.stages import Placement, Replicated, Sharded

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
        text: str = args.text(args)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def _read(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--layout ({path}) must be TOML: {error}") from None


def _plan(args: argparse.Namespace) -> str:
    if args.layout is not None:
        layout = PipelineLayout.from_dict(_read(args.layout))
    else:
        build = PipelineLayout.u_shaped if args.u_shape else PipelineLayout.straight
        layout = build(args.tp, dp=args.dp[0] if len(args.dp) == 1 else args.dp)
        stages = tuple(
            replace(stage, boundary=args.boundary, lanes=_lanes(args.lanes, stage.tp_size))
            for stage in layout.stages
        )
        layout = replace(layout, stages=stages)
    return describe_layout(
        layout,
        args.shape,
        itemsize=ITEMSIZE[args.dtype],
        algorithm=args.algorithm,
        links=_links(args),
    )


def _explain(args: argparse.Namespace) -> str:
    links = _links(args)
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
        chunks=args.chunks,
        links=links,
    )
    return explain(plan, links)


def _links(args: argparse.Namespace) -> Links:
    return Links(
        cross_bandwidth=args.cross_gbit * 1e9 / 8,
        cross_latency=args.cross_us * 1e-6,
        local_bandwidth=args.local_gbit * 1e9 / 8,
        local_latency=args.local_us * 1e-6,
    )


def _make_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hp-vtp", description=__doc__.split(":")[0], allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, text, add_arguments, described in (
        (
            "plan",
            _plan,
            _add_plan,
            "print the stages of a layout, its groups, and what each edge costs",
        ),
        ("explain", _explain, _add_explain, "print a transfer plan, its cost and the bound"),
    ):
        sub = commands.add_parser(
            name,
            help=described,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(text=text)
        add_arguments(sub)
        _add_common(sub)
    return parser


def _add_plan(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    given = sub.add_mutually_exclusive_group(required=True)
    given.add_argument("--tp", type=_numbers, metavar="SIZES", help="TP sizes, such as 1,4,4")
    given.add_argument("--layout", type=Path, metavar="FILE", help="a layout in TOML instead")
    add("--u-shape", action="store_true", help="the last layers are on the first stage again")
    add("--dp", type=_numbers, default=[1], metavar="N", help="replicas: one number, or 1,2,2")
    add(
        "--boundary",
        type=_placement,
        default="replicated",
        metavar="PLACEMENT",
        help="replicated or sharded:DIM, how activations leave and enter the stages",
    )
    add("--shape", type=_shape, default="1,4096,4096", help="global shape of one activation")


def _add_explain(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("--from", dest="num_sources", type=int, required=True, metavar="A", help="source ranks")
    add("--to", dest="num_destinations", type=int, required=True, metavar="B", help="receivers")
    add("--shape", type=_shape, required=True, help="global shape, such as 4096,1024")
    add("--chunks", type=int, metavar="N", help="chunks of an interval plan; by cost if not given")
    for end in ("source", "destination"):
        add(
            f"--{end}",
            type=_placement,
            default="replicated",
            metavar="PLACEMENT",
            help=f"replicated or sharded:DIM over the {end} stage",
        )


def _add_common(sub: argparse.ArgumentParser) -> None:
    add = sub.add_argument
    add("--dtype", choices=ITEMSIZE, default="bfloat16", metavar="DTYPE", help="element type")
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


def _shape(text: str) -> tuple[int, ...]:
    return tuple(_numbers(text, "shape "))


def _numbers(text: str, name: str = "") -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{name}({text}) must be integers separated by commas"
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
