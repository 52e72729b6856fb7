"""hp-train's own trainer, recorded: it says itself where its parameters lie and what a step is.

Outputs of its modules are not recorded: a pipeline calls parts of the model, in the order of its
schedule. `hp verify CONFIG` compares more of it, among that what is saved and loaded.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from hp_base.dtypes import dtype_name
from hp_train.verify.recording import Part, parts_of
from hp_train.verify.watched import MOMENTS, WatchedBatches, part_of, parts_of_share
from hp_trainer.training.batches import Share
from hp_trainer.training.state import checkpoint_buffers
from hp_trainer.training.train import Losses, Trainer
from hp_verify.recording import events as ev
from hp_verify.recording.digests import digest_of
from hp_verify.recording.notes import log_of
from hp_verify.recording.request import Request

_LOSSES = {"tokens": "loss", "balance": "balance loss", "prediction": "prediction loss"}


def listen(module: ModuleType, request: Request) -> None:
    """Record every trainer of this process from now on.

    Args:
        module: `hp_trainer.training.train`, which has just been imported.
        request: What is asked of the job.
    """
    of_trainer = functools.cache(lambda trainer: TrainerRecorder(trainer, request))
    trainer_class: type[Trainer] = module.Trainer
    train_step, evaluate = trainer_class._train_step, trainer_class._evaluate  # noqa: SLF001

    def recorded_step(self: Trainer, before_update: Callable[[Losses, float], None] | None) -> Any:
        return of_trainer(self).train_step(functools.partial(train_step, self), before_update)

    def recorded_evaluation(self: Trainer) -> float | None:
        return of_trainer(self).evaluate(functools.partial(evaluate, self))

    trainer_class._train_step = recorded_step  # type: ignore[method-assign] # noqa: SLF001
    trainer_class._evaluate = recorded_evaluation  # type: ignore[method-assign] # noqa: SLF001


class TrainerRecorder:
    """Records one rank of a run of `hp_trainer`.

    Args:
        trainer: Its trainer, before its first step of this process.
        request: What is asked of it.
    """

    def __init__(self, trainer: Trainer, request: Request) -> None:
        self._trainer, self._request = trainer, request
        ranks = trainer.runtime.info.world_size
        self._log = log_of(Path(request.folder), trainer.mesh.rank, ranks)
        self._step = trainer.step + 1
        trainer.optimizer.register_step_pre_hook(self._before_update)
        trainer.batches = WatchedBatches(trainer, self._batch)
        if trainer.step == 0:
            self._weights(ev.START)
        self._log.flush()

    def train_step(
        self,
        train: Callable[[Callable[[Losses, float], None]], tuple[Any, bool]],
        before_update: Callable[[Losses, float], None] | None,
    ) -> tuple[Any, bool]:
        """Train for one step.

        Args:
            train: Does so.
            before_update: What the caller has to do before the update.
        """
        trainer = self._trainer
        self._step = trainer.step + 1

        def gradients(losses: Losses, norm: float) -> None:
            self._gradients(ev.GRADIENT)
            self._add(ev.Number(self._step, ev.NORM, "", norm))
            if before_update is not None:
                before_update(losses, norm)

        metrics, stops = train(gradients)
        losses = metrics.loss, metrics.balance_loss, metrics.prediction_loss or 0.0
        for name, loss in zip(_LOSSES.values(), losses, strict=True):
            self._scalar(ev.FORWARD, name, loss)
        self._scalar(ev.FORWARD, "skipped", float(metrics.skipped is not None))
        self._weights(ev.WEIGHT)
        for key in MOMENTS.values():
            for parameter in trainer.parameters:
                moment = trainer.optimizer.state[parameter.local][key]
                self._tensor(f"{ev.MOMENT} {key}", parameter.name, part_of(parameter, moment))
        updates = next(iter(trainer.optimizer.state.values()))["step"]
        self._scalar(f"{ev.MOMENT} step", "", float(updates))
        self._log.flush()
        return metrics, stops

    def evaluate(self, run: Callable[[], float | None]) -> float | None:
        """Evaluate, which is part of the step that comes next."""
        self._step = self._trainer.step + 1
        loss = run()
        if loss is not None:
            self._scalar(ev.EVALUATION, "loss", loss)
        self._log.flush()
        return loss

    def _batch(self, share: Share, first: int, kind: str) -> None:
        """Note down the tokens and targets that this rank has of a global batch."""
        phase, which = (ev.EVALUATION, f" {first}") if kind else (ev.INPUT, "")
        for name, part in parts_of_share(self._trainer, share):
            self._tensor(phase, f"{name}{which}", replace(part, local=part.local.double()))

    def _before_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._gradients(ev.CLIPPED)
        for index, group in enumerate(optimizer.param_groups):
            self._add(ev.Number(self._step, ev.RATE, f"group {index}", float(group["lr"])))

    def _gradients(self, phase: str) -> None:
        for parameter in self._trainer.parameters:
            if parameter.local.grad is not None:
                self._tensor(phase, parameter.name, part_of(parameter, parameter.local.grad))

    def _weights(self, phase: str) -> None:
        """Note down parameters, and buffers that a checkpoint has."""
        for parameter in self._trainer.parameters:
            self._tensor(phase, parameter.name, part_of(parameter, parameter.local))
        for name, buffer in checkpoint_buffers(self._trainer.pipeline.modules.values()).items():
            for part in parts_of(buffer):
                self._tensor(phase, name.removeprefix("model."), part)

    def _scalar(self, phase: str, name: str, value: float) -> None:
        if math.isfinite(value):
            dtype = getattr(torch, self._trainer.config.train.dtype)
            part = Part(torch.tensor(value, dtype=torch.float64), (), ())
            self._tensor(phase, name, part, dtype)

    def _tensor(self, phase: str, name: str, part: Part, dtype: torch.dtype | None = None) -> None:
        """Note down what is here of a tensor; `dtype`: what its values were computed in."""
        if part.local.numel():
            kind = dtype_name(dtype or part.local.dtype)
            ends = zip(part.offset, part.local.shape, strict=True)
            pieces = digest_of(part.local, tuple((o, o + n) for o, n in ends)).pieces()
            self._add(ev.Event(self._step, phase, name, part.shape, kind, pieces))

    def _add(self, line: ev.Event | ev.Number) -> None:
        last = self._request.steps
        is_late = isinstance(line, ev.Event) and line.phase == ev.EVALUATION
        if line.step <= last + is_late:
            self._log.add(line)
