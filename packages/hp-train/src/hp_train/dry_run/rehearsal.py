"""A dry run of a config: the trainer as one rank of every class, for each model of the routing."""

import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from hp_base.dtypes import BYTES
from hp_base.signals import StopFlag
from hp_checkpoint import sources_of
from hp_data import load_tokenizer
from hp_data.tokenizer import vocab_size_of
from hp_dry import active_device
from hp_dry.cluster import grows_segments, keeps_launch_order, loads_eagerly
from hp_dry.rehearsal import run_classes, summary_of
from hp_dry.report.labels import PARAMETERS, add_labels
from hp_dry.report.summary import Saved, Summary, report_of
from hp_dry.trace import Trace
from hp_plan.costs.routing import Skew
from hp_platform import RankInfo, doing, failing_together
from hp_platform.dry_device import answering
from hp_train.dry_run.answers import Answers
from hp_train.dry_run.classes import classes_of
from hp_trainer.config import Config
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.task import Worker
from hp_trainer.layout.ranks import Layout
from hp_trainer.layout.vocabulary import LOSS, logit_tile
from hp_trainer.training.optimizer import MOMENTS
from hp_trainer.training.startup import connect, launches_from_one_thread, with_gpu_settings
from hp_trainer.training.train import gathered_by
from hp_trainer.training.trainer import Trainer


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work of every rank of a dry run.

    Attributes:
        config: Config of the run.
        skew: Model of the routing.
        data: Folder with the tokens.
        steps: Number of steps to train.
    """

    config: Config
    skew: Skew
    data: Path
    steps: int


def run_rank(job: Job) -> Any:
    """Train for some steps as one rank of a dry world; returns a `RankReport` as plain values."""
    info = RankInfo.from_env()
    assert info is not None, "a dry world sets RANK"
    with tempfile.TemporaryDirectory(prefix="hp-dry-") as folder:
        worker = Worker(
            info=info,
            run_dir=Path(folder),
            heartbeats=Heartbeats.unwatched(),
            stop=StopFlag(),
            data=job.data,
        )
        with answering(Answers(job.skew)), failing_together(everything=True):
            return _train(job, worker)


def _train(job: Job, worker: Worker) -> Any:
    config, device = job.config, active_device()
    runtime = connect(config, worker)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.separator)
    with doing("build"):
        trainer = Trainer(config, worker, runtime, tokenizer)
    device.label((p.local for p in trainer.parameters), PARAMETERS)
    device.label(
        (t for module in trainer.pipeline.modules.values() for t in module.parameters()), PARAMETERS
    )
    states = trainer.optimizer.state.values()
    device.label((t for state in states for t in state.values()), "optimizer")
    for _ in range(job.steps):
        trainer.train_step()
    with doing("plan of a save"):
        saved = _plan_of_save(trainer)
    trainer.close()
    width = len(trainer.pipeline.vocabulary)
    tokens = config.train.microbatch_size * len(trainer.pipeline.sequence.attended)
    tile = logit_tile(tokens, width, size=BYTES[config.train.dtype])
    tile_widths = () if tile is None else (tile.rows, width % tile.rows)
    add_labels(device.trace, logits_width=width, tile_widths=tile_widths, loss_place=LOSS)
    env = with_gpu_settings(os.environ, config)
    return report_of(
        device.trace,
        skew=job.skew.name,
        num_parameters=sum(p.local.numel() for p in trainer.parameters),
        saved=saved,
        keeps_launch_order=keeps_launch_order(env),
        loads_eagerly=loads_eagerly(env),
        from_one_thread=launches_from_one_thread(config),
        expandable_segments=grows_segments(env),
        gathered=gathered_by(trainer.config, trainer.mesh.layout),
    )


def _plan_of_save(trainer: Trainer) -> Saved:
    """Say what this rank holds of what is saved; nothing is written."""
    holders = {
        f"{prefix}.{parameter.name}": math.prod(map(trainer.mesh.size, parameter.replicas))
        for parameter in trainer.parameters
        for prefix in ("model", *(f"optimizer.{m}" for m in (*MOMENTS, "momentum_buffer")))
    }
    sizes = {
        name: math.prod(box.sizes) * source.dtype.itemsize
        for name, source in sources_of(trainer.tensors()).items()
        for box in source.boxes
    }
    everyone = trainer.mesh.stage.num_ranks
    return Saved(
        file=f"rank-{trainer.mesh.rank:05d}.safetensors",
        num_tensors=len(sizes),
        num_bytes=sum(sizes.values()),
        own_bytes=sum(size // holders.get(name, everyone) for name, size in sizes.items()),
    )
