"""One rank of a run that is recorded, and the interface of a training job that can be verified."""

import time
from collections.abc import Callable
from typing import Protocol

from hp_base.command_line import say
from hp_train.verify.program import Request, read_request
from hp_trainer.config import Config
from hp_trainer.launch.task import Worker
from hp_trainer.launch.worker import load
from hp_verify.recording.values import ValueRecorder

ENTRY = "hp_train.verify.rank:main"
RECORDING = "recording"
_FORK_SECONDS = 1.0


class Job(Protocol):
    """A training job as one rank of it.

    All ranks build it and call its methods together. What it computes must depend on the config
    and on the number of the step alone, but for the layout.
    """

    def train_step(self, record: ValueRecorder) -> None:
        """Train one step and record it.

        Numbers of the whole step go into ``record.add_scalar("loss", ...)`` and ``"norm"``, this
        rank's parts of gradients and new weights into ``record.add("gradient", {name: ...})`` and
        ``"weight"``, in the order in which they are computed. The caller ends the step.
        """
        ...

    def close(self) -> None:
        """Leave the process groups."""
        ...


Build = Callable[[Config, Worker], Job]
"""Makes the job of a rank: the wiring of a model, in the layout that the config asks for."""


def main(config: Config, *, worker: Worker) -> int:
    """Build the job, train and record; see :class:`Request`."""
    request = read_request(worker.run_dir)
    began = time.monotonic()
    build: Build = load(request.job)
    job = build(config, worker)
    built = time.monotonic()
    record = ValueRecorder(
        worker.run_dir / RECORDING,
        rank=worker.info.rank,
        tensor_steps=frozenset(request.tensor_steps) or None,
    )
    for step in range(request.program.steps):
        job.train_step(record)
        record.end_step()
        if step == 0 and request.num_runs and worker.info.rank == 0:
            _say_how_long(request, built - began, time.monotonic() - built)
    job.close()
    return 0


def _say_how_long(request: Request, build: float, step: float) -> None:
    whole = (_FORK_SECONDS + 2 * build + request.program.steps * step) * request.num_runs
    took = f"{whole:.0f} s" if whole < 100 else f"{whole / 60:.0f} min"
    runs = f"{request.num_runs} run{'s' if request.num_runs > 1 else ''}"
    say(
        f"{step:.1f} s for the first step: {runs} of {request.program.steps} steps will take about "
        f"{took}"
    )
