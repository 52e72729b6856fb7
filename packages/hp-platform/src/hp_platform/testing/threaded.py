"""Several real Gloo ranks in one process, each a thread."""

import queue
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import TypeVar

from torch.distributed import ProcessGroup

from hp_platform import _internals
from hp_platform.testing.processes import RankError

T = TypeVar("T")

_serial = count()
_JOIN_SECONDS = 2.0


def run_in_threads(
    fn: Callable[[ProcessGroup], T], *, world_size: int, timeout: float = 60.0
) -> list[T]:
    """Run `fn` once per rank, each in a thread of this process with a Gloo group of its own.

    Threads start faster than processes and are easy to debug, and `fn` may be any callable. The
    ranks share everything but the group: module state, the random generator, the working directory.
    There is no default group; pass the group everywhere.

    Args:
        fn: Function of the group of its rank: `group.rank()`, `group.size()`.
        world_size: Number of ranks.
        timeout: Seconds for all ranks together, and for each collective.

    Returns:
        Results of `fn`, by rank.

    Raises:
        RankError: If a rank raised (the error of the first such rank is the cause) or did not
            finish in time.
    """
    __tracebackhide__ = True
    run = f"threads{next(_serial)}"
    store = _internals.HashStore()
    finished: queue.SimpleQueue[tuple[int, T | None, BaseException | None]] = queue.SimpleQueue()
    groups: dict[int, ProcessGroup] = {}

    def rank_main(rank: int) -> None:
        try:
            groups[rank] = _internals.gloo_group(
                store,
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout + 1),
                name=run,
            )
            _internals.register_group(f"{run}/{rank}", groups[rank], range(world_size))
            finished.put((rank, fn(groups[rank]), None))
        except BaseException as error:  # noqa: BLE001  # handed to the caller
            finished.put((rank, None, error))
            # Gloo closes the connections of this rank, and so ends collectives in which others
            # wait for it, once nothing refers to its group, frames of the traceback included.
            traceback.clear_frames(error.__traceback__)
            _forget_group(run, rank, groups)

    threads = [
        threading.Thread(target=rank_main, args=(rank,), name=f"rank{rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    try:
        return _collect(finished, world_size, timeout)
    finally:
        for thread in threads:
            thread.join(timeout=_JOIN_SECONDS)
        for rank in range(world_size):
            _forget_group(run, rank, groups)


def _forget_group(run: str, rank: int, groups: dict[int, ProcessGroup]) -> None:
    if (group := groups.pop(rank, None)) is not None:
        _internals.unregister_group(f"{run}/{rank}", group)


def _collect(
    finished: queue.SimpleQueue[tuple[int, T | None, BaseException | None]],
    world_size: int,
    timeout: float,
) -> list[T]:
    __tracebackhide__ = True
    deadline = time.monotonic() + timeout
    results: dict[int, T | None] = {}
    while len(results) < world_size:
        try:
            rank, result, error = finished.get(timeout=max(deadline - time.monotonic(), 0.01))
        except queue.Empty:
            missing = sorted(set(range(world_size)) - set(results))
            raise RankError(
                f"rank {missing[0]} did not finish within {timeout:g} s (waiting for {missing})",
                rank=missing[0],
            ) from None
        if error is not None:
            message = f"rank {rank} of {world_size} raised {type(error).__name__}: {error}"
            raise RankError(message, rank=rank) from error
        results[rank] = result
    return [results[rank] for rank in range(world_size)]  # type: ignore[misc]
