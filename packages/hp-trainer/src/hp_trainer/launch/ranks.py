"""Ranks on this machine: processes forked from a server that has imported what they need.

Other users of a machine can connect to every port, also of the loopback interface, and can write to
a store that listens on one. So ranks that a launcher starts meet in a file without a name, which
only they have open. Nothing listens but Gloo and NCCL, and those on loopback.

The launcher itself does without torch: what a rank is made of is imported by the server.
"""

import gc
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hp_base.errors import RankLostError
from hp_base.signals import ending
from hp_base.streams import endure, own_streams
from hp_trainer.launch.task import Task

LOOPBACK = "lo"
SERVER = "the server that ranks are forked from"
_SETTLE_SECONDS, _LOOK_SECONDS = 1.0, 0.02


class Ranks:
    """The ranks of a run, started by this process and joined by it.

    Args:
        task: What every rank gets.
        num_processes: Number of ranks.

    Raises:
        RankLostError: When a process cannot be started; those before it are killed.
    """

    def __init__(self, task: Task, *, num_processes: int) -> None:
        self._processes: list[BaseProcess] = []
        context = multiprocessing.get_context("forkserver")
        meeting = os.memfd_create("hp-train", os.MFD_CLOEXEC)
        try:
            for rank in range(num_processes):
                given = (task, _environment(rank, num_processes), _Inherited(meeting))
                process = context.Process(target=_be, args=given, name=f"rank {rank}")
                process.start()
                self._processes.append(process)
        except (OSError, EOFError) as error:
            self.kill()
            if (code := server_end()) is not None:
                raise RankLostError(f"{SERVER} {ending(code)}") from None
            raise RankLostError(f"rank {rank} could not be started: {error}") from None
        finally:
            os.close(meeting)

    def ended(self) -> dict[int, int]:
        """Exit status by rank of those whose process has ended; negative: killed by that signal."""
        codes = {rank: process.exitcode for rank, process in enumerate(self._processes)}
        return {rank: code for rank, code in codes.items() if code is not None}

    @property
    def is_done(self) -> bool:
        """Tell whether all processes have ended."""
        return len(self.ended()) == len(self._processes)

    def join(self, timeout: float) -> None:
        """Wait until `is_done`, for so many seconds at most."""
        deadline = time.monotonic() + timeout
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        """End all processes that have not ended."""
        for process in self._processes:
            process.kill()


_servers: list[int] = []


@contextmanager
def noticing_server() -> Iterator[None]:
    """Remember the process that is started meanwhile: the server that ranks are forked from."""
    before = _children()
    yield
    _servers.extend(_children() - before)


def server_end() -> int | None:
    """Return how that server has ended, as `Ranks.ended` has it; None: it lives, or is not known.

    With it all ranks end, and the status of each is lost. A moment is waited for its end, which
    others see before the system says how it came.
    """
    deadline = time.monotonic() + _SETTLE_SECONDS
    while _servers and time.monotonic() < deadline:
        try:  # not taken from multiprocessing, which starts another one after it has seen this
            found = os.waitid(os.P_PID, _servers[-1], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        if found is not None:
            is_status = found.si_code == os.CLD_EXITED
            return found.si_status if is_status else -found.si_status
        time.sleep(_LOOK_SECONDS)
    return None


def _children() -> set[int]:
    with suppress(OSError):  # a kernel that does not list them
        tasks = Path("/proc/self/task").iterdir()
        return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    return set()


class _Inherited:
    """A file descriptor that goes with the arguments of a process to where that is started.

    Args:
        descriptor: File descriptor of this process.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __getstate__(self) -> object:
        return reduction.DupFd(self.descriptor)

    def __setstate__(self, state: Any) -> None:
        self.descriptor = state.detach()


def _be(task: Task, environment: dict[str, str], meeting: _Inherited) -> int:
    from hp_platform.launch import INIT_METHOD_VARIABLE  # noqa: PLC0415 - the server has them
    from hp_trainer.launch.worker import work  # noqa: PLC0415

    own_streams()
    endure()
    gc.freeze()  # what was imported before the fork, or each rank searches and copies it
    gc.enable()
    os.environ.update(environment)
    os.environ[INIT_METHOD_VARIABLE] = f"file:///proc/self/fd/{meeting.descriptor}"
    return work(task)


def _environment(rank: int, world_size: int) -> dict[str, str]:
    """Return variables of torchrun that libraries read, and the interface of the ranks."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
    }
