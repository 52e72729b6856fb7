"""A process of a run before and after training: its rank, its stop flag, its exit status."""

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from typing import IO, Any

import torch

from hp_base.environment import usable_cores
from hp_base.errors import HangError, HpError, RankLostError, RunDirectoryError
from hp_base.session import die_with
from hp_base.signals import StopFlag
from hp_platform import PeerError, RankInfo, is_echo
from hp_platform.failures.liveness import is_hang, is_loss
from hp_platform.launch import schedule_as_batch
from hp_trainer.config import Config
from hp_trainer.launch.heartbeats import Heartbeats, State
from hp_trainer.launch.task import ERRORS, Task, Worker, error_file, stack_file

_HOLD_SECONDS = 10.0


def work(task: Task) -> int:
    """Be one rank, in a process that the launcher has started.

    Returns:
        Exit status of the rank. After a failure the process waits for the launcher to end it, so
        that the launcher finds one cause and not the crashes that follow from it.
    """
    die_with(task.launcher_pid)
    info = RankInfo.from_env()
    assert info is not None, "the launcher sets RANK"
    try:
        heartbeats = Heartbeats.attach(task.heartbeats, rank=info.local_rank)
    except RunDirectoryError as error:
        os._exit(error.exit_code)  # the launcher looks at the directory as well, and says so
    stop = StopFlag(passed_on=heartbeats.stop_requested)
    stop.install()
    heartbeats.tell(State.RUNNING)
    worker = Worker(info, task.run_dir, heartbeats, stop, task.data)
    report_stacks(worker)
    status = run_guarded(task.entry, task.config, worker)
    if isinstance(status, BaseException):
        time.sleep(_HOLD_SECONDS)
        os._exit(1)
    return status


def run_guarded(entry: str, config: Config, worker: Worker) -> int | BaseException:
    """Call the entry and tell the launcher how it ended.

    Returns:
        Exit status; or the failure, which is told with the heartbeats and in the error file.
    """
    try:
        set_threads(config, worker.info.local_world_size)
        status: int = load(entry)(config, worker=worker)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the launcher must know
        if isinstance(error, SystemExit) and error.code in (None, 0):
            status = 0
        else:
            write_error(worker, error)
            sys.stdout.flush()
            worker.heartbeats.tell(State.FAILED, status=exit_status(error), is_echo=is_echo(error))
            return error
    sys.stdout.flush()
    worker.heartbeats.tell(State.RETURNED, status=status)
    return status


def exit_status(error: BaseException) -> int:
    """Return the exit status of a process that ends with this error."""
    if isinstance(error, HpError):
        return error.exit_code
    if isinstance(error, PeerError) and is_loss(error.report):
        return RankLostError.exit_code
    if isinstance(error, PeerError) and is_hang(error.report):
        return HangError.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    return 1


def one_line(error: BaseException) -> str:
    """Return the error as a sentence: its message and, unless made for people, its kind."""
    text = " ".join("; ".join((str(error), *getattr(error, "__notes__", ()))).split())
    if len(text) > 500:
        text = text[:497] + "..."
    name = type(error).__name__
    return (
        text
        if isinstance(error, HpError | PeerError) and text
        else f"{name}: {text}"
        if text
        else name
    )


def write_error(worker: Worker, error: BaseException) -> None:
    """Write one line and the traceback; a full disk must not hide the error."""
    trace = "".join(traceback.format_exception(error))
    text = f"{one_line(error)}\n\n{trace}"
    try:
        with worker.folder.sub(ERRORS, make=True) as errors:
            errors.replace(error_file(worker.info.rank), text.encode(errors="replace"))
    except RunDirectoryError:
        if not isinstance(error, RunDirectoryError):  # of which the launcher tells as much
            sys.stderr.write(trace)


def set_threads(config: Config, local_world_size: int) -> None:
    """Give torch this process's share of the cores, and let ranks without a GPU share them well."""
    cores = usable_cores()
    torch.set_num_threads(
        config.launch.threads_per_process or max(1, cores // max(1, local_world_size))
    )
    if not torch.cuda.is_available():  # before an entry of somebody else's makes groups by itself
        schedule_as_batch()


def report_stacks(worker: Worker) -> None:
    """Write all Python stacks to a file on SIGUSR2, and when this process crashes."""
    stream: IO[Any] = sys.stderr  # where there is no place for the file, on a full disk for example
    with contextlib.suppress(RunDirectoryError), worker.folder.sub(ERRORS, make=True) as errors:
        stream = errors.fresh(stack_file(worker.info.rank))
    faulthandler.enable(stream)
    faulthandler.register(signal.SIGUSR2, stream, all_threads=True)


def load(name: str) -> Any:
    """Import ``module:attribute``.

    Raises:
        ImportError: When there is no such module.
        AttributeError: When it has no such attribute.
    """
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
