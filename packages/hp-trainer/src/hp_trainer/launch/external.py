"""One rank of a run whose processes torchrun or Slurm has started.

Signals and deaths are theirs to pass on; the time-out of collectives takes the place of the
launcher's watch for hangs. What torchrun leaves to be done is in `hp_trainer.launch.agent`.

A rank that has made no progress for `launch.hang_seconds` asks all ranks where they stand (Note
[Liveness check] of `hp_platform.failures`), and leaves a report about the one that is gone, or that
waits for nobody, with its Python stack. As after any failure the others stop waiting then and raise
with that report. A rank that cannot, because it is the one that is stuck, is ended from here.
"""

import os
import threading
import time
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined] # exported, but untyped
from torch.distributed.rendezvous import rendezvous

from hp_base.command_line import say, warn
from hp_base.environment import require_meeting_point, slurm_rendezvous
from hp_base.errors import PREEMPTED, ConfigError, HangError
from hp_base.signals import StopFlag
from hp_base.streams import endure
from hp_platform import FailureReport, PeerError, RankInfo, default_note
from hp_platform.failures.failures import WORLD_KEY
from hp_platform.failures.liveness import whom_to_blame
from hp_platform.launch import INIT_METHOD_VARIABLE
from hp_platform.threads import describe_stacks, main_place
from hp_trainer.config.options import Resolved
from hp_trainer.launch.agent import (
    has_agents_store,
    meet,
    when_agent_ends,
    why_no_node_is_replaced,
)
from hp_trainer.launch.heartbeats import Heartbeats
from hp_trainer.launch.last_word import leave_last_word
from hp_trainer.launch.rundir import (
    finished,
    keep_sources,
    make_run_directory,
    open_run_directory,
    say_finished,
    write_config,
)
from hp_trainer.launch.task import ERRORS, Worker, drop_empty, error_file, read_error, stack_file
from hp_trainer.launch.worker import exit_status, one_line, report_stacks, run_guarded

_STORE_TIMEOUT = timedelta(minutes=5)


def run(resolved: Resolved, *, entry: str) -> int:
    """Be one rank in this process.

    Args:
        resolved: Checked config.
        entry: ``module:function`` to call with the config and ``worker=``.

    Returns:
        Exit status. A failure does not return but ends the process with its status: interpreters
        whose peers are gone may wait for them in vain at their end.

    Raises:
        ConfigError: When the environment or the run directory cannot be used.
    """
    endure()
    launch = resolved.config.launch
    is_torchruns = "TORCHELASTIC_RUN_ID" in os.environ
    stop = StopFlag(when_agent_ends(launch.stop_grace_seconds) if is_torchruns else None)
    stop.install()
    info = _place(os.environ)
    store: Store | None = None
    if has_agents_store(os.environ) and info.world_size > 1:
        store, _, _ = next(rendezvous("env://", timeout=_STORE_TIMEOUT))
    run_dir = _run_directory(resolved, info, os.environ, store)
    folder, config = open_run_directory(run_dir), resolved.config
    if done := finished(folder, config, rank=info.rank, world_size=info.world_size):
        return say_finished(folder, config, done) if info.rank == 0 else 0
    if info.rank == 0:
        keep_sources(folder, resolved)
        write_config(folder, resolved)
        if warning := why_no_node_is_replaced(os.environ):
            warn(f"warning: {warning}")
    if store is not None:
        timeout = timedelta(seconds=resolved.config.timeouts.init)
        _served = meet(store, info, os.environ, timeout=timeout)
    worker = Worker(info, run_dir, Heartbeats.unwatched(), stop)
    report_stacks(worker)
    end_when_stuck(worker, hang_seconds=config.timeouts.hang)
    status = run_guarded(entry, config, worker)
    drop_empty(folder, [stack_file(info.rank)])
    if isinstance(status, BaseException):
        _end_failed(worker, status)
    elif info.local_rank == 0:
        _say_where(run_dir, status, info)
    return status


def _place(env: MutableMapping[str, str]) -> RankInfo:
    """Return the rank of this process, and put the meeting point of ranks in the environment.

    Raises:
        ConfigError: When the environment does not hold together.
    """
    try:
        info = RankInfo.from_env(env)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    assert info is not None, "the caller has seen that there is a world"
    if "RANK" not in env:
        env.update(slurm_rendezvous(env))
    elif info.world_size > 1 and not env.get(INIT_METHOD_VARIABLE):
        require_meeting_point(env)
    return info


def _end_failed(worker: Worker, error: BaseException) -> NoReturn:
    """End with one message, which names the rank that failed first, and where."""
    fate, rank = worker.heartbeats.slots()[0], worker.info.rank
    if isinstance(error, PeerError):
        print_report(error.report, rank=rank)
    else:
        line = f"error: rank {rank} failed at {fate.place}: {one_line(error)}"
        warn(line)
        leave_last_word(line)
        if read_error(worker.folder, error_file(rank)):
            warn(f"traceback: {worker.run_dir / ERRORS / error_file(rank)}")
    os._exit(fate.status)


def _say_where(run_dir: Path, status: int, info: RankInfo) -> None:
    if status == PREEMPTED:
        line = f"stopped on request; go on with: hp train --resume {run_dir}"
        if info.rank == 0:
            warn(line)
        leave_last_word(line, is_final=True)
    elif status == 0 and info.rank == 0:
        say(f"{run_dir}")


def _run_directory(
    resolved: Resolved, info: RankInfo, env: Mapping[str, str], store: Store | None
) -> Path:
    """Return the same folder on every rank: named by the config, by Slurm, or by rank 0."""
    run = resolved.config.run
    if run.resume or info.world_size == 1:
        return make_run_directory(resolved)
    base = Path(run.output_dir)
    if run.name:
        run_dir = base / run.name
    elif "RANK" not in env:
        job = f"{env.get('SLURM_JOB_ID', '0')}.{env.get('SLURM_STEP_ID', '0')}"
        run_dir = base / f"{resolved.name}-{job}"
    elif store is not None:
        run_dir = _from_rank_zero(resolved, info, store)
    else:
        raise ConfigError(
            'run.name ("") must be given where ranks are started by hand, so that all have the same'
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f'run.output_dir ("{base}") must be a writable folder: {error.strerror}'
        ) from None
    return run_dir


def _from_rank_zero(resolved: Resolved, info: RankInfo, store: Store) -> Path:
    """Return the folder that rank 0 has made, as torchrun's store keeps it for restarts."""
    key = "hp_train/run_directory"
    if info.rank == 0 and not store.check([key]):
        store.set(key, str(make_run_directory(resolved)))
    return Path(store.get(key).decode())


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
    waits, stack = describe_stacks()
    error = HangError(why)
    if waits:
        return whom_to_blame(error)
    return FailureReport(dist.get_rank(), main_place(), f"HangError: {why}", tuple(stack))


def _end(report: FailureReport, worker: Worker) -> NoReturn:
    time.sleep(_GRACE_SECONDS)
    print_report(report, rank=worker.info.rank)
    os._exit(exit_status(PeerError(str(report), rank=report.rank, report=report)))
