"""One rank of a run that is recorded."""

import time

from hp_base.command_line import say
from hp_train.verify.job import Build
from hp_train.verify.program import Request, read_request
from hp_train.verify.recording import Recorder
from hp_train.verify.watched import TrainerJob
from hp_trainer.config import Config
from hp_trainer.launch.task import Worker
from hp_trainer.launch.worker import load

ENTRY = "hp_train.verify.rank:main"
TRAINER = f"{TrainerJob.__module__}:{TrainerJob.__qualname__}"
RECORDING = "recording"
_FORK_SECONDS = 1.0


def main(config: Config, *, worker: Worker) -> int:
    """Build the job, train and record; see :class:`Request`."""
    request = read_request(worker.run_dir)
    began = time.monotonic()
    build: Build = load(request.job)
    job = build(config, worker)
    built = time.monotonic()
    record = Recorder(
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
