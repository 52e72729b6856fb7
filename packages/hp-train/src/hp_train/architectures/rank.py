"""One rank of a cell: the trainer of hp-train, watched, and what is made of that."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform import RankInfo, Runtime, all_gather_json
from hp_platform.launch import INIT_METHOD_VARIABLE
from hp_platform.testing import Part, Recorder
from hp_platform.testing.recording import read_steps
from hp_train.architectures.cells import DIFFERENT, EQUAL, KINDS, Cell, finite
from hp_train.architectures.judge import GRADIENT, LOGITS, LOSS, NORM, WEIGHT, judge
from hp_train.architectures.reference import Reference, load
from hp_train.architectures.task import (
    BATCH,
    RELOAD_AFTER,
    STEPS,
    TOKENIZER,
    TOKENS,
    config_of,
)
from hp_train.base.runs import runs_of
from hp_train.config import Config
from hp_train.data import Tokenizer, load_tokenizer
from hp_train.hugging_face.command import export_hf
from hp_train.jobs.lifting import Lifting
from hp_train.launch.heartbeats import Heartbeats
from hp_train.launch.signals import StopFlag
from hp_train.launch.task import Worker
from hp_train.training.startup import connect
from hp_train.training.train import Losses, Trainer
from hp_train.verify.watched import part_of


@dataclass(frozen=True)
class World:
    """What ranks that run cells have in common.

    Attributes:
        folder: Where they write; it has `MODEL` and `REFERENCE`.
        data: Folder of the tokens.
        keys: What configs of all cells say of the model.
        trusted: Whether the model brings code that is run.
        bounds: Largest error that is equal, of each kind of cell.
        fault: Entered in every rank, around a cell: what a test breaks.
    """

    folder: Path
    data: Path
    keys: Mapping[str, object]
    trusted: bool
    bounds: Mapping[str, float]
    fault: Callable[[int], AbstractContextManager[object]] = lambda _rank: nullcontext()

    def cell(self, kind: str) -> Path:
        """Folder of a cell."""
        return self.folder / kind.replace(" ", "-")

    def config(self, kind: str) -> Config:
        """Config of a cell.

        Raises:
            hp_train.errors.ConfigError: When hp-train refuses it.
        """
        return config_of(self.data, {**self.keys, **KINDS[kind].keys})


MODEL, REFERENCE, RESULT = "model", "reference.pt", "result.json"


def work(world: World, kinds: tuple[str, ...]) -> None:
    """Be a rank of some cells, one after the other; each leaves a `RESULT`, or the first fails."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    expected: Reference = torch.load(world.folder / REFERENCE, weights_only=False)
    for kind in kinds:
        folder = world.cell(kind)
        os.environ[INIT_METHOD_VARIABLE] = (folder / f"meet-{os.getppid()}").as_uri()
        began = time.process_time()
        with world.fault(rank):
            run = _Run(world.config(kind), world, folder)
            run.train()
        if rank == 0:
            cell = _judged(world, kind, expected)
        spent = time.process_time() - began
        seconds = sum(all_gather_json(spent, of=float, group=run.trainer.runtime.control))
        run.trainer.close()
        if rank == 0:
            told = msgspec.structs.replace(cell, seconds=round(seconds, 2))
            (folder / RESULT).write_bytes(msgspec.json.encode(told))


class _Run:
    """The training of a cell, recorded."""

    def __init__(self, config: Config, world: World, folder: Path) -> None:
        rank, ranks = int(os.environ["RANK"]), config.world_size
        info = RankInfo(rank, ranks, rank, ranks)
        run_dir = folder / "run"
        run_dir.mkdir(parents=True, exist_ok=True)
        data = world.data / "tokens"
        worker = Worker(info, run_dir, Heartbeats.unwatched(), StopFlag(), data)
        runtime = connect(config, worker)
        tokenizer = load_tokenizer(str(world.data / TOKENIZER))
        self._record = Recorder(folder / "recorded", rank=rank)
        self.trainer = _Lifted(config, worker, runtime, tokenizer, self._record)

    def train(self) -> None:
        """Update, save, lose everything, load, update, save."""
        self.trainer.resume()
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


class _Lifted(Trainer):
    """A trainer whose model computes in float64 whatever it asks for, and tells its logits."""

    def __init__(
        self,
        config: Config,
        worker: Worker,
        runtime: Runtime,
        tokenizer: Tokenizer,
        record: Recorder,
    ) -> None:
        self._record, self._microbatch = record, 0
        with Lifting():
            super().__init__(config, worker, runtime, tokenizer)

    def compute_gradients(self) -> tuple[Losses, float]:
        """See :class:`Trainer`."""
        self._microbatch = 0
        with Lifting():
            return super().compute_gradients()

    def loss_of(self, output: Tensor, targets: Tensor) -> Tensor:
        """See :class:`Trainer`."""
        if self.step == 0 and output.ndim:
            self._record_logits(output.detach())
        self._microbatch += 1
        return super().loss_of(output, targets)

    def _record_logits(self, logits: Tensor) -> None:
        """Note down what the last stage gives of a microbatch, [B, S, V]."""
        size = self.config.train.microbatch_size
        row = self.mesh.dp_index * (BATCH // self.mesh.layout.dp) + self._microbatch * size
        tokens = self.pipeline.vocabulary if logits.shape[-1] < self.pipeline.vocab_size else [0]
        positions = self.pipeline.sequence.attended.tolist()
        shape = (BATCH, TOKENS, self.pipeline.vocab_size)
        for begin, end in runs_of(positions):
            offset = (row, positions[begin], tokens[0])
            self._record.add(LOGITS, {"": Part(logits[:, begin:end], shape, offset)})


def _judged(world: World, kind: str, expected: Reference) -> Cell:
    folder = world.cell(kind)
    exported = folder / "exported"
    export_hf(folder / "run", exported, step=None, dtype="float64")
    more = {"trust_remote_code": True} if world.trusted else {}
    weights = dict(load(exported, **more).named_parameters())
    steps = list(read_steps(folder / "recorded"))
    documents = KINDS[kind].keys.get("data.documents", "joined")
    found = judge(steps, {k: v.detach() for k, v in weights.items()}, expected.of(documents))
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
