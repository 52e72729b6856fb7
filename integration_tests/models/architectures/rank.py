"""One rank of a cell: the trainer of hp-train, watched, and what is made of that."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from hp_base.errors import ConfigError
from hp_base.runs import runs_of
from hp_base.signals import StopFlag
from hp_data import load_tokenizer
from hp_platform import RankInfo, all_gather_json
from hp_platform.launch import INIT_METHOD_VARIABLE
from hp_train.verify.own_trainer import part_of
from hp_trainer.config import Config, ModelConfig
from hp_trainer.config.options import CONFIG, to_toml
from hp_trainer.config.schema import fields
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.task import Worker
from hp_trainer.training.gradients import Losses
from hp_trainer.training.startup import connect
from hp_trainer.training.trainer import Trainer
from hp_transformers.families.command import export_hf
from hp_transformers.stages.export import write_folder
from hp_verify.recording.values import Part, ValueRecorder, read_steps
from integration_tests.models.architectures.cells import DIFFERENT, EQUAL, KINDS, Cell
from integration_tests.models.architectures.judge import GRADIENT, LOGITS, LOSS, NORM, WEIGHT, judge
from integration_tests.models.architectures.kept import finite
from integration_tests.models.architectures.reference import Reference, load
from integration_tests.models.architectures.task import (
    BATCH,
    RELOAD_AFTER,
    STEPS,
    TOKENIZER,
    TOKENS,
    config_of,
)

Fault = Callable[[int], AbstractContextManager[object]]
"""Breaks something in a rank, for as long as it is entered."""


@dataclass(frozen=True)
class World:
    """What ranks that run cells have in common.

    Attributes:
        folder: Where they write; it has `MODEL` and `REFERENCE`.
        data: Folder of the tokens.
        trusted: Whether the model brings code that is run.
        bounds: Largest error that is equal, of each kind of cell.
        fault: What a test breaks, around each cell.
    """

    folder: Path
    data: Path
    trusted: bool
    bounds: Mapping[str, float]
    fault: Fault | None = None

    def cell(self, kind: str) -> Path:
        """Folder of a cell."""
        return self.folder / kind.replace(" ", "-")

    def config(self, kind: str) -> Config:
        """Config of a cell.

        Raises:
            hp_base.errors.ConfigError: When hp-train refuses it.
        """
        trust = {"model.trust_remote_code": True} if self.trusted else {}
        model = {"model.transformers": str(self.folder / MODEL), **trust}
        return config_of(self.data, {**model, **KINDS[kind].keys})


MODEL, REFERENCE, RESULT = "model", "reference.pt", "result.json"


def work(world: World, kinds: tuple[str, ...]) -> None:
    """Be a rank of some cells, one after the other; each leaves a `RESULT`, or the first fails."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    expected = Reference.read(world.folder / REFERENCE)
    for kind in kinds:
        folder = world.cell(kind)
        os.environ[INIT_METHOD_VARIABLE] = (folder / f"meet-{os.getppid()}").as_uri()
        began = time.process_time()
        with world.fault(rank) if world.fault else nullcontext():
            run = _Run(world.config(kind), world, folder)
            run.start()
            with _no_more_refusals():
                run.train()
        if rank == 0:
            with _no_more_refusals():
                cell = _judged(world, kind, expected)
        spent = time.process_time() - began
        seconds = sum(all_gather_json(spent, of=float, group=run.trainer.runtime.control))
        run.trainer.close()
        if rank == 0:
            told = msgspec.structs.replace(cell, seconds=round(seconds, 2))
            (folder / RESULT).write_bytes(msgspec.json.encode(told))


@contextmanager
def _no_more_refusals() -> Iterator[None]:
    """Make a refusal an error: what has begun may not be refused."""
    try:
        yield
    except ConfigError as error:
        raise RuntimeError(f"refused after it began: {error}") from error


class _Run:
    """The training of a cell, recorded."""

    def __init__(self, config: Config, world: World, folder: Path) -> None:
        rank, ranks = int(os.environ["RANK"]), config.world_size
        info = RankInfo(rank, ranks, rank, ranks)
        run_dir = folder / "run"
        run_dir.mkdir(parents=True, exist_ok=True)
        data = world.data / "tokens"
        if rank == 0:
            origins = dict.fromkeys(fields(), "default")
            (run_dir / CONFIG).write_text(to_toml(config, origins))
        worker = Worker(info, run_dir, Heartbeats.unwatched(), StopFlag(), data)
        runtime = connect(config, worker)
        tokenizer = load_tokenizer(str(world.data / TOKENIZER))
        self._record = ValueRecorder(folder / "recorded", rank=rank)
        self.trainer = Trainer(config, worker, runtime, tokenizer)

    def start(self) -> None:
        """Load weights, and compute the first logits."""
        self.trainer.resume()
        self._record_logits()

    def train(self) -> None:
        """Update, save, lose everything, load, update, save."""
        for step in range(1, STEPS + 1):
            self.trainer.train_step(before_update=self._before_update)
            if step == STEPS:
                weights = {p.name: part_of(p, p.local) for p in self.trainer.parameters}
                self._record.add(WEIGHT, weights)
            self._record.end_step()
            if step in (RELOAD_AFTER, STEPS):
                self.trainer.save()
            if step == RELOAD_AFTER:
                self._lose()
                self.trainer.resume()
        dist.barrier(group=self.trainer.runtime.control)

    def _record_logits(self) -> None:
        """Note down what the last stage gives of the first batch, [B, S, V]."""
        trainer, pipeline = self.trainer, self.trainer.pipeline
        size = trainer.config.train.microbatch_size
        args, kwargs, *_ = trainer.batches.cut(trainer.data, 0)
        wanted = [{"microbatch": replace(each["microbatch"], targets=None)} for each in kwargs]
        runner = pipeline.runner(len(args), size)
        result = runner.evaluate_microbatches(args, wanted)
        pipeline.forget_casts()
        shape = (BATCH, TOKENS, pipeline.vocab_size)
        positions = pipeline.sequence.attended.tolist()
        row = trainer.mesh.dp_index * (BATCH // trainer.mesh.layout.dp)
        for logits in result.outputs if pipeline.is_last else ():
            whole = logits.shape[-1] == pipeline.vocab_size
            token = 0 if whole else pipeline.vocabulary.start
            for begin, end in runs_of(positions):
                part = Part(logits[:, begin:end], shape, (row, positions[begin], token))
                self._record.add(LOGITS, {"": part})
            row += size

    def _before_update(self, losses: Losses, grad_norm: float) -> None:
        self._record.add_scalar(LOSS, losses.tokens)
        self._record.add_scalar(NORM, grad_norm)
        gradients = {}
        for parameter in self.trainer.parameters:
            assert parameter.local.grad is not None
            gradients[parameter.name] = part_of(parameter, parameter.local.grad)
        self._record.add(GRADIENT, gradients)

    @torch.no_grad()
    def _lose(self) -> None:
        """Spoil weights and moments: nothing but what is loaded can be right afterwards."""
        trainer = self.trainer
        for parameter in trainer.parameters:
            for tensor in (parameter.local, *trainer.optimizer.state[parameter.local].values()):
                tensor.fill_(7.0)
        trainer.step = trainer.next_sequence = 0


def _judged(world: World, kind: str, expected: Reference) -> Cell:
    folder = world.cell(kind)
    exported = folder / "exported"
    tokenizer = world.data / TOKENIZER

    def write(folder: Path, boxes: Any, read: Any, model: ModelConfig, **more: Any) -> None:
        trusting = msgspec.structs.replace(model, trust_remote_code=world.trusted)
        write_folder(folder, boxes, read, trusting, **more)

    export_hf(
        folder / "run",
        exported,
        step=None,
        dtype="float64",
        tokenizer=tokenizer,
        original=world.folder / MODEL,
        of_transformers=write,
    )
    more = {"trust_remote_code": True} if world.trusted else {}
    weights = dict(load(exported, **more).named_parameters())
    steps = list(read_steps(folder / "recorded"))
    config = world.config(kind)
    trained = expected.of(config.data.documents, config.train.microbatch_size)
    if trained is None:
        raise RuntimeError("plain transformers cannot compute the documents one by one")
    found = judge(steps, {k: v.detach() for k, v in weights.items()}, trained)
    is_equal = not found.flaws and found.error <= world.bounds[kind]
    return Cell(
        kind=kind,
        state=EQUAL if is_equal else DIFFERENT,
        error=finite(found.error),
        worst=found.worst,
        compared=found.compared,
        bound=world.bounds[kind],
        reason="; ".join(found.flaws[:3])[:300],
    )
