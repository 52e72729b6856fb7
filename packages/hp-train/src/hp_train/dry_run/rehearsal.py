"""A dry run: one process for each class of ranks, and what their traces prove for all of them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hp_platform.dry import check_streams, prove, run_ranks
from hp_platform.dry.trace import Fault, Trace
from hp_train.config import Config
from hp_train.data import load_tokenizer
from hp_train.dry_run.classes import classes_of
from hp_train.dry_run.rank import Job, RankReport, run_rank
from hp_train.dry_run.routing import Skew
from hp_train.layout import Layout
from hp_train.startup import vocab_size_of

_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What came of a dry run.

    Attributes:
        title: What was run.
        skew: What experts were taken to get.
        classes: Ranks that each process stands for, by its rank.
        reports: Of each process of a trainer, by rank.
        traces: Of each process, by rank.
        problems: Why a run would fail, a line each; none is a proof that the ranks fit together.
        seconds: It took.
    """

    title: str
    skew: str
    classes: Mapping[int, tuple[int, ...]]
    traces: Mapping[int, Trace]
    reports: Mapping[int, RankReport] = field(default_factory=dict)
    problems: Sequence[str] = ()
    seconds: float = 0.0


def rehearse(
    config: Config,
    skew: Skew,
    *,
    data: Path,
    steps: int = 2,
    apart: Sequence[int] = (),
    gpus_per_node: int = 8,
) -> Rehearsal:
    """Run the trainer as one rank of every class.

    Args:
        config: See `hp_train.dry_run.command.dry_config`.
        skew: Decides what experts get.
        data: Folder with tokens.
        steps: Updates of the weights.
        apart: Ranks that get a process of their own.
        gpus_per_node: Devices of a machine.

    Raises:
        hp_train.errors.HpError: What the trainer refuses.
        RuntimeError: When a rank fails.
    """
    began = time.monotonic()
    vocab_size = vocab_size_of(config, load_tokenizer(config.data.tokenizer))
    classes = classes_of(config, skew, vocab_size=vocab_size, apart=apart)
    job = Job(config=config, skew=skew, data=data, steps=steps)
    reports = run_ranks(
        run_rank,
        job,
        world_size=config.world_size,
        representatives=classes,
        timeout=_SECONDS,
        local_world_size=gpus_per_node,
    )
    traces = {rank: report.trace for rank, report in reports.items()}
    return Rehearsal(
        title=f"{Layout.of(config.mesh)}, {config.pipeline.schedule}",
        skew=skew.name,
        classes=classes,
        reports=reports,
        traces=traces,
        problems=problems_of(traces, classes),
        seconds=time.monotonic() - began,
    )


def problems_of(
    traces: Mapping[int, Trace], classes: Mapping[int, tuple[int, ...]]
) -> list[str]:
    """Why ranks would not fit together, or a device refuse what it is given; one line each."""
    found = [str(problem) for problem in prove(traces, classes)]
    for rank, trace in traces.items():
        found += [f"rank {rank}: {problem}" for problem in check_streams(trace)]
        found += [
            f"rank {rank}: {event.place}: {event.at}: {event.what}"
            for event in trace
            if isinstance(event, Fault)
        ]
    return list(dict.fromkeys(found))
