"""One rank of a run whose processes torchrun or Slurm has started.

Signals and deaths are theirs to pass on; the time-out of collectives takes the place of the
launcher's watch for hangs. What torchrun leaves to be done is in `hp_trainer.launch.agent`.
"""

import os
from collections.abc import Mapping, MutableMapping
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch.distributed import Store  # type: ignore[attr-defined] # exported, but untyped
from torch.distributed.rendezvous import rendezvous

from hp_base.command_line import say, warn
from hp_base.environment import require_meeting_point, slurm_rendezvous
from hp_base.errors import PREEMPTED, ConfigError
from hp_base.signals import StopFlag
from hp_base.streams import endure
from hp_platform import PeerError, RankInfo
from hp_platform.launch import INIT_METHOD_VARIABLE
from hp_trainer.config.options import Resolved
from hp_trainer.config.timeouts import Timeouts
from hp_trainer.launch.agent import (
    has_agents_store,
    meet,
    when_agent_ends,
    why_no_node_is_replaced,
)
from hp_trainer.launch.hangs import end_when_stuck, print_report
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
from hp_trainer.launch.worker import one_line, report_stacks, run_guarded

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
        timeout = timedelta(seconds=Timeouts.of(resolved.config).init)
        _served = meet(store, info, os.environ, timeout=timeout)
    worker = Worker(info, run_dir, Heartbeats.unwatched(), stop)
    report_stacks(worker)
    end_when_stuck(worker, hang_seconds=Timeouts.of(config).hang)
    status = run_guarded(entry, config, worker)
    drop_empty(folder, [stack_file(info.rank)])
    if isinstance(status, BaseException):
        _end_failed(worker, status)
    elif info.local_rank == 0:
        _say_where(run_dir, status, info)
    return status


def _place(env: MutableMapping[str, str]) -> RankInfo:
    """The place of this process; where ranks meet is in the environment from then on.

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
    """The same folder on every rank: named by the config, by Slurm, or by rank 0."""
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
    """The folder that rank 0 makes at the first start and torchrun's store keeps for restarts."""
    key = "hp_train/run_directory"
    if info.rank == 0 and not store.check([key]):
        store.set(key, str(make_run_directory(resolved)))
    return Path(store.get(key).decode())
