"""The training job of hp-train, watched: what its trainer gets, computes, saves and loads."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from hp_base.runs import runs_in, runs_of
from hp_checkpoint.runs.verify import open_checkpoint
from hp_data.dataset import Dataset
from hp_train.verify.choices import listen_to_choices
from hp_train.verify.job import Job
from hp_train.verify.program import read_request
from hp_train.verify.recording import Part, Recorder
from hp_trainer.config import Config
from hp_trainer.launch.task import Worker
from hp_trainer.model.parameters import Parameter
from hp_trainer.training.batches import Batches, PlannedStep, Share
from hp_trainer.training.startup import connect, prepare_data
from hp_trainer.training.state import checkpoint_buffers
from hp_trainer.training.train import Losses, Trainer

Kind = Literal["", "eval "]
MOMENTS = {"first moment": "exp_avg", "second moment": "exp_avg_sq"}


class TrainerJob(Job):
    """The training job of hp-train.

    Args:
        config: Configuration of the run; its layout is the one to be judged.
        worker: This process; its run directory has a request.

    Attributes:
        trainer: Trainer of the run; in the middle of it another one takes its place and loads what
            was saved.
    """

    def __init__(self, config: Config, worker: Worker) -> None:
        runtime = connect(config, worker)
        tokenizer = prepare_data(config, worker, runtime)
        request = read_request(worker.run_dir)
        self.program = request.program
        self._source = Path(request.source) if request.source else worker.run_dir
        self._record: Recorder
        self.config = config
        self.trainer = self._watch(_Trainer(config, worker, runtime, tokenizer))

    def train_step(self, record: Recorder) -> None:
        """See :class:`Job`."""
        self._record = record
        step = self.trainer.step + 1
        if step == 1:
            record.add("start", self._state())
            record.add_scalar("separator", -1 if (s := self.trainer.data.separator) is None else s)
        if step == self.program.reload_after + 1 > 1:
            self._reload()
            record.add("loaded", self._state())
        record.add_scalar("first sequence", self.trainer.next_sequence)
        self._train(record, step)
        if step in self.program.evaluated:
            eval_loss = self.trainer.evaluate()
            record.add_scalar("eval loss", math.nan if eval_loss is None else eval_loss)
        if step == self.program.reload_after:
            self._save(record)

    def _train(self, record: Recorder, step: int) -> None:
        def before_update(losses: Losses, grad_norm: float) -> None:
            record.add_scalar("loss", losses.tokens)
            record.add_scalar("balance loss", losses.balance)
            record.add_scalar("prediction loss", losses.prediction)
            # Backward comes from the end of the model.
            record.add("gradient", dict(map(_gradient, reversed(self.trainer.parameters))))
            record.add_scalar("norm", grad_norm)

        trainer, train = self.trainer, self.config.train
        limit = self.program.largest_norm(step, train.max_grad_norm)
        trainer.config = msgspec.structs.replace(
            self.config, train=msgspec.structs.replace(train, max_grad_norm=limit)
        )
        trainer.is_spoiled = step == self.program.skipped
        metrics, _ = trainer.train_step(before_update=before_update)
        record.add_scalar("skipped", metrics.skipped is not None)
        record.add_scalar("learning rate", metrics.lr)
        states = trainer.optimizer.state
        for quantity, moment in MOMENTS.items():
            tensors = {p.name: part_of(p, states[p.local][moment]) for p in trainer.parameters}
            record.add(quantity, tensors)
        record.add_scalar("updates", float(next(iter(states.values()))["step"]))
        record.add("weight", {p.name: part_of(p, p.local) for p in trainer.parameters})
        record.add("correction bias", checkpoint_buffers(trainer.pipeline.modules.values()))

    def close(self) -> None:
        """See :class:`Job`."""
        self.trainer.close()

    def _watch(self, trainer: "_Trainer") -> "_Trainer":
        trainer.batches = WatchedBatches(trainer, self._add_batch)
        # In fp64 a tie within rounding does not come up.
        if self.config.train.dtype != "float64":
            listen_to_choices(trainer, lambda: self._record)
        return trainer

    def _save(self, record: Recorder) -> None:
        """Save, and note down what then is on the disk, however it was cut."""
        path = self.trainer.save()
        if self.trainer.is_main and record.wants("saved"):
            checkpoint = open_checkpoint(path)
            for name, (_, shape, chunks) in checkpoint.manifest.tensors.items():
                for chunk in chunks:
                    values = checkpoint.chunk(name, chunk.offsets)
                    record.add("saved", {name: Part(values, shape, chunk.offsets)})

    def _reload(self) -> None:
        """Go on from a checkpoint with a trainer that has seen nothing else."""
        old = self.trainer
        old.pipeline.close()
        worker = replace(old.worker, run_dir=self._source, data=old.worker.data_dir)
        self.trainer = self._watch(_Trainer(self.config, worker, old.runtime, old.tokenizer))
        self.trainer.resume()

    def _state(self) -> Mapping[str, Tensor | Part]:
        """Everything that a checkpoint has, under its names there."""
        trainer = self.trainer
        states = trainer.optimizer.state
        found: dict[str, Tensor | Part] = {}
        for parameter in trainer.parameters:
            found[f"model.{parameter.name}"] = part_of(parameter, parameter.local)
            for moment in MOMENTS.values():
                tensor = states[parameter.local][moment]
                found[f"optimizer.{moment}.{parameter.name}"] = part_of(parameter, tensor)
        return found | checkpoint_buffers(trainer.pipeline.modules.values())

    def _add_batch(self, share: Share, first: int, kind: Kind) -> None:
        """Note down the tokens and targets that this rank has got of a global batch."""
        name = str(first) if kind else ""
        for quantity, part in parts_of_share(self.trainer, share):
            self._record.add(f"{kind}{quantity}", {name: part}, in_every_step=True)


class _Trainer(Trainer):
    """A trainer one of whose steps can be made to be skipped.

    Attributes:
        is_spoiled: Whether the gradients of the next step are to be infinite.
    """

    is_spoiled = False

    def compute_gradients(self) -> tuple[Losses, float]:
        """See :class:`Trainer`."""
        result = super().compute_gradients()
        if self.is_spoiled:
            for parameter in self.parameters:
                assert parameter.local.grad is not None
                parameter.local.grad.fill_(math.inf)
        return result


class WatchedBatches(Batches):
    """Tells what every cut of a global batch gives.

    Args:
        trainer: Trainer whose batches they are.
        on_cut: Told the share, the first sequence of the batch, and what it is for.
    """

    def __init__(self, trainer: Trainer, on_cut: Callable[[Share, int, Kind], None]) -> None:
        super().__init__(
            trainer.config, trainer.mesh, trainer.pipeline.sequence, device=trainer.device
        )
        self._on_cut = on_cut

    def cut(self, data: Dataset, first: int, *, step: int | None = None) -> Share:
        """See :class:`Batches`."""
        share = super().cut(data, first, step=step)
        self._on_cut(share, first, "eval " if step is None else "")
        return share

    def planned(self, data: Dataset, planned: PlannedStep, *, step: int) -> Share:
        """See :class:`Batches`."""
        share = super().planned(data, planned, step=step)
        self._on_cut(share, planned.pieces[0].sequence, "")
        return share


def parts_of_share(trainer: Trainer, share: Share) -> Iterator[tuple[str, Part]]:
    """Yield "tokens" and "targets" that a rank has got of a global batch, `[B, S]` int64.

    Args:
        trainer: Trainer of the rank.
        share: What it was given.
    """
    whole = trainer.config.train.global_batch_size, trainer.config.data.seq_len
    if share.places:
        yield from _parts_of_plan(trainer, share, whole)
        return
    row = trainer.mesh.dp_index * (whole[0] // trainer.mesh.layout.dp)
    for (tokens,), targets, kwargs in zip(share.args, share.targets, share.kwargs, strict=True):
        positions = kwargs["microbatch"].positions.tolist()
        for begin, end in runs_of(positions):
            for quantity, ids in (("tokens", tokens), ("targets", targets)):
                yield quantity, Part(ids[:, begin:end], whole, (row, positions[begin]))
        row += len(tokens)


def _parts_of_plan(
    trainer: Trainer, share: Share, whole: tuple[int, int]
) -> Iterator[tuple[str, Part]]:
    """The same of a planned step: where its tokens are in the sequences of the data."""
    first, separator = trainer.next_sequence, trainer.data.separator
    for (tokens,), targets, places in zip(share.args, share.targets, share.places, strict=True):
        for row, column, run in runs_in(*places.tolist()):
            for quantity, ids in (("tokens", tokens), ("targets", targets)):
                yield quantity, Part(ids[:, run], whole, (row - first, column))
    # What sequences lack is in no microbatch.
    assert trainer.planned is not None
    assert separator is not None
    for sequence, end in trainer.planned.ends.items():
        for quantity, value in (("tokens", separator), ("targets", -1)):
            nothing = torch.full((1, whole[1] - end), value, dtype=torch.int64)
            if nothing.numel():
                yield quantity, Part(nothing, whole, (sequence - first, end))


def _gradient(parameter: Parameter) -> tuple[str, Part]:
    gradient = parameter.local.grad
    assert gradient is not None, f"{parameter.name} has no gradient"
    return parameter.name, part_of(parameter, gradient)


def part_of(parameter: Parameter, local: Tensor) -> Part:
    """Return what this rank holds of a tensor that is cut as a parameter is."""
    return Part(local, parameter.shape, tuple(start for start, _ in parameter.span))
