"""hp-train's own trainer as a job of `hp-verify -- JOB`: eight steps in two launches, with a bug.

Which bug a run has, its name says: those of `integration_tests.jobs.verify_faults`, and `MORE`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch._dynamo  # once, in the server that ranks are forked from

import hp_trainer.training.trainer
from hp_platform import failing_together
from hp_train.verify.program import Program
from hp_trainer.training.train import start
from hp_trainer.training.trainer import Trainer
from integration_tests.jobs.verify_faults import FAULTS, MATRIX, Fault, after_call, named, wrap

if TYPE_CHECKING:
    from hp_trainer.config import Config
    from hp_trainer.launch.task import Worker

PROGRAM = Program(steps=8)
DATA, SHARDED = "mesh.dp_replicate=2 mesh.ep=2", "mesh.dp_shard=2"


def _weights_are_not_loaded(trainer: Trainer) -> None:
    def then() -> None:
        with torch.no_grad():
            named(trainer, MATRIX).local.mul_(1 + 1e-9)

    after_call(trainer, "resume", then)


def _rate_begins_anew(trainer: Trainer) -> None:
    def make(original: Any) -> Any:
        return lambda step, train: original(step - 4 if step >= 4 else step, train)

    del trainer
    wrap(hp_trainer.training.trainer, "learning_rate", make)


def _last_update_is_lost(trainer: Trainer) -> None:
    def then() -> None:
        if trainer.step == PROGRAM.steps - 1:
            with torch.no_grad():
                named(trainer, MATRIX).local.mul_(1 + 1e-9)

    after_call(trainer.optimizer, "step", then)


MORE = {
    "a_weight_is_off_after_a_load": Fault(SHARDED, "step 5, ", _weights_are_not_loaded),
    "the_rate_begins_anew_after_a_load": Fault(DATA, "step 5, learning rate", _rate_begins_anew),
    "the_last_update_is_wrong": Fault(DATA, f"step 8, weight {MATRIX}", _last_update_is_lost),
}


def work(config: Config, *, worker: Worker) -> int:
    """Train as one rank, from the beginning to the middle or from there to the end."""
    with failing_together(everything=True):
        trainer = start(config, worker)
        if config.run.name:
            (FAULTS | MORE)[config.run.name].apply(trainer)
        _spoil_one_step(trainer)
        if (trainer.worker.run_dir / "checkpoints").exists():
            trainer.resume()
        last = PROGRAM.steps if trainer.step else PROGRAM.reload_after
        train = config.train
        while trainer.step < last:
            limit = PROGRAM.largest_norm(trainer.step + 1, train.max_grad_norm)
            trainer.config = msgspec.structs.replace(
                trainer.config, train=msgspec.structs.replace(train, max_grad_norm=limit)
            )
            trainer.train_step()
            if trainer.step in PROGRAM.evaluated:
                trainer.evaluate()
        trainer.save()
        trainer.close()
    return 0


def _spoil_one_step(trainer: Trainer) -> None:
    """Make the gradients of one step infinite, so that it is skipped."""

    def make(original: Any) -> Any:
        def compute() -> Any:
            result = original()
            if trainer.step + 1 == PROGRAM.skipped:
                for parameter in trainer.parameters:
                    assert parameter.local.grad is not None
                    parameter.local.grad.fill_(math.inf)
            return result

        return compute

    wrap(trainer, "compute_gradients", make)
