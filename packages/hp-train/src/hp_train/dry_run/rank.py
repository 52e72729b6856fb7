"""One rank of a dry run: the trainer of `hp_train.train`, whose device computes nothing."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hp_expert import ExchangeRead
from hp_platform import RankInfo, doing, failing_together
from hp_platform.dry import active_device
from hp_platform.dry.trace import Trace
from hp_platform.host_reads import answering
from hp_platform.places import current_place
from hp_schedule.runtime import HeaderRead
from hp_train.checkpoint.planners import StrictSavePlanner
from hp_train.config import Config
from hp_train.data import load_tokenizer
from hp_train.dry_run.labels import add_labels
from hp_train.dry_run.routing import ALL_LAYERS, Skew, rows_per_rank
from hp_train.launch.board import Board
from hp_train.launch.signals import StopFlag
from hp_train.launch.task import Worker
from hp_train.parallelize import vocabulary_of
from hp_train.startup import connect, vocab_size_of
from hp_train.train import SQUARES, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every rank of a dry run does.

    Attributes:
        config: Of the run.
        skew: Of the routing.
        data: Folder with tokens.
        steps: Updates of the weights.
    """

    config: Config
    skew: Skew
    data: Path
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a rank would write of a checkpoint.

    Attributes:
        file: Its name.
        num_tensors: That this rank holds, or parts of them.
        num_bytes: Of these; the host copies all of them first where a save runs behind the training.
        own_bytes: Of these, what no other rank holds, and of the rest its share.
    """

    file: str
    num_tensors: int
    num_bytes: int
    own_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What a rank did.

    Attributes:
        trace: With labels.
        saved: Plan of a save.
        num_parameters: Elements of parameters that are here.
    """

    trace: Trace
    saved: Saved
    num_parameters: int


def run_rank(job: Job) -> RankReport:
    """Train for some steps as one rank; inside a `DryDevice`, in a dry world."""
    info = RankInfo.from_env()
    assert info is not None, "a dry world sets RANK"
    with tempfile.TemporaryDirectory(prefix="hp-dry-") as folder:
        worker = Worker(
            info=info,
            run_dir=Path(folder),
            board=Board.unwatched(),
            stop=StopFlag(),
            data=job.data,
        )
        with answering(_Answers(job.skew)), failing_together(everything=True):
            return _train(job, worker)


def _train(job: Job, worker: Worker) -> RankReport:
    config, device = job.config, active_device()
    runtime = connect(config, worker)
    tokenizer = load_tokenizer(config.data.tokenizer)
    with doing("build"):
        trainer = Trainer(config, worker, runtime, tokenizer)
    modules = list(trainer.pipeline.modules.values())
    device.label((p.local for p in trainer.parameters), "parameters")
    device.label((t for module in modules for t in module.parameters()), "parameters")
    states = trainer.optimizer.state.values()
    device.label((t for state in states for t in state.values()), "optimizer")
    for _ in range(job.steps):
        trainer.train_step()
    with doing(f"step {trainer.step}", "plan of a save"):
        saved = _plan_of_save(trainer)
    trainer.close()
    width = len(vocabulary_of(trainer.mesh, vocab_size_of(config, tokenizer)))
    add_labels(device.trace, logits_width=width)
    return RankReport(
        trace=device.trace,
        saved=saved,
        num_parameters=sum(p.local.numel() for p in trainer.parameters),
    )


def _plan_of_save(trainer: Trainer) -> Saved:
    """Let the planner of checkpoints say what this rank holds; nothing is written."""
    planner, tensors = StrictSavePlanner(), trainer.tensors()
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    items = planner.create_local_plan().items
    holders = {
        f"{prefix}.{parameter.name}": _holders(trainer, parameter.replicas)
        for parameter in trainer.parameters
        for prefix in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    }
    sizes = [
        (item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize, item)
        for item in items
        if item.tensor_data is not None
    ]
    everyone = trainer.mesh.stage.num_ranks
    return Saved(
        file=f"rank-{trainer.mesh.rank:05d}.safetensors",
        num_tensors=len(items),
        num_bytes=sum(size for size, _ in sizes),
        own_bytes=sum(size // holders.get(item.index.fqn, everyone) for size, item in sizes),
    )


def _holders(trainer: Trainer, replicas: tuple[str, ...]) -> int:
    number = 1
    for group in replicas:
        number *= trainer.mesh.size(group)
    return number


class _Answers:
    """What the host reads of the device; see `hp_platform.host_reads`."""

    def __init__(self, skew: Skew) -> None:
        self._skew = skew

    def __call__(self, copy: Tensor, purpose: object) -> Tensor:
        if isinstance(purpose, ExchangeRead):
            slots = self._skew.slots(
                _layer(),
                num_tokens=purpose.num_tokens,
                top_k=purpose.top_k,
                num_experts=purpose.num_experts,
                num_ranks=purpose.num_ranks,
            )
            rows = rows_per_rank(slots, purpose.num_tokens, purpose.top_k, purpose.num_ranks)
            return purpose.numbers(slots, rows, like=copy)
        if isinstance(purpose, HeaderRead):
            return purpose.numbers(like=copy)
        if purpose == SQUARES:
            return torch.full_like(copy, 1e12)  # so large that gradients are clipped
        return copy


def _layer() -> str:
    """Name of the layer that this thread computes."""
    words = current_place().split(", ")
    names = (word for word in reversed(words) if word.startswith(("layers.", "mtp.")))
    return next(names, ALL_LAYERS)
