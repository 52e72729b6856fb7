"""hp-train's own trainer, noted down: what it is given, computes, saves and loads.

`TrainerJob` is its job of `hp verify CONFIG`, which records values. As a job of `hp-verify -- JOB`
it is recorded by digests (`listen`): it says itself where its parameters lie and what a step is.
Outputs of its modules are not recorded, as a pipeline calls parts of the model in the order of its
schedule.
"""

import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hp_base.runs import runs_in, runs_of
from hp_checkpoint import open_checkpoint
from hp_data.dataset import Dataset
from hp_expert import MoE, Routing
from hp_train.verify.program import read_request
from hp_train.verify.rank import Job
from hp_trainer.config import Config
from hp_trainer.launch.task import Worker
from hp_trainer.model import DropoutKey, Microbatch
from hp_trainer.model.block import Block
from hp_trainer.model.parameters import Parameter
from hp_trainer.training.batches import Batches, PlannedStep, Share
from hp_trainer.training.gradients import Losses
from hp_trainer.training.metrics import StepMetrics
from hp_trainer.training.startup import connect, prepare_data
from hp_trainer.training.trainer import Trainer
from hp_verify.comparing.ties import CHOICES, SCORES
from hp_verify.recording import events as ev
from hp_verify.recording.notes import DigestRecorder
from hp_verify.recording.request import Request
from hp_verify.recording.values import Part, StepRecorder, ValueRecorder

MOMENTS = {"first moment": "exp_avg", "second moment": "exp_avg_sq"}
_ALL_MOMENTS = MOMENTS | {"momentum": "momentum_buffer"}  # the last of matrices of Muon
_PHASES = {
    "first weight": (ev.START, ""),
    "tokens": (ev.INPUT, "tokens"),
    "targets": (ev.INPUT, "targets"),
    "eval tokens": (ev.EVALUATION, "tokens "),
    "eval targets": (ev.EVALUATION, "targets "),
    "eval loss": (ev.EVALUATION, "loss"),
    **{name: (ev.FORWARD, name) for name in ("loss", "balance loss", "prediction loss", "skipped")},
    "gradient": (ev.GRADIENT, ""),
    "norm": (ev.NORM, ""),
    "clipped gradient": (ev.CLIPPED, ""),
    **{quantity: (f"{ev.MOMENT} {key}", "") for quantity, key in _ALL_MOMENTS.items()},
    "updates": (f"{ev.MOMENT} step", ""),
    "weight": (ev.WEIGHT, ""),
    "correction bias": (ev.WEIGHT, ""),
}
"""Quantity -> its phase among digests, and how names begin there."""


class TrainerNotes:
    """Notes down what a trainer is given and computes.

    Args:
        trainer: The trainer, before its first step.
        record: Gives the recorder of the step that is under way.
    """

    def __init__(self, trainer: Trainer, record: Callable[[], StepRecorder]) -> None:
        self._trainer, self._record = trainer, record
        trainer.batches = _WatchedBatches(trainer, self._batch)

    def before_update(self, losses: Losses, norm: float) -> None:
        """Note down losses and gradients, which are summed and not yet clipped."""
        record = self._record()
        self._losses(losses)
        record.add("gradient", self.gradients())
        record.add_scalar("norm", norm)

    def after_step(self, metrics: StepMetrics) -> None:
        """Note down what a step has made of weights and moments."""
        record, trainer = self._record(), self._trainer
        if metrics.skipped is not None:
            losses = metrics.loss, metrics.balance_loss, metrics.prediction_loss or 0.0
            self._losses(Losses(*losses))
        record.add_scalar("skipped", metrics.skipped is not None)
        record.add_scalar("learning rate", metrics.lr)
        for quantity, moment in _ALL_MOMENTS.items():
            if parts := self.moments(moment):
                record.add(quantity, parts)
        states = trainer.optimizer.state.values()
        record.add_scalar("updates", float(next(s["step"] for s in states if "step" in s)))
        record.add("weight", self.weights())
        record.add("correction bias", self.buffers())

    def evaluated(self, loss: float | None) -> None:
        """Note down the loss of an evaluation."""
        self._record().add_scalar("eval loss", math.nan if loss is None else loss)

    def weights(self) -> dict[str, Part]:
        """Return this rank's parts of the parameters, by name."""
        return {p.name: part_of(p, p.local) for p in self._trainer.parameters}

    def gradients(self) -> dict[str, Part]:
        """Return this rank's parts of gradients, in the order of the backward."""
        gradients = ((p, p.local.grad) for p in reversed(self._trainer.parameters))
        return {p.name: part_of(p, grad) for p, grad in gradients if grad is not None}

    def moments(self, moment: str) -> dict[str, Part]:
        """Return this rank's parts of a moment of the optimizer, of parameters that have it."""
        states = self._trainer.optimizer.state
        having = [p for p in self._trainer.parameters if moment in states[p.local]]
        return {p.name: part_of(p, states[p.local][moment]) for p in having}

    def buffers(self) -> dict[str, Tensor]:
        """Return buffers that a checkpoint has, named as parameters are."""
        stages = self._trainer.pipeline.modules.values()
        return {name: buffer for stage in stages for name, buffer in stage.kept_buffers.items()}

    def state(self) -> Mapping[str, Tensor | Part]:
        """Return everything that a checkpoint has, under its names there."""
        found = {f"model.{name}": part for name, part in self.weights().items()}
        for moment in _ALL_MOMENTS.values():
            parts = self.moments(moment)
            found |= {f"optimizer.{moment}.{name}": part for name, part in parts.items()}
        return found | {f"model.{name}": buffer for name, buffer in self.buffers().items()}

    def _losses(self, losses: Losses) -> None:
        record = self._record()
        record.add_scalar("loss", losses.tokens)
        record.add_scalar("balance loss", losses.balance)
        record.add_scalar("prediction loss", losses.prediction)

    def _batch(self, share: Share, name: str, kind: str) -> None:
        """Note down the tokens and targets that this rank has got of a global batch."""
        for quantity, part in parts_of_share(self._trainer, share):
            self._record().add(f"{kind}{quantity}", {name: part}, in_every_step=True)


class _WatchedBatches(Batches):
    """Tells what every cut of a global batch gives.

    Args:
        trainer: Trainer whose batches they are.
        on_cut: Told the share, its name among those of a step, and what its quantities begin with.
    """

    def __init__(self, trainer: Trainer, on_cut: Callable[[Share, str, str], None]) -> None:
        super().__init__(
            trainer.config, trainer.mesh, trainer.pipeline.sequence, device=trainer.device
        )
        self._on_cut = on_cut

    def cut(self, data: Dataset, first: int, *, step: int | None = None) -> Share:
        """See :class:`Batches`."""
        share = super().cut(data, first, step=step)
        self._on_cut(share, *((str(first), "eval ") if step is None else ("", "")))
        return share

    def planned(self, data: Dataset, planned: PlannedStep, *, step: int) -> Share:
        """See :class:`Batches`."""
        share = super().planned(data, planned, step=step)
        self._on_cut(share, "", "")
        return share


def parts_of_share(trainer: Trainer, share: Share) -> Iterator[tuple[str, Part]]:
    """Yield "tokens" and "targets" that a rank has got of a global batch, `[B, S]` int64.

    Args:
        trainer: Trainer of the rank.
        share: The rank's share of the batch.
    """
    whole = trainer.config.train.global_batch_size, trainer.config.data.seq_len
    row = trainer.mesh.dp_index * (whole[0] // trainer.mesh.layout.dp)
    first, separator = trainer.next_sequence, trainer.data.separator
    for index, ((tokens,), targets) in enumerate(zip(share.args, share.targets, strict=True)):
        if share.places:  # of a planned step: where its tokens are in the sequences of the data
            runs = [
                (sequence - first, column, (slice(None), run))
                for sequence, column, run in runs_in(*share.places[index].tolist())
            ]
        else:
            positions = share.kwargs[index]["microbatch"].positions.tolist()
            runs = [
                (row, positions[begin], (slice(None), slice(begin, end)))
                for begin, end in runs_of(positions)
            ]
            row += len(tokens)
        for start, column, run in runs:
            for quantity, ids in (("tokens", tokens), ("targets", targets)):
                yield quantity, Part(ids[run], whole, (start, column))
    for sequence, end in _ends(trainer) if share.places else ():
        assert separator is not None
        for quantity, value in (("tokens", separator), ("targets", -1)):
            nothing = torch.full((1, whole[1] - end), value, dtype=torch.int64)
            yield quantity, Part(nothing, whole, (sequence, end))


def _ends(trainer: Trainer) -> Iterator[tuple[int, int]]:
    """Yield sequences of a planned step that end early: the rest of them is in no microbatch."""
    for sequence, end in {} if trainer.planned is None else trainer.planned.ends.items():
        if end < trainer.config.data.seq_len:
            yield sequence - trainer.next_sequence, end


def part_of(parameter: Parameter, local: Tensor) -> Part:
    """Return what this rank holds of a tensor that is cut as a parameter is."""
    return Part(local, parameter.shape, tuple(start for start, _ in parameter.span))


def listen_to_choices(trainer: Trainer, record: Callable[[], StepRecorder]) -> None:
    """Have every layer of experts tell which ones it chose, for each sequence of a step.

    Args:
        trainer: Trainer of these layers.
        record: Gives the recorder of the step that is under way.
    """
    current = threading.local()

    def enter(_block: nn.Module, _args: object, kwargs: dict[str, Microbatch]) -> None:
        current.places = kwargs["microbatch"].key

    def leave(name: str, moe: MoE, _args: object, result: tuple[Tensor, Routing]) -> None:
        places = getattr(current, "places", None)
        if places is not None:
            _add_choices(record(), trainer, (name, moe, result[1]), places)

    for stage in trainer.pipeline.modules.values():
        for name, module in stage.named_modules():
            if isinstance(module, Block):
                module.register_forward_pre_hook(enter, with_kwargs=True)
            if isinstance(module, MoE):
                module.register_forward_hook(functools.partial(leave, name))


def _add_choices(
    record: StepRecorder, trainer: Trainer, layer: tuple[str, MoE, Routing], key: DropoutKey
) -> None:
    name, moe, routing = layer
    bias = moe.router.correction_bias
    scores = routing.scores.detach() if bias is None else routing.scores.detach() + bias
    batch, length = trainer.config.train.global_batch_size, trainer.config.data.seq_len
    index, positions = key.sequence_index, key.positions.tolist()
    of_rows = index if index.ndim == 2 else index[:, None].expand(-1, len(positions))
    for quantity, rows in ((CHOICES, routing.chosen), (SCORES, scores)):
        width = rows.shape[-1]
        for sequences, row in zip(of_rows, rows.view(*of_rows.shape, width), strict=True):
            for sequence, first, run in runs_in(sequences.tolist(), positions):
                offset = (sequence - trainer.next_sequence, first, 0)
                record.add(quantity, {name: Part(row[None, run], (batch, length, width), offset)})
        for sequence, end in _ends(trainer):
            nothing = rows.new_full((1, length - end, width), -1)
            record.add(quantity, {name: Part(nothing, (batch, length, width), (sequence, end, 0))})


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
        self._record: ValueRecorder
        self.config = config
        self.trainer = self._watch(_Trainer(config, worker, runtime, tokenizer))

    def train_step(self, record: ValueRecorder) -> None:
        """See :class:`Job`."""
        self._record = record
        step = self.trainer.step + 1
        if step == 1:
            record.add("start", self._notes.state())
            record.add_scalar("separator", -1 if (s := self.trainer.data.separator) is None else s)
        if step == self.program.reload_after + 1 > 1:
            self._reload()
            record.add("loaded", self._notes.state())
        record.add_scalar("first sequence", self.trainer.next_sequence)
        self._train(step)
        if step in self.program.evaluated:
            self._notes.evaluated(self.trainer.evaluate())
        if step == self.program.reload_after:
            self._save(record)

    def _train(self, step: int) -> None:
        trainer, train = self.trainer, self.config.train
        limit = self.program.largest_norm(step, train.max_grad_norm)
        trainer.config = msgspec.structs.replace(
            self.config, train=msgspec.structs.replace(train, max_grad_norm=limit)
        )
        trainer.is_spoiled = step == self.program.skipped
        metrics, _ = trainer.train_step(before_update=self._notes.before_update)
        self._notes.after_step(metrics)

    def close(self) -> None:
        """See :class:`Job`."""
        self.trainer.close()

    def _watch(self, trainer: "_Trainer") -> "_Trainer":
        self._notes = TrainerNotes(trainer, lambda: self._record)
        # In fp64 a tie within rounding does not come up.
        if self.config.train.dtype != "float64":
            listen_to_choices(trainer, lambda: self._record)
        return trainer

    def _save(self, record: ValueRecorder) -> None:
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


class _Trainer(Trainer):
    """A trainer one of whose steps can be made to be skipped.

    Attributes:
        is_spoiled: Whether the gradients of the next step are to be infinite.
    """

    is_spoiled = False

    def compute_gradients(self) -> tuple[Losses, float]:
        """See :class:`Trainer`."""
        result = super().compute_gradients()
        for parameter in self.parameters:
            assert parameter.local.grad is not None, f"{parameter.name} has no gradient"
            if self.is_spoiled:
                parameter.local.grad.fill_(math.inf)
        return result


def listen(module: ModuleType, request: Request) -> None:
    """Record every trainer of this process from now on, as a job of `hp-verify -- JOB`.

    Args:
        module: `hp_trainer.training.trainer`, which has just been imported.
        request: Request to the job.
    """
    recorded = functools.cache(lambda trainer: _start(trainer, request))
    trainer_class: type[Trainer] = module.Trainer
    train_step, evaluate = trainer_class._train_step, trainer_class._evaluate  # noqa: SLF001

    def recorded_step(
        self: Trainer, before_update: Callable[[Losses, float], None] | None
    ) -> tuple[StepMetrics, bool]:
        record, notes = recorded(self)
        record.step = self.step + 1

        def before(losses: Losses, norm: float) -> None:
            notes.before_update(losses, norm)
            if before_update is not None:
                before_update(losses, norm)

        metrics, stops = train_step(self, before)
        notes.after_step(metrics)
        record.end_step()
        return metrics, stops

    def recorded_evaluation(self: Trainer) -> float | None:
        record, notes = recorded(self)
        record.step = self.step + 1  # it is part of the step that comes next
        loss = evaluate(self)
        notes.evaluated(loss)
        record.end_step()
        return loss

    trainer_class._train_step = recorded_step  # type: ignore[method-assign] # noqa: SLF001
    trainer_class._evaluate = recorded_evaluation  # type: ignore[method-assign] # noqa: SLF001


def _start(trainer: Trainer, request: Request) -> tuple[DigestRecorder, TrainerNotes]:
    """Begin the recording of a trainer before its first step of this process."""
    rank, ranks = trainer.mesh.rank, trainer.runtime.info.world_size
    dtype = trainer.config.train.dtype
    record = DigestRecorder(request, rank, ranks, phases=_PHASES, dtype=dtype)
    notes = TrainerNotes(trainer, lambda: record)
    if trainer.step == 0:
        record.add("first weight", {**notes.weights(), **notes.buffers()})
    record.end_step()

    def before_update(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        record.add("clipped gradient", notes.gradients())
        for index, group in enumerate(optimizer.param_groups):
            record.number(ev.RATE, f"group {index}", float(group["lr"]))

    trainer.optimizer.register_step_pre_hook(before_update)
    return record, notes
