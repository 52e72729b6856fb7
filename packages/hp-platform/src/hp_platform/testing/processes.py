"""`run_distributed`: run a function on several ranks, each a process."""

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver, util
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from hp_platform.launch import INIT_METHOD_VARIABLE
from hp_platform.testing import preload
from hp_platform.testing.child import Failure, Task, describe, run_rank
from hp_platform.testing.preload import MODULES_VARIABLE

T = TypeVar("T")

# Modules that the server imports once, before the modules of the caller, for all forked ranks.
# torch would import the third and fourth at the first use of a lazy collective and of an optimizer,
# which would cost each rank seconds.
_PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch._dynamo",
    "hp_platform.testing",
    "pytest",
    "hypothesis",
]
# Packages of which the server needs no further modules.
_COMMON = {*sys.stdlib_module_names, "torch", "numpy", "sympy", "pytest", "_pytest", "hypothesis"}
_LONGEST_FOLDER = 107 - len(
    "/pymp-xxxxxxxx/listener-xxxxxxxx"
)  # of the path that a socket is bound to
_MODULES_BYTES = 100_000  # the system takes a little more; a name cut in two is passed over
_START_SECONDS = 120.0  # until all ranks are connected; the first call imports torch
_GRACE_SECONDS = 0.3  # after a failure, for other ranks to report theirs
_OUTPUT_BYTES = 8000


class RankError(RuntimeError):
    """Error of a rank that raised, died or did not finish in time.

    Attributes:
        rank: Rank that failed; of several ranks, the one that caused the failure.
    """

    def __init__(self, message: str, *, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def run_distributed(
    fn: Callable[..., T],
    *args: object,
    world_size: int,
    timeout: float = 60.0,
    threads: int = 1,
) -> list[T]:
    """Run `fn(*args)` on `world_size` ranks, each a process in one Gloo world on this machine.

    The default process group exists when `fn` is called; `RANK`, `WORLD_SIZE` and similar variables
    are set, so that `hp_platform.initialize` works in `fn` as well. A server forks the processes.
    It has imported torch and the modules that the caller had imported at its first call. That call
    takes seconds, further calls 0.1-0.3 s. No process outlives the call or the calling process.
    Other users of the machine cannot read the file in which ranks meet. The output of ranks is
    printed at the end, in rank order.

    Args:
        fn: Function at the top level of a module, or a `functools.partial` of such a function.
        *args: Picklable arguments, the same for every rank.
        world_size: Number of ranks.
        timeout: Seconds for `fn` after all ranks have connected.
        threads: Intra-op threads of torch in each rank.

    Returns:
        Results of `fn`, which must be picklable, by rank.

    Raises:
        RankError: If a rank raised, died or did not finish. All ranks are killed; the message names
            the rank and contains its traceback and the end of its output.
        ValueError: If `world_size` is not positive.
        TypeError: If `fn` or `args` cannot be pickled.
    """
    __tracebackhide__ = True
    if world_size < 1:
        raise ValueError(f"world_size ({world_size}) must be at least 1")
    payload = _pickle(fn, args)
    _start_server()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                module, file = describe(fn)
                task = Task(
                    rank=rank,
                    world_size=world_size,
                    store=str(Path(folder, "store")),
                    timeout=timeout,
                    threads=threads,
                    env=_environment(rank, world_size, folder, threads),
                    output=str(Path(folder, f"rank{rank}.txt")),
                    module=module,
                    module_file=file,
                    payload=payload,
                )
                ranks.append(_Rank(task))
            _supervise(ranks, timeout)
            for started in ranks:
                sys.stdout.write(started.output())
            results: list[T] = [started.result() for started in ranks]
        finally:
            for started in ranks:
                started.end()
    return results


class _Rank:
    """Rank process, as the caller controls it."""

    def __init__(self, task: Task) -> None:
        context = multiprocessing.get_context("forkserver")
        self.rank, self.world_size = task.rank, task.world_size
        self._file = Path(task.output)
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=run_rank, args=(theirs, task), name=f"rank{task.rank}"
        )
        self.process.start()
        theirs.close()
        self.connected = False
        self.outcome: bytes | Failure | None = None
        self.lost = False

    @property
    def finished(self) -> bool:
        return self.lost or self.outcome is not None

    @property
    def failed(self) -> bool:
        return self.lost or isinstance(self.outcome, Failure)

    @property
    def is_echo(self) -> bool:
        return isinstance(self.outcome, Failure) and self.outcome.kind == "PeerError"

    def read(self) -> None:
        """Receive messages of the rank, or notice that it is gone."""
        try:
            while not self.finished and self.connection.poll():
                self.outcome = self.connection.recv()
                self.connected = True
        except (EOFError, OSError):
            self.lost = True
        if not self.finished and not self.process.is_alive():
            self.lost = not self.connection.poll()

    def proceed(self) -> None:
        """Let a rank continue that waits until all are connected or all have finished."""
        with contextlib.suppress(OSError):  # it may be gone
            self.connection.send(None)

    def result(self) -> Any:
        assert isinstance(self.outcome, bytes)
        return pickle.loads(self.outcome)  # noqa: S301  # made by our own child

    def output(self) -> str:
        return self._file.read_text(errors="replace") if self._file.exists() else ""

    def report(self) -> str:
        """Describe the end of this rank in words."""
        who = f"rank {self.rank} of {self.world_size}"
        if isinstance(self.outcome, Failure):
            text = f"{who} raised {self.outcome.kind}: {self.outcome.message}"
            return f"{text}\n\n{self.outcome.traceback}{self._tail()}"
        if self.lost:
            self.process.join(timeout=5.0)
            return f"{who} died: {_exit_text(self.process.exitcode)}{self._tail()}"
        return f"{who} was still running{self._tail()}"

    def _tail(self) -> str:
        text = self.output()[-_OUTPUT_BYTES:]
        return f"\n--- output of rank {self.rank} ---\n{text}" if text else ""

    def end(self) -> None:
        """End a finished rank; kill any other rank with its children."""
        if isinstance(self.outcome, bytes):
            self.proceed()
        elif self.process.is_alive():
            _kill_group(self.process)
        self.process.join(timeout=5.0)
        if self.process.is_alive():
            _kill_group(self.process)
            self.process.join()
        self.process.close()
        self.connection.close()


def _supervise(ranks: list[_Rank], timeout: float) -> None:
    """Return when all ranks have a result.

    Raises:
        RankError: When one has failed, or time is up.
    """
    __tracebackhide__ = True
    deadline = time.monotonic() + _START_SECONDS
    connected = failed = False
    while True:
        running = [rank for rank in ranks if not rank.finished]
        if not running or time.monotonic() > deadline:
            break
        objects: list[object] = [rank.connection for rank in running]
        objects += [rank.process.sentinel for rank in running]
        wait(objects, timeout=max(deadline - time.monotonic(), 0))  # type: ignore[arg-type]
        for rank in running:
            rank.read()
        if not failed and any(rank.failed for rank in ranks):
            failed = True
            deadline = time.monotonic() + _GRACE_SECONDS
        if not (failed or connected) and all(rank.connected for rank in ranks):
            connected = True
            for rank in ranks:
                rank.proceed()
            deadline = time.monotonic() + timeout
    if failed:
        raise _failure(ranks)
    if running:
        raise _overdue(ranks, timeout if connected else _START_SECONDS)


def _failure(ranks: list[_Rank]) -> RankError:
    """Report the cause first: a dead rank, else an error that follows from no other rank."""
    failed = [rank for rank in ranks if rank.failed]
    failed.sort(key=lambda rank: (not rank.lost, rank.is_echo))
    others = [rank.report().splitlines()[0] for rank in failed[1:]]
    return RankError("\n".join([failed[0].report(), *others]), rank=failed[0].rank)


def _overdue(ranks: list[_Rank], timeout: float) -> RankError:
    """Report first a rank outside a collective, for which the others wait."""
    running = [rank for rank in ranks if not rank.finished]
    numbers = [rank.rank for rank in running]
    running.sort(key=lambda rank: "torch/distributed" in rank.output())
    text = f"rank {running[0].rank} of {len(ranks)} did not finish within {timeout:g} s"
    lines = [f"{text} (still running: {numbers})", *(rank.report() for rank in running)]
    return RankError("\n".join(lines), rank=running[0].rank)


def _start_server() -> None:
    """Start the server that forks ranks, unless it runs.

    The server imports the modules of this process, which each rank would import otherwise, except
    modules of tests, because some stop their own import.
    """
    names = [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in _COMMON
        and not name.rpartition(".")[2].startswith(("test_", "conftest"))
        and getattr(getattr(module, "__spec__", None), "name", "") == name
    ]
    _have_short_folder()
    os.environ[MODULES_VARIABLE] = ",".join(names)[-_MODULES_BYTES:]
    multiprocessing.set_forkserver_preload([*_PRELOADED, preload.__name__])
    try:
        forkserver.ensure_running()
    finally:
        del os.environ[MODULES_VARIABLE]


def _have_short_folder() -> None:
    """Give multiprocessing a folder whose path is short enough for a socket.

    The path goes through a descriptor of the folder for temporary files, which stays open.
    """
    found = tempfile.gettempdir()
    if len(os.fsencode(found)) <= _LONGEST_FOLDER:
        return
    tempfile.tempdir = f"/proc/self/fd/{os.open(found, os.O_RDONLY | os.O_DIRECTORY)}"
    try:
        util.get_temp_dir()  # multiprocessing uses this folder from then on
    finally:
        tempfile.tempdir = found


def _pickle(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise TypeError(
            f"fn ({name}) must be a function at the top level of a module, and its arguments must "
            f"be picklable: {error}"
        ) from error


def _environment(rank: int, world_size: int, folder: str, threads: int) -> dict[str, str]:
    env = dict(os.environ)
    if sys.platform == "linux":
        env["GLOO_SOCKET_IFNAME"] = "lo"  # no other machine needs to reach them
    return env | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": str(threads),
        INIT_METHOD_VARIABLE: f"file://{folder}/again",  # for `initialize` after `shutdown`
    }


def _kill_group(process: BaseProcess) -> None:
    """Kill a rank and its children; each rank leads a process group of its own."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it has not made the group yet
        process.kill()


def _exit_text(code: int | None) -> str:
    if code is None:
        return "unknown"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exited with status {code}"
