"""A dry run: one process for each class of ranks, and what their traces prove for all of them."""

import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from hp_base.errors import RehearsalError
from hp_data import load_tokenizer
from hp_data.tokenizer import vocab_size_of
from hp_dry import DryRun, DryRunError, Gpu, prove, run_ranks
from hp_dry.report.summary import Summary
from hp_dry.trace import Collective, Trace
from hp_plan.costs.machine import GPU_MARGIN
from hp_plan.costs.routing import Skew
from hp_train.dry_run.classes import classes_of
from hp_train.dry_run.rank import Job, RankReport, run_rank
from hp_trainer.config import Config
from hp_trainer.launch.launcher import PRELOADED_FOR_TRAINING
from hp_trainer.layout.communicators import Held
from hp_trainer.layout.ranks import Layout

SECONDS = 3600.0
"""That a dry run may take."""


def rehearse(
    config: Config,
    skews: Sequence[Skew],
    *,
    name: str,
    data: Path,
    steps: int = 2,
    apart: Sequence[int] = (),
    gpus_per_node: int = 8,
) -> tuple[Summary, list[Trace]]:
    """Run the trainer as one rank of every class, once for each model of the routing.

    Args:
        config: See `hp_train.dry_run.command.dry_config`.
        skews: Decide what experts get.
        name: Name of the config.
        data: Folder with tokens.
        steps: Updates of the weights.
        apart: Ranks that get a process of their own.
        gpus_per_node: Devices of a machine.

    Returns:
        What was found, and what the ranks did under the first of the models.

    Raises:
        RehearsalError: When a rank fails, or waits for what never comes.
    """
    began = time.monotonic()
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.separator)
    vocab_size = vocab_size_of(tokenizer, config.model.vocab_size)
    found: list[Summary] = []
    traces: list[Trace] = []
    for skew in skews:
        classes = classes_of(config, skew, vocab_size=vocab_size, apart=apart)
        job = Job(config=config, skew=skew, data=data, steps=steps)
        run = run_classes(run_rank, job, classes=classes, gpus_per_node=gpus_per_node)
        layout = f"{Layout.of(config.mesh)}, {config.pipeline.schedule}"
        found.append(
            summary_of(run, classes, name=name, layout=layout, gpus_per_node=gpus_per_node)
        )
        traces = traces or list(run.traces.values())
    whole = replace(
        found[0],
        ranks=tuple(rank for each in found for rank in each.ranks),
        problems=tuple(dict.fromkeys(line for each in found for line in each.problems)),
        seconds=time.monotonic() - began,
    )
    return whole, traces


def run_classes(
    function: Callable[..., Any],
    *args: Any,
    classes: Mapping[int, Sequence[int]],
    gpus_per_node: int,
) -> DryRun:
    """Call a function in a process for each class, each a rank of a dry world.

    Args:
        function: Function at the top level of a module, called in every process.
        *args: Its arguments.
        classes: Rank of each process -> ranks that it represents.
        gpus_per_node: Devices of a machine.

    Raises:
        RehearsalError: When a rank fails, or waits for what never comes.
    """
    world_size = sum(map(len, classes.values()))
    for module in PRELOADED_FOR_TRAINING:  # once, and not by every process
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
    """Put together what the processes did, for all ranks.

    Args:
        run: The traces of all processes, and a `RankReport` of each.
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
    nccl = max(counts, key=lambda each: sum(_beside(each).values()))
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
        beside=_beside(nccl),
        communicators=nccl.communicators,
        peers=nccl.peers,
        ranks=tuple(
            replace(each.summary, stands_for=tuple(classes[each.summary.rank])) for each in reports
        ),
        problems=(*stopped, *map(str, between), *own),
    )


def _beside(nccl: Held) -> dict[str, int]:
    """Memory of a GPU that no tensor has."""
    return {
        "context": int(GPU_MARGIN["context_memory"]),
        "communicators": int(nccl.communicators * GPU_MARGIN["communicator_memory"]),
        "peer buffers": int(nccl.peers * GPU_MARGIN["peer_memory"]),
    }


def held_by(trace: Trace, *, node_size: int) -> Held:
    """Count what a rank holds of NCCL, by what it did; see `hp_trainer.layout.communicators.held`.

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
    """Ranks that an operation has NCCL send to or receive from one by one; without rows to none."""
    if event.op != "all_to_all":
        return () if event.peer < 0 else (event.peer,)
    one_each = (1,) * len(ranks)
    sent, received = event.input_splits or one_each, event.output_splits or one_each
    return (rank for rank, *rows in zip(ranks, sent, received, strict=True) if any(rows))
