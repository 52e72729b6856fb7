"""One rank process of `run_distributed`."""

import ctypes
import faulthandler
import functools
import gc
import importlib
import importlib.util
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from hp_platform._internals import AsyncCollectiveTensor, FileStore, functional_wait
from hp_platform.launch import schedule_as_batch

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a rank process.

    Attributes:
        rank: Rank of this process.
        world_size: Number of ranks.
        store: Path of the file in which the ranks meet, in a private folder of the caller.
        timeout: Seconds for the function.
        threads: Intra-op threads of torch.
        env: Whole environment of the process.
        output: Path of the file for the output of the rank.
        module: Name of the module that defines the function.
        module_file: Path of the module, for an import if its name does not lead there.
        payload: Pickled function and arguments.
    """

    rank: int
    world_size: int
    store: str
    timeout: float
    threads: int
    env: Mapping[str, str]
    output: str
    module: str
    module_file: str | None
    payload: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """Exception of a rank as text, since not every exception can be pickled."""

    kind: str
    message: str
    traceback: str


def run_rank(connection: Connection, task: Task) -> None:
    """Run the task: send None once connected to the others, then the result or a `Failure`.

    After each message it waits for an answer of the caller.
    """
    gc.freeze()  # modules from before the fork, or each rank would search and copy them
    _isolate(task)
    outcome: bytes | Failure
    try:
        _import(task.module, task.module_file)
        function, args = pickle.loads(task.payload)  # noqa: S301  # made by the parent process
        _connect(task)
        connection.send(None)
        # Wait until all are connected: a rank that ended now would look like a crash.
        connection.recv()
        # Write the stack of a rank that hangs to its output, just before the caller ends it.
        faulthandler.dump_traceback_later(task.timeout - min(0.5, task.timeout / 5))
        outcome = _dumps(function(*args))
    except BaseException as error:  # noqa: BLE001  # handed to the caller
        outcome = Failure(type(error).__name__, str(error), _format(error))
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        connection.send(outcome)
        # An end now would look like a lost connection to ranks that still run.
        connection.recv()
    except (EOFError, OSError):
        pass
    # Interpreter and backend need no orderly end.
    os._exit(0)


class _Pickler(pickle.Pickler):
    """Pickler that waits for tensors which a collective is still writing."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, AsyncCollectiveTensor):
            return functional_wait(obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _dumps(value: object) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _format(error: BaseException) -> str:
    """Return the traceback without the frame of this module."""
    trace = error.__traceback__
    shown = error.with_traceback(trace.tb_next if trace else None)
    return "".join(traceback.format_exception(shown))


def _isolate(task: Task) -> None:
    """Detach this process from the terminal, and let it end with the caller."""
    os.setsid()  # so that children of the rank can be killed with it
    threading.Thread(target=_die_with_caller, name="watch-caller", daemon=True).start()
    if sys.platform == "linux":  # the parent is the server, which may be killed as well
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    file = os.open(task.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # The server that forked this process may have been started with its output closed.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)
    os.environ.clear()
    os.environ.update(task.env)
    torch.set_num_threads(task.threads)
    schedule_as_batch()


def _die_with_caller() -> None:
    """Wait for the end of the process that called `run_distributed`, then kill this group.

    The server does not end with the caller: it lives as long as any of its children.
    """
    caller = multiprocessing.parent_process()
    if caller is not None:
        caller.join()
        os.killpg(os.getpid(), signal.SIGKILL)


def _import(name: str, file: str | None) -> None:
    """Make `name` importable: by its name if that leads to `file`, else from `file`."""
    if name in sys.modules or file is None:
        return
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin and Path(spec.origin).resolve() == Path(file).resolve():
        importlib.import_module(name)
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} must be importable from {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # pickle imports the parents too, which may not exist as packages.
    parent = name.rpartition(".")[0]
    while parent:
        sys.modules.setdefault(parent, ModuleType(parent))
        parent = parent.rpartition(".")[0]
    spec.loader.exec_module(module)


def _connect(task: Task) -> None:
    dist.init_process_group(
        "gloo",
        store=FileStore(task.store, task.world_size),
        rank=task.rank,
        world_size=task.world_size,
        # Longer than the task's own, which reports more.
        timeout=timedelta(seconds=task.timeout + 60),
    )


def describe(function: Callable[..., object]) -> tuple[str, str | None]:
    """Return name and file of the module that defines a function or the function of a partial."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__module__", None) or "__main__"
    if name == "__main__":  # multiprocessing prepares this one itself
        return name, None
    return name, getattr(sys.modules.get(name), "__file__", None)
