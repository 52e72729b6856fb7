"""Configs that are started for real, many after each other in the same processes.

A rank that is forked for each config costs more than its step. So the ranks of a batch stay, and
take one config after the other, each with a run directory, process groups and a trainer of its own,
as a run has them. What fails is started once more by itself: only then has it failed.
"""

import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path

import msgspec
import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.tensor  # noqa: F401 - with the two above it, once for all ranks

from hp_platform import failing_together
from hp_platform.launch import INIT_METHOD_VARIABLE
from hp_trainer.config import Config
from hp_trainer.config.options import with_keys
from hp_trainer.launch.launcher import run_entry
from hp_trainer.launch.task import ERRORS, Worker
from hp_trainer.training.train import run, start
from integration_tests.reliability.outcome import output_to

ENTRY = f"{__name__}:rank"
_BATCH = "batch.json"
_STOPPED = 128
_DONE = "done"
_NUMBERS = ("loss", "balance_loss", "prediction_loss", "grad_norm", "eval_loss")


@dataclass(frozen=True)
class Started:
    """What became of a config.

    Attributes:
        problem: What the first rank that failed says; empty: it went well.
        numbers: Losses and gradient norm of each step.
        cpu_seconds: Of all ranks, for this config alone.
        trace: The end of the traceback of that rank.
    """

    problem: str
    numbers: tuple[dict[str, float], ...] = ()
    cpu_seconds: float = 0.0
    trace: str = ""


def start_all(
    configs: Sequence[Config], folder: Path, *, data: Path, confirms: bool = True
) -> Iterator[Started]:
    """Start configs of the same number of ranks; one answer for each, in their order.

    Args:
        configs: They need not keep the rules.
        folder: An empty folder, which is empty again at the end.
        data: Text to train on.
        confirms: Whether what fails is started once more by itself, and counts by that.
    """
    text = {"data.paths": (str(data),)}
    left = [with_keys(config, text) for config in configs]
    while left:
        found, failure = _start_batch(left, folder)
        if failure is not None and confirms and len(left) > 1:
            again, failure = _start_batch(left[len(found) : len(found) + 1], folder)
            found += again
        if failure is not None:
            found.append(failure)
        yield from found
        left = left[len(found) :]


def _start_batch(configs: Sequence[Config], folder: Path) -> tuple[list[Started], Started | None]:
    """Start configs until one fails: those before it, and it."""
    run_dir = folder / "batch"
    run_dir.mkdir()
    (run_dir / _BATCH).write_bytes(msgspec.json.encode(configs))
    output = folder / "output.txt"
    try:
        with output_to(output):
            status = run_entry(configs[0], run_dir, entry=ENTRY)
        if status > _STOPPED:  # somebody wants all of this to end
            sys.exit(status)
        told = (_told(run_dir / str(number), config) for number, config in enumerate(configs))
        found = [each for each in takewhile(bool, told) if each is not None]
        return found, _failure(run_dir, output, status) if len(found) < len(configs) else None
    finally:
        shutil.rmtree(run_dir)
        output.unlink(missing_ok=True)


def _told(folder: Path, config: Config) -> Started | None:
    """What the ranks of a config have left; None: not all of them came to the end."""
    files = [folder / f"{_DONE}-{rank}" for rank in range(config.world_size)]
    if not all(file.exists() for file in files):
        return None
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = tuple(
        {name: row[name] for name in _NUMBERS if row.get(name) is not None}
        for row in map(json.loads, lines)
    )
    return Started("", steps, sum(float(file.read_text()) for file in files))


def _failure(run_dir: Path, output: Path, status: int) -> Started:
    """What ranks say of their end, the first cause first; what the launcher says if none does."""
    traces = [path.read_text() for path in sorted((run_dir / ERRORS).glob("rank-*[0-9].txt"))]
    traces.sort(key=lambda text: "began on rank" in text.partition("\n")[0])
    told = traces[0].partition("\n")[0] if traces else output.read_text()[-500:]
    return Started(f"status {status}: {told}", trace="".join(traces[:1])[-6000:])


def rank(_first: Config, *, worker: Worker) -> int:
    """Train each config of a batch from its start to its end."""
    batch = msgspec.json.decode((worker.run_dir / _BATCH).read_bytes(), type=list[Config])
    _silence(worker.run_dir)
    for number, each in enumerate(batch):
        gc.freeze()  # a trainer looks through all that is not, at its start and its end
        folder = worker.run_dir / str(number)
        folder.mkdir(exist_ok=True)
        os.environ[INIT_METHOD_VARIABLE] = f"file://{folder}/meeting"
        tokens = worker.run_dir / f"tokens-{each.data.eval_fraction}"
        tokens.mkdir(exist_ok=True)
        own = replace(worker, run_dir=folder, data=tokens)
        began = time.process_time()
        with failing_together(everything=True):
            trainer = start(each, own)
            run(trainer)
            trainer.close()
        (folder / f"{_DONE}-{worker.info.rank}").write_text(str(time.process_time() - began))
    return 0


def _silence(folder: Path) -> None:
    """Send what ranks print to a file: it is that of a run, and there are many runs."""
    file = os.open(folder / "printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
