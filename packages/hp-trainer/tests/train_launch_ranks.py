"""What ranks do in the tests of the launcher, and the launcher as a program of its own."""

import gc
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hp_base.errors import PREEMPTED, DataError
from hp_platform.launch import INIT_METHOD_VARIABLE
from hp_trainer.config import Config
from hp_trainer.config.options import resolve
from hp_trainer.launch.launcher import run
from hp_trainer.launch.task import Worker
from hp_trainer.training.metrics import Console

STEPS = 100_000


def returns(_config: Config, *, worker: Worker) -> int:
    (worker.run_dir / f"rank-{worker.info.rank}").write_text(str(worker.info.world_size))
    return 0


def shares_cores(_config: Config, *, worker: Worker) -> int:
    policies = {os.sched_getscheduler(int(task.name)) for task in Path("/proc/self/task").iterdir()}
    told = f"{torch.get_num_threads()} {sorted(policies)} {gc.isenabled()}"
    (worker.run_dir / f"rank-{worker.info.rank}").write_text(told)
    return 0


def trains(config: Config, *, worker: Worker) -> int:
    """Step by step with the others until one of them is asked to stop, as the real loop does."""
    _connect(worker)
    for step in range(STEPS):
        _fault(config.run.name, step, worker)
        worker.heartbeats.beat(step=step, phase="forward")
        time.sleep(0.01)
        stop = torch.tensor(float(worker.stop.requested))
        worker.heartbeats.beat(step=step, phase="reduce", waiting=True)
        dist.all_reduce(stop)
        if step == 2 and worker.info.rank == 0:
            _tell_started(worker)
        if stop.item() > 0:
            (worker.run_dir / f"saved-{worker.info.rank}").write_text(str(step))
            dist.destroy_process_group()
            return PREEMPTED
    return 0


def draws_a_bar(config: Config, *, worker: Worker) -> int:
    """Trains behind a console, as the real loop does."""
    Console(enabled=True, total=STEPS, done=0)
    return trains(config, worker=worker)


def trains_in_attempts(config: Config, *, worker: Worker) -> int:
    """A few steps with the fault that the list has for this attempt."""
    _connect(worker)
    attempts = worker.run_dir / "attempts"
    attempt = len(attempts.read_text()) if attempts.exists() else 0
    dist.barrier()
    if worker.info.rank == 0:
        attempts.write_text("x" * (attempt + 1))
    for step in range(5):
        faults = (worker.run_dir.parent / "faults").read_text().split()
        _fault(faults[attempt], step, worker)
        if step == 2 and config.run.name == "saving" and attempt < 3:
            name = f"step-{attempt + 1:08d}"
            (worker.run_dir / "checkpoints" / name).mkdir(parents=True, exist_ok=True)
        worker.heartbeats.beat(step=step, phase="forward")
        worker.heartbeats.beat(step=step, phase="reduce", waiting=True)
        dist.barrier()
    dist.destroy_process_group()
    return 0


def never_saves(_config: Config, *, worker: Worker) -> int:
    _tell_started(worker)
    while True:
        worker.heartbeats.beat(step=7, phase="save")
        time.sleep(0.01)


def leaves_a_thread(config: Config, *, worker: Worker) -> int:
    """Returns, but its process does not end by itself."""
    threading.Thread(target=time.sleep, args=(3600,)).start()
    return returns(config, worker=worker)


def fails_alone(_config: Config, *, worker: Worker) -> int:  # noqa: ARG001
    raise DataError("no text")


def _tell_started(worker: Worker) -> None:
    """Every rank tells; a file of its own, for the first rename takes a shared one away."""
    file = worker.run_dir / f"starting-{worker.info.rank}"
    file.write_text(str(os.getpid()))
    file.rename(worker.run_dir / "started")


def _connect(worker: Worker) -> None:
    where = os.environ.get(INIT_METHOD_VARIABLE)
    rank, size = worker.info.rank, worker.info.world_size
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size)


def _fault(name: str, step: int, worker: Worker) -> None:
    """What the run's name asks for happens to rank 1 at step 3."""
    if worker.info.rank != 1 or step != 3:
        return
    if name == "value-error":
        raise ValueError("the sum of\ntwo lines")
    if name == "data-error":
        raise DataError("corpus.jsonl:3 must be JSON")
    if name == "exit":
        os._exit(9)
    if name == "exit-zero":
        os._exit(0)
    if name.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[name])
    if name == "sleeps":
        time.sleep(3600)


if __name__ == "__main__":
    entry, *options = sys.argv[1:]
    overrides = [tuple(option.split("=", 1)) for option in options]
    sys.exit(run(resolve(None, overrides), _entry=f"train_launch_ranks:{entry}"))  # type: ignore[arg-type]
