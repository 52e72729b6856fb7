"""One rank of a dry run: the trainer, on a device that computes nothing."""

import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hp_base.dtypes import BYTES
from hp_base.signals import StopFlag
from hp_checkpoint import sources_of
from hp_data import load_tokenizer
from hp_data.tokenizer import vocab_size_of
from hp_dry import active_device, check_streams, late_loads, replay
from hp_dry.report.labels import PARAMETERS, add_labels
from hp_dry.report.summary import RankSummary, Saved, summarize
from hp_dry.trace import Fault, Trace
from hp_plan.costs.routing import Skew
from hp_platform import RankInfo, doing, failing_together
from hp_platform.host_reads import answering
from hp_train.dry_run.answers import Answers
from hp_trainer.config import Config
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.task import Worker
from hp_trainer.layout.vocabulary import LOSS, logit_tile
from hp_trainer.model.parallelize import vocabulary_of
from hp_trainer.training.banner import gathered_by
from hp_trainer.training.gpu_settings import (
    grows_segments,
    keeps_launch_order,
    launches_from_one_thread,
    loads_eagerly,
)
from hp_trainer.training.startup import connect
from hp_trainer.training.train import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a dry run does.

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


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank did, besides its trace.

    Attributes:
        summary: Summary of its trace.
        problems: Faults and hazards of the device, a line each.
        stopped: Where a script ended before its end; empty: it did not.
        keeps_launch_order: Whether NCCL keeps its operations in the order of the host.
        loads_eagerly: Whether torch's kernels are loaded before anything is launched.
        gathered: How parameters are gathered, as a clause behind a layout.
    """

    summary: RankSummary
    problems: tuple[str, ...]
    gathered: str = ""
    stopped: str = ""
    keeps_launch_order: bool = False
    loads_eagerly: bool = False


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
    width = len(vocabulary_of(trainer.mesh, vocab_size_of(tokenizer, config.model.vocab_size)))
    tokens = config.train.microbatch_size * len(trainer.pipeline.sequence.attended)
    tile = logit_tile(tokens, width, size=BYTES[config.train.dtype])
    tile_widths = () if tile is None else (tile.rows, width % tile.rows)
    add_labels(device.trace, logits_width=width, tile_widths=tile_widths, loss_place=LOSS)
    return report_of(
        device.trace,
        skew=job.skew.name,
        num_parameters=sum(p.local.numel() for p in trainer.parameters),
        saved=saved,
        keeps_launch_order=keeps_launch_order(os.environ, config),
        loads_eagerly=loads_eagerly(os.environ, config),
        from_one_thread=launches_from_one_thread(config),
        expandable_segments=grows_segments(os.environ, config),
        gathered=gathered_by(trainer.config, trainer.mesh.layout),
    )


def report_of(
    trace: Trace,
    *,
    skew: str = "",
    num_parameters: int = -1,
    saved: Saved | None = None,
    stopped: str = "",
    keeps_launch_order: bool = False,
    loads_eagerly: bool = False,
    from_one_thread: bool = True,
    expandable_segments: bool = False,
    gathered: str = "",
) -> Any:
    """Look at what a rank did; returns a `RankReport` as plain values.

    Args:
        trace: Trace of the rank, with labels.
        skew: Name of the model of the routing.
        num_parameters: Elements of the parameters of this rank; -1: not counted.
        saved: What a checkpoint of this rank would hold; None: not asked.
        stopped: Where a script ended before its end; empty: it did not.
        keeps_launch_order: Whether NCCL keeps its operations in the order of the host.
        loads_eagerly: Whether torch's kernels are loaded before anything is launched.
        from_one_thread: Whether threads that launch take turns.
        expandable_segments: Whether torch's allocator takes memory in segments that grow.
        gathered: See `RankReport`.
    """
    summary = summarize(
        trace,
        skew=skew,
        usage=replay(trace, expandable_segments=expandable_segments),
        expandable_segments=expandable_segments,
        num_parameters=num_parameters,
        saved=saved,
    )
    faults = (
        f"rank {trace.rank}: {event.place}: {event.at}: {event.what}"
        for event in trace
        if isinstance(event, Fault)
    )
    hazards = (f"rank {trace.rank}: {hazard}" for hazard in check_streams(trace))
    loads = [] if from_one_thread else map(str, late_loads(trace, eager=loads_eagerly))
    report = RankReport(
        summary=summary,
        problems=tuple(dict.fromkeys((*faults, *hazards, *loads))),
        stopped=stopped,
        keeps_launch_order=keeps_launch_order,
        loads_eagerly=loads_eagerly,
        gathered=gathered,
    )
    return msgspec.to_builtins(report)


def _plan_of_save(trainer: Trainer) -> Saved:
    """Say what this rank holds of what is saved; nothing is written."""
    holders = {
        f"{prefix}.{parameter.name}": math.prod(map(trainer.mesh.size, parameter.replicas))
        for parameter in trainer.parameters
        for prefix in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
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
