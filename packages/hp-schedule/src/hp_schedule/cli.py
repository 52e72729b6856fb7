"""The command ``hp-schedule``.

Exit status: 0 if all is well, 2 for bad input, which is answered in one line. Of `check`: 0 for a
schedule that trains as it stands or is what a flag says it is, 1 for an unsound one, 3 for one
without a mistake that lacks something.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, get_args

from hp_schedule.arguments import GENERATORS, MODEL, OPTIONS, flag, parser
from hp_schedule.costs import Costs, ModelCosts, costs_from_json, num_stages_of, numbers
from hp_schedule.notation import not_reduced, parse, to_csv, to_json
from hp_schedule.passes.communication import add_send_recv
from hp_schedule.passes.fsdp import add_fsdp_reduce_grad
from hp_schedule.passes.overlap import pair_overlap
from hp_schedule.passes.retention import Retention
from hp_schedule.render import chrome_trace, step_grid, timeline_svg, timetable
from hp_schedule.schedule import Schedule, ScheduleError
from hp_schedule.searching.search import SearchResult, search
from hp_schedule.simulation.simulate import Simulation, simulate
from hp_schedule.steps import FSDP_REDUCE_GRAD
from hp_schedule.validation.report import ValidationReport
from hp_schedule.validation.validate import validate

_INCOMPLETE: Final = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status.

    Args:
        arguments: Command-line arguments without the program's name; default: those of the process.
    """
    options = parser().parse_args(arguments)
    try:
        status = _COMMANDS[options.command](options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads the output has seen enough; nothing is left to be flushed at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, ValueError) as error:
        # What follows the first line is a timetable, or notes for a reader with a screen.
        first = str(error).partition("\n")[0]
        print(f"hp-schedule: {first}", file=sys.stderr)
        return 2
    return status


def _generate(options: argparse.Namespace) -> int:
    if options.json and options.csv:
        raise ValueError("--csv must be left out with --json")
    kind = GENERATORS[options.name]
    chosen = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    for name in chosen.keys() - kind.options.keys():
        raise ValueError(f"{flag(name)} ({chosen[name]}) must be left out for {options.name}")
    schedule = kind.generate(options.ranks, num_microbatches=options.microbatches, **chosen)
    if options.overlap:
        schedule = pair_overlap(schedule, order=options.overlap)
    if options.communication:
        schedule = add_send_recv(schedule)
    _write(options.output, _csv(schedule) if options.csv else _text(schedule, options))
    return 0


def _show(options: argparse.Namespace) -> int:
    schedule = _load(options.file)
    as_cells = options.cells and not options.json
    sys.stdout.write(step_grid(schedule) + "\n" if as_cells else _text(schedule, options))
    return 0


def _check(options: argparse.Namespace) -> int:
    schedule = _load(options.file)
    for name in ("ranks", "stages", "microbatches"):
        expected, found = getattr(options, name), getattr(schedule, f"num_{name}")
        if expected is not None and found != expected:
            raise ValueError(f"num_{name} ({found}) must be {expected}, as --{name} says")
    if options.sharded:
        every = tuple(range(schedule.num_stages))
        gathered, reduced = schedule.gathered_stages, schedule.reduced_stages
        schedule = replace(
            schedule,
            gathered_stages=every if gathered is None else gathered,
            reduced_stages=every if reduced is None else reduced,
        )
    report = validate(
        schedule,
        forward_only=True if options.forward_only else None,
        communication=True if options.communication else None,
        channels=options.channels,
        max_active_stages=options.max_active_stages,
        memory_limit=options.memory,
    )
    status = _INCOMPLETE if report.lacking and not options.partial else 0
    if options.json:
        print(json.dumps(_verdict(report)))
        return status if report else 1
    try:
        report.raise_if_failed()
    except ScheduleError as error:
        print(error)
        return 1
    if report.is_runnable:
        kind = "with messages" if schedule.has_communication else "one rank needs no messages"
        kind = f"forward only, {kind}" if schedule.is_forward_only else kind
        print(f"valid ({kind}): {_describe(schedule)}")
    else:
        print(f"no mistake, but not runnable as it stands: {_describe(schedule)}")
    for lack in report.lacking:
        print(lack)
    return status


def _verdict(report: ValidationReport) -> dict[str, object]:
    findings = [
        {"kind": f.kind.value, "rank": f.rank, "cell": f.position, "message": f.message}
        for f in report.findings
    ]
    return {
        "valid": bool(report),
        "runnable": report.is_runnable,
        "forward_only": report.schedule.is_forward_only,
        "lacking": [lack.value for lack in report.lacking],
        **_summary(report.schedule),
        "findings": findings,
    }


def _simulate(options: argparse.Namespace) -> int:
    schedule = _load(options.file)
    costs = _costs(options)
    if isinstance(costs, ModelCosts):
        costs = costs.of_stages(schedule.num_ranks, schedule.num_stages)
    result = simulate(
        schedule, costs, channels=options.channels, blocking=options.blocking, cores=options.cores
    )
    if options.svg:
        # Whoever gave the costs knows their unit.
        picture = timeline_svg({"planned": result.timeline}, in_seconds=False)
        options.svg.write_text(picture, encoding="utf-8")
    if options.trace:
        options.trace.write_text(json.dumps(chrome_trace({"planned": result.timeline})), "utf-8")
    if options.json:
        numbers = {
            "makespan": result.makespan,
            "bubble": list(result.bubble),
            "peak_activations": list(result.peak_activations),
            "exposed_communication": list(result.exposed_communication),
        }
        print(json.dumps({**_summary(schedule), **numbers}))
    else:
        print(_table(result))
    return 0


def _search(options: argparse.Namespace) -> int:
    costs = _costs(options)
    scale = min(costs.first_scale, costs.last_scale) if isinstance(costs, ModelCosts) else 1.0
    shortest = min(scale * cost for of in (costs.forward, costs.input_grad) for cost in numbers(of))
    if options.communication and shortest <= 0:
        raise ValueError("--forward and --input-grad (0) must be > 0 for --communication")
    result = search(
        costs,
        num_ranks=options.ranks,
        num_microbatches=options.microbatches,
        virtual=options.virtual or _stages_per_rank(costs, options.ranks),
        memory_limit=options.memory,
        split_backward=not options.whole_backward,
        keep_order=options.keep_order,
        blocking=options.blocking,
        retention=[way for way in get_args(Retention) if options.retention in {way, "both"}],
        num_candidates=options.candidates,
        time_budget=options.time_budget,
        exact=options.exact,
        seed=options.seed,
    )
    schedule = result.schedule
    if options.communication:
        schedule = add_send_recv(schedule, costs=result.costs)
    print(_found(result), file=sys.stderr)
    _write(options.output, _text(schedule, options))
    return 0


def _stages_per_rank(costs: ModelCosts | Costs, num_ranks: int) -> tuple[int, ...]:
    """Return the numbers of stages per rank to try where none is given."""
    if isinstance(costs, ModelCosts):
        return (1, 2)
    num_stages = num_stages_of(costs) or num_ranks
    if num_ranks < 1 or num_stages % num_ranks:
        raise ValueError(f"stages of --costs ({num_stages}) must divide by --ranks ({num_ranks})")
    return (num_stages // num_ranks,)


def _found(result: SearchResult) -> str:
    return (
        f"makespan {result.makespan:g}, no shorter than {result.lower_bound:g} possible "
        f"(gap {result.gap:.1%}); {result.num_stages_per_rank} stages per rank, "
        f"{result.placement} placement; {result.num_candidates} candidates, "
        f"ended by {result.ended_by}; from {result.origin}"
    )


def _costs(options: argparse.Namespace) -> ModelCosts | Costs:
    """Return the costs of the stages from a file, or a model's costs from the other options.

    Raises:
        ValueError: If both are given, or the file has no costs.
    """
    names = [name.replace("-", "_") for name in MODEL]
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.costs is None:
        return ModelCosts(**given)
    for name, value in given.items():
        raise ValueError(f"{flag(name)} ({value:g}) must be left out with --costs")
    try:
        return costs_from_json(options.costs.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{options.costs}: {error}") from None


def _convert(options: argparse.Namespace) -> int:
    schedule = _load(options.file)
    printed = str(options.output) == "-"
    default = "json" if printed and options.json else options.output.suffix.removeprefix(".")
    target = options.to or default
    if target not in {"csv", "json"}:
        raise ValueError(f"output ({options.output}) must end in .csv or .json, or use --to")
    if options.waits and target != "csv":
        raise ValueError("--waits must be given with CSV")
    text = _csv(schedule, waits=options.waits) if target == "csv" else to_json(schedule)
    _write(options.output, text)
    if options.json and not printed:
        written = {"format": target, "output": str(options.output)}
        print(json.dumps({**_summary(schedule), **written}))
    return 0


def _text(schedule: Schedule, options: argparse.Namespace) -> str:
    """Return a schedule as JSON if that is asked for, otherwise as a timetable."""
    return to_json(schedule) if options.json else timetable(schedule) + "\n"


def _csv(schedule: Schedule, *, waits: bool = False) -> str:
    """Return the CSV of a schedule, with the steps in which torch's runtime divides gradients."""
    if not_reduced(schedule):
        if FSDP_REDUCE_GRAD in schedule.kinds:
            return to_csv(schedule, waits=waits)  # refused: some stages are sharded, others are not
        schedule = add_fsdp_reduce_grad(schedule)
        print("REDUCE_GRAD of every stage added: torch divides gradients there", file=sys.stderr)
    return to_csv(schedule, waits=waits)


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


def _summary(schedule: Schedule) -> dict[str, object]:
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
    lines = [
        f"makespan {result.makespan:g}",
        "rank  bubble  peak activations  exposed communication",
    ]
    columns = (result.bubble, result.peak_activations, result.exposed_communication)
    lines += [
        f"{rank:4d}  {bubble:6.1%}  {peak:16g}  {exposed:21g}"
        for rank, (bubble, peak, exposed) in enumerate(zip(*columns, strict=True))
    ]
    return "\n".join(lines)


_COMMANDS: Final = {
    "generate": _generate,
    "show": _show,
    "check": _check,
    "simulate": _simulate,
    "search": _search,
    "convert": _convert,
}


if __name__ == "__main__":
    sys.exit(main())
