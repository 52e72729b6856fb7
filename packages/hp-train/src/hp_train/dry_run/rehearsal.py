"""A dry run of a config: the trainer as one rank of every class, for each model of the routing."""

import time
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from hp_data import load_tokenizer
from hp_data.tokenizer import vocab_size_of
from hp_dry.rehearsal import run_classes, summary_of
from hp_dry.report.summary import Summary
from hp_dry.trace import Trace
from hp_plan.costs.routing import Skew
from hp_train.dry_run.classes import classes_of
from hp_train.dry_run.rank import Job, run_rank
from hp_trainer.config import Config
from hp_trainer.layout.ranks import Layout


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
