"""Under torchrun and Slurm, where nobody reads heartbeats, each rank looks at its own.

Note [Hangs without a launcher]. A rank that has made no progress for `launch.hang_seconds` asks all
ranks where they stand (Note [Liveness check] of `hp_platform.failures`), and leaves a report about
the one that is gone, or that waits for nobody, with its Python stack. As after any failure the
others stop waiting then and raise with that report. A rank that cannot, because it is the one that
is stuck, is ended from here.
"""

import os
import threading
import time
from typing import NoReturn

import torch.distributed as dist

from hp_base.command_line import warn
from hp_base.errors import HangError
from hp_platform import FailureReport, PeerError, default_note
from hp_platform.failures.failures import WORLD_KEY
from hp_platform.failures.liveness import whom_to_blame
from hp_platform.threads.places import main_place, stand
from hp_trainer.launch.last_word import leave_last_word
from hp_trainer.launch.task import Worker
from hp_trainer.launch.worker import exit_status

_LOOK_SECONDS = 1.0
_GRACE_SECONDS = 10.0  # for this rank to end by itself once a failure is known


def end_when_stuck(worker: Worker, *, hang_seconds: float) -> None:
    """Watch the heartbeats of this rank from a thread, until the process ends.

    Args:
        worker: This process; nothing is looked at before its first heartbeat.
        hang_seconds: How long it may make no progress.
    """
    threading.Thread(
        target=_watch, args=(worker, hang_seconds), name="watch of this rank", daemon=True
    ).start()


def print_report(report: FailureReport, *, rank: int) -> None:
    """Say which rank failed first; rank 0 and the one itself also say where that is stuck."""
    lines = [f"error: {report}"]
    if report.stack and rank in (0, report.rank):
        lines += [f"the Python stack of rank {report.rank}:", *(f"  {s}" for s in report.stack)]
    warn("\n".join(lines))
    leave_last_word(lines[0])


def _watch(worker: Worker, hang_seconds: float) -> None:
    while True:
        time.sleep(_LOOK_SECONDS)
        slot = worker.heartbeats.slots()[0]
        if not slot.sequence or not dist.is_initialized() or dist.get_world_size() == 1:
            continue
        idle = time.monotonic() - slot.beat_at
        note = default_note(WORLD_KEY)
        report = note.read()
        if report is None and idle > hang_seconds:
            report = note.leave(_report(f"no progress for {idle:.0f} s"))
        if report is not None:
            _end(report, worker)


def _report(why: str) -> FailureReport:
    """Say which rank the others wait for."""
    waits, stack = stand()
    error = HangError(why)
    if waits:
        return whom_to_blame(error)
    return FailureReport(dist.get_rank(), main_place(), f"HangError: {why}", tuple(stack))


def _end(report: FailureReport, worker: Worker) -> NoReturn:
    time.sleep(_GRACE_SECONDS)
    print_report(report, rank=worker.info.rank)
    os._exit(exit_status(PeerError(str(report), rank=report.rank, report=report)))
