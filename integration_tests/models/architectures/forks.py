"""Runs that are forked from a process that has imported all: each costs what it computes.

The process must not have computed anything in threads, which no fork has.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.005
_REASON = "reason"


def prepare() -> None:
    """Import once what torch itself imports late, before any run is forked."""
    for module in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"):
        importlib.import_module(module)
    gc.freeze()


def run_ranks(
    work: Callable[[], object], *, size: int, folder: Path, seconds: float, meets: bool = True
) -> str:
    """Fork the ranks of a run, and end what is left of them.

    Args:
        work: What a rank does.
        size: Number of ranks.
        folder: An empty folder; what ranks print is in it.
        seconds: Most that they may take.
        meets: Whether the process group of several ranks is made before they work.

    Returns:
        Why it failed: the last line of the first rank that did. Empty: it did not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    alive = {}
    if meets and size > 1:
        work = partial(_meet, work, size, folder)
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            _be_rank(work, rank, size, folder)
        alive[pid] = rank
    reason, until = "", time.monotonic() + seconds
    try:
        while alive and time.monotonic() < until:
            pid, status = _ended(alive)
            if pid == 0:
                time.sleep(_POLL_SECONDS)
            elif status and not reason:
                reason = _reason(folder, alive.pop(pid), status)
                until = min(until, time.monotonic() + _GRACE_SECONDS)
            else:
                del alive[pid]
    finally:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return reason or (f"hangs: not done after {seconds:.0f} s" if alive else "")


def _ended(alive: Mapping[int, int]) -> tuple[int, int]:
    for pid in alive:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return ended, status
    return 0, 0


def _reason(folder: Path, rank: int, status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"rank {rank} was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    try:
        return (folder / f"{_REASON}-{rank}").read_text() or f"rank {rank} ended"
    except OSError:
        return f"rank {rank} ended with status {os.WEXITSTATUS(status)}"


def _be_rank(work: Callable[[], object], rank: int, size: int, folder: Path) -> NoReturn:
    """Be a rank until its end; nothing of the parent's goes on here."""
    status = 1
    try:
        log = os.open(folder / f"log-{rank}.txt", os.O_WRONLY | os.O_CREAT, 0o600)
        for number in (1, 2):
            os.dup2(log, number)
        places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
        os.environ.update({name: str(value) for name, value in places.items()})
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        work()
        status = 0
    except BaseException as error:  # noqa: BLE001 - told by its last line
        traceback.print_exc()
        (folder / f"{_REASON}-{rank}").write_text(_last_line(error))
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _meet(work: Callable[[], object], size: int, folder: Path) -> None:
    import torch.distributed as dist  # noqa: PLC0415 - of those who have it

    from hp_platform.launch import schedule_as_batch  # noqa: PLC0415

    schedule_as_batch()
    place, rank = (folder / "store").as_uri(), int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size)
    work()


def _last_line(error: BaseException) -> str:
    lines: Sequence[str] = str(error).strip().splitlines() or [""]
    name = type(error).__name__
    frame = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({Path(frame[0].filename).name}, in {frame[0].name})" if frame else ""
    return f"{name}: {lines[0]}{where}"
