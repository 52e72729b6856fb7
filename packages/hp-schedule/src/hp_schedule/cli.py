"""The command ``hp-schedule``.

Exit status: 0 if all is well, 1 if `check` finds a schedule unsound, 2 for bad input, which is
answered in one line.
"""

import argparse
import inspect
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hp_schedule.errors import ScheduleError
from hp_schedule.generators import (
    dualpipe_v,
    forward_only,
    gpipe,
    grouped_interleaved,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    u_shape,
    v_half,
    v_min,
    zbv,
    zero_bubble,
)
from hp_schedule.model_costs import ModelCosts
from hp_schedule.notation import parse, to_csv, to_json
from hp_schedule.passes import add_send_recv, pair_overlap
from hp_schedule.render import chrome_trace, step_grid, timeline_svg, timetable
from hp_schedule.schedule import Schedule
from hp_schedule.searching import SearchResult, search
from hp_schedule.simulation import Simulation, simulate
from hp_schedule.validation import validate

_GENERATORS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_bfs": looped_bfs,
    "zero_bubble": zero_bubble,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "grouped_interleaved": grouped_interleaved,
    "zbv": zbv,
    "v_half": v_half,
    "v_min": v_min,
    "dualpipe_v": dualpipe_v,
    "u_shape": u_shape,
    "forward_only": forward_only,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status.

    Args:
        arguments: Without the program's name; default: those of the process.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (OSError, ValueError) as error:
        # What follows the first line is a timetable, or notes for a reader with a screen.
        first = str(error).partition("\n")[0]
        print(f"hp-schedule: {first}", file=sys.stderr)
        return 2


def _generate(options: argparse.Namespace) -> int:
    generator = _GENERATORS[options.name]
    chosen = {
        "num_stages_per_rank": options.stages_per_rank,
        "max_in_flight": options.max_in_flight,
        "group_size": options.group_size,
    }
    chosen = {name: value for name, value in chosen.items() if value is not None}
    for name in chosen.keys() - inspect.signature(generator).parameters.keys():
        flag = "--" + name.removeprefix("num_").replace("_", "-")
        raise ValueError(f"{flag} ({chosen[name]}) must be left out for {options.name}")
    schedule = generator(options.ranks, num_microbatches=options.microbatches, **chosen)
    if options.overlap:
        schedule = pair_overlap(schedule, order=options.overlap)
    if options.communication:
        schedule = add_send_recv(schedule)
    if options.json:
        text = to_json(schedule)
    elif options.csv:
        text = to_csv(schedule)
    else:
        text = timetable(schedule) + "\n"
    _write(options.output, text)
    return 0


def _show(options: argparse.Namespace) -> int:
    schedule = _load(options.file)
    if options.json:
        text = to_json(schedule)
    elif options.cells:
        text = step_grid(schedule) + "\n"
    else:
        text = timetable(schedule) + "\n"
    sys.stdout.write(text)
    return 0


def _check(options: argparse.Namespace) -> int:
    schedule = _load(options.file)
    report = validate(schedule, communication=True if options.communication else None)
    if options.json:
        findings = [
            {"kind": f.kind.value, "rank": f.rank, "cell": f.position, "message": f.message}
            for f in report.findings
        ]
        print(json.dumps({"valid": bool(report), **_summary(schedule), "findings": findings}))
        return 0 if report else 1
    try:
        report.raise_if_failed()
    except ScheduleError as error:
        print(error)
        return 1
    kind = "with messages" if schedule.has_communication else "compute steps only"
    print(f"valid ({kind}): {_describe(schedule)}")
    return 0


def _simulate(options: argparse.Namespace) -> int:
    schedule = _load(options.file)
    costs = _model_costs(options).of_stages(schedule.num_ranks, schedule.num_stages)
    result = simulate(schedule, costs)
    if options.svg:
        options.svg.write_text(timeline_svg({"planned": result.timeline}), encoding="utf-8")
    if options.trace:
        trace = json.dumps(chrome_trace({"planned": result.timeline}))
        options.trace.write_text(trace, encoding="utf-8")
    if options.json:
        numbers = {
            "makespan": result.makespan,
            "bubble": list(result.bubble),
            "peak_activations": list(result.peak_activations),
        }
        print(json.dumps({**_summary(schedule), **numbers}))
    else:
        print(_table(result))
    return 0


def _search(options: argparse.Namespace) -> int:
    result = search(
        _model_costs(options),
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        virtual=options.virtual,
        memory_limit=options.memory,
        split_backward=not options.whole_backward,
        num_candidates=options.candidates,
        time_budget=options.time_budget,
        seed=options.seed,
    )
    schedule = add_send_recv(result.schedule) if options.communication else result.schedule
    print(_found(result), file=sys.stderr)
    text = to_json(schedule) if options.json else timetable(schedule) + "\n"
    _write(options.output, text)
    return 0


def _found(result: SearchResult) -> str:
    return (
        f"makespan {result.makespan:g}, no shorter than {result.lower_bound:g} possible "
        f"(gap {result.gap:.1%}); {result.num_stages_per_rank} stages per rank, "
        f"{result.placement} placement; {result.num_candidates} candidates, "
        f"ended by {result.ended_by}; from {result.origin}"
    )


def _model_costs(options: argparse.Namespace) -> ModelCosts:
    return ModelCosts(
        forward=options.forward,
        input_grad=options.input_grad,
        weight_grad=options.weight_grad,
        first_scale=options.first_scale,
        last_scale=options.last_scale,
        latency=options.latency,
    )


def _convert(options: argparse.Namespace) -> int:
    schedule = _load(options.file)
    printed = str(options.output) == "-"
    default = "json" if printed and options.json else options.output.suffix.removeprefix(".")
    target = options.to or default
    if target not in {"csv", "json"}:
        raise ValueError(f"output ({options.output}) must end in .csv or .json, or use --to")
    _write(options.output, to_csv(schedule) if target == "csv" else to_json(schedule))
    if options.json and not printed:
        written = {"format": target, "output": str(options.output)}
        print(json.dumps({**_summary(schedule), **written}))
    return 0


def _load(path: Path) -> Schedule:
    name = "standard input" if str(path) == "-" else str(path)
    try:
        return parse(sys.stdin.read() if name == "standard input" else path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


def _summary(schedule: Schedule) -> dict[str, Any]:
    return {
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
    }


def _describe(schedule: Schedule) -> str:
    steps = sum(step is not None for row in schedule.steps for step in row)
    return (
        f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches, {steps} steps"
    )


def _table(result: Simulation) -> str:
    lines = [f"makespan {result.makespan:g}", "rank  bubble  peak activations"]
    for rank, (bubble, peak) in enumerate(zip(result.bubble, result.peak_activations, strict=True)):
        lines.append(f"{rank:4d}  {bubble:6.1%}  {peak:16g}")
    return "\n".join(lines)


class _Parser(argparse.ArgumentParser):
    """Answers bad arguments in one line; the usage is what --help is for."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hp-schedule", description="Pipeline schedules as data.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = _command(commands, "generate", _generate, "make a schedule from its closed form")
    generate.add_argument("name", choices=[*_GENERATORS])
    generate.add_argument("--ranks", type=int, required=True)
    generate.add_argument("--microbatches", type=int, required=True)
    generate.add_argument(
        "--stages-per-rank", type=int, help="of interleaved schedules, looped_bfs and forward_only"
    )
    generate.add_argument(
        "--max-in-flight",
        type=lambda text: int(text) if text.isdecimal() else text,
        help="of zero_bubble: 1p, 1.5p, 2p or a number of activations",
    )
    generate.add_argument("--group-size", type=int, help="of grouped_interleaved")
    generate.add_argument(
        "--overlap", choices=["b_f", "f_b"], help="pair backwards and forwards in this order"
    )
    generate.add_argument("--communication", action="store_true", help="insert sends and receives")
    generate.add_argument("--csv", action="store_true", help="print torch's CSV")
    generate.add_argument("--output", "-o", type=Path, default=Path("-"), help="default: print")
    show = _command(commands, "show", _show, "draw a schedule", file=True)
    show.add_argument("--cells", action="store_true", help="as it stands, messages included")
    check = _command(commands, "check", _check, "prove that a schedule runs", file=True)
    check.add_argument("--communication", action="store_true", help="messages must be there")
    cost = _command(commands, "simulate", _simulate, "time, bubble and memory", file=True)
    _add_costs(cost)
    cost.add_argument("--svg", type=Path, help="write a picture")
    cost.add_argument("--trace", type=Path, help="write a trace for ui.perfetto.dev")
    find = _command(commands, "search", _search, "find a short schedule")
    find.add_argument("--ranks", type=int, required=True)
    find.add_argument("--microbatches", type=int, required=True)
    find.add_argument(
        "--virtual", type=_numbers, default=(1, 2), help="stages per rank to try, as in 1,2,4"
    )
    _add_costs(find)
    find.add_argument(
        "--memory", type=float, default=math.inf, help="microbatches a rank may hold; default: all"
    )
    find.add_argument("--time-budget", type=float, default=10.0, help="seconds")
    find.add_argument("--candidates", type=int, help="stop after so many, for equal results")
    find.add_argument("--seed", type=int, default=0)
    find.add_argument("--whole-backward", action="store_true", help="do not split backwards")
    find.add_argument("--communication", action="store_true", help="insert sends and receives")
    find.add_argument("--output", "-o", type=Path, default=Path("-"), help="default: print")
    convert = _command(commands, "convert", _convert, "between JSON and torch's CSV", file=True)
    convert.add_argument("output", type=Path, nargs="?", default=Path("-"))
    convert.add_argument("--to", choices=["csv", "json"], help="default: the output's ending")
    return parser


def _add_costs(command: argparse.ArgumentParser) -> None:
    command.description = f"{command.description}; costs are those of one rank's share of the model"
    for name in ("forward", "input-grad", "weight-grad"):
        command.add_argument(f"--{name}", type=float, default=1.0)
    for name in ("first-scale", "last-scale"):
        stage = name.partition("-")[0]
        command.add_argument(f"--{name}", type=float, default=1.0, help=f"of the {stage} stage")
    command.add_argument("--latency", type=float, default=0.0, help="of a message")


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"({text}) must be numbers as in 1,2,4") from None


def _command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    text: str,
    *,
    file: bool = False,
) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    command.set_defaults(run=run)
    command.add_argument("--json", action="store_true", help="machine-readable output")
    if file:
        command.add_argument("file", type=Path, help="JSON or torch's CSV; - for standard input")
    return command


if __name__ == "__main__":
    sys.exit(main())
