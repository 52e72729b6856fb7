"""Dry run of all classes of ranks, the proof of their traces, and its report."""

import argparse
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from hp_base.beside_tensors import Held
from hp_base.command_line import say, write_named
from hp_base.errors import ConfigError, RehearsalError
from hp_base.folder import why_not
from hp_dry.cluster import Gpu
from hp_dry.proof.order import prove
from hp_dry.report.curve import curve_svg
from hp_dry.report.page import page
from hp_dry.report.report import report
from hp_dry.report.summary import RankReport, Summary, to_json
from hp_dry.run import DryRun, DryRunError, run_ranks
from hp_dry.trace import Collective, Trace

SECONDS = 3600.0
"""Seconds that a dry run may take."""
PRELOADED = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint")
"""Modules that most programs of several ranks import."""


def run_classes(
    function: Callable[..., object],
    *args: object,
    classes: Mapping[int, Sequence[int]],
    gpus_per_node: int,
) -> DryRun:
    """Call a function in a process for each class of ranks of a dry world.

    Args:
        function: Function at the top level of a module, called in every process.
        *args: Arguments of the function.
        classes: Rank of each process -> ranks that it represents.
        gpus_per_node: Devices of a machine.

    Raises:
        RehearsalError: If a rank fails, or waits for ever.
    """
    world_size = sum(map(len, classes.values()))
    for module in PRELOADED:  # once for all processes
        importlib.import_module(module)
    try:
        return run_ranks(
            function,
            *args,
            world_size=world_size,
            representatives=classes,
            timeout=SECONDS,
            local_world_size=min(gpus_per_node, world_size),
        )
    except DryRunError as error:
        raise RehearsalError(str(error).partition("\n")[0]) from error


def summary_of(
    run: DryRun,
    classes: Mapping[int, Sequence[int]],
    *,
    name: str,
    gpus_per_node: int,
    layout: str = "",
) -> Summary:
    """Summarise the traces of all processes for all ranks.

    Args:
        run: Traces and `RankReport`s of all processes.
        classes: Rank of each process -> ranks that it represents.
        name: Name of the config or the script.
        layout: Parallel layout in words.
        gpus_per_node: Devices of a machine.
    """
    gpu = Gpu()
    reports = [msgspec.convert(result, RankReport) for result in run.results.values()]
    stopped = [f"rank {r.summary.rank} stopped {r.stopped}" for r in reports if r.stopped]
    own = [line for report in reports for line in report.problems]
    counts = [held_by(trace, node_size=gpus_per_node) for trace in run.traces.values()]
    nccl = max(counts, key=lambda each: sum(each.in_bytes().values()))
    in_order = all(report.keeps_launch_order for report in reports)
    eager = all(report.loads_eagerly for report in reports)
    between = prove(
        run.traces, classes=classes, launch_order_implicit=in_order, eager_loading=eager
    )
    return Summary(
        name=name,
        layout=layout + reports[0].gathered,
        world_size=sum(map(len, classes.values())),
        gpu=gpu.name,
        gpu_bytes=gpu.memory_bytes,
        beside=nccl.in_bytes(),
        communicators=nccl.communicators,
        peers=nccl.peers,
        ranks=tuple(
            replace(each.summary, stands_for=tuple(classes[each.summary.rank])) for each in reports
        ),
        problems=(*stopped, *map(str, between), *own),
    )


def held_by(trace: Trace, *, node_size: int) -> Held:
    """Count the memory of NCCL on a rank by its operations; see `hp_base.beside_tensors.Held`.

    Args:
        trace: Trace of the rank.
        node_size: Devices of a node.
    """
    exchanges = {name: set[int]() for name in trace.connected if len(trace.groups[name]) > 1}
    for event in trace:
        if isinstance(event, Collective) and event.group in exchanges:
            exchanges[event.group].update(_peers(event, trace.groups[event.group]))
    return Held.of(trace.rank, map(tuple, exchanges.values()), node_size=node_size)


def _peers(event: Collective, ranks: Sequence[int]) -> Iterable[int]:
    """List the ranks with which NCCL exchanges single messages in an operation."""
    if event.op != "all_to_all":
        return () if event.peer < 0 else (event.peer,)
    one_each = (1,) * len(ranks)
    sent, received = event.input_splits or one_each, event.output_splits or one_each
    return (rank for rank, *rows in zip(ranks, sent, received, strict=True) if any(rows))


def show(summary: Summary, traces: Sequence[Trace], options: argparse.Namespace) -> int:
    """Print the summary of a dry run, and write the requested files.

    Args:
        summary: Summary of the dry run.
        traces: Traces of the ranks that were run.
        options: Parsed flags of `hp_dry.cli.add_flags`.

    Returns:
        0 if there are no problems.

    Raises:
        ConfigError: If a file cannot be written.
        RehearsalError: If there are problems, which were printed.
    """
    text = to_json(summary).decode() if options.json else "\n".join(report(summary))
    say(text)
    worst = summary.worst
    if options.html:
        write_named("--html", options.html, page(summary))
    if options.svg:
        curve = curve_svg(
            worst.memory, title=f"{summary.name}, rank {worst.rank}", gpu_bytes=summary.gpu_bytes
        )
        write_named("--svg", options.svg, curve)
    if options.traces:
        folder = Path(options.traces)
        try:
            for trace in traces:
                trace.write(folder / f"rank-{trace.rank:05d}.jsonl")
        except OSError as error:
            why = why_not(error)
            raise ConfigError(f"--traces ({folder}) must be a writable folder: {why}") from None
    if summary.problems:
        number = len(summary.problems)
        several = f"{number} problems, first" if number > 1 else "a problem"
        raise RehearsalError(f"{several}: {summary.problems[0]}")
    return 0
