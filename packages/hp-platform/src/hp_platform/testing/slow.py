"""Process group with added latency and limited bandwidth, to show overlap on a CPU."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.distributed import ProcessGroup

from hp_platform import _internals
from hp_platform.groups import global_ranks

_serial = count()


class CountedClock:
    """Clock of one rank that counts simulated seconds, the same on any machine.

    Compute calls `spend` with its duration. Operations of a `slow_group` with this clock end at
    their simulated times, and a wait for one moves the clock to that time.

    Attributes:
        now: Simulated seconds since the clock was made.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def spend(self, seconds: float) -> None:
        """Move the clock forward, as compute does."""
        with self._lock:
            self.now += seconds

    def transfer(self, seconds: float, *, after: float = 0.0) -> float:
        """Start an operation now, or when its link is free; return its end in simulated seconds.

        Args:
            seconds: Duration of the operation.
            after: Time at which the link is free.
        """
        with self._lock:
            return max(self.now, after) + seconds

    def reach(self, then: float) -> None:
        """Move the clock to a time, unless it is later already."""
        with self._lock:
            self.now = max(self.now, then)


def slow_group(
    group: ProcessGroup,
    *,
    latency: float = 0.0,
    bandwidth: float = math.inf,
    clock: CountedClock | None = None,
) -> ProcessGroup:
    """Wrap `group` so that its operations take `latency + bytes / bandwidth` seconds longer.

    A thread waits for the delays, one operation after the other as on one link; the caller of an
    operation can continue until it waits. Bytes are those of this rank's input. `group` itself must
    not be used meanwhile.

    Args:
        group: Group of this rank, for example of `run_in_threads` or the default group.
        latency: Latency in seconds.
        bandwidth: Bandwidth in bytes per second.
        clock: Clock of this rank, which counts the delay without waiting. None: wait.

    Raises:
        ValueError: If `latency` is negative or `bandwidth` not positive.
    """
    if latency < 0:
        raise ValueError(f"latency ({latency}) must not be negative")
    if bandwidth <= 0:
        raise ValueError(f"bandwidth ({bandwidth}) must be positive")
    slow = _SlowGroup(group, latency, bandwidth, clock)
    name = f"slow{next(_serial)}/{group.group_name}"
    _internals.register_group(name, slow, global_ranks(group))
    return slow


class _SlowWork(dist.Work):
    def __init__(
        self, future: Future[None], tensors: object, clock: CountedClock | None, end: float
    ) -> None:
        super().__init__()
        self._future, self._clock, self._end = future, clock, end
        self._tensors = tensors  # alive until the operation is done

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002  # the group has its own time-out
        self._future.result()
        if self._clock is not None:
            self._clock.reach(self._end)
        return True

    def is_completed(self) -> bool:
        return self._future.done()


def _delayed(name: str, *, sent: int) -> Callable[..., _SlowWork]:
    """Make a method that calls the method of the wrapped group later; `sent` is its input."""

    def method(self: _SlowGroup, *args: object, **kwargs: object) -> _SlowWork:
        seconds = self.latency + (_num_bytes(args[sent]) if args else 0) / self.bandwidth
        if self.clock is not None:
            self.is_free = self.clock.transfer(seconds, after=self.is_free)
        end = self.is_free

        def transfer() -> None:
            with record_function(f"slow:{name}"):  # for a profiler that sees all threads
                if self.clock is None:
                    time.sleep(seconds)
                getattr(self.inner, name)(*args, **kwargs).wait()

        return _SlowWork(self.link.submit(transfer), args, self.clock, end)

    return method


# Name of a method -> method of the wrapped group, and index of the argument that it sends. Newer
# versions of torch call some operations by newer names.
_DELAYED = {
    "alltoall": ("alltoall", 1),
    "alltoall_base": ("alltoall_base", 1),
    "all_to_all_single": ("alltoall_base", 1),
    "allgather": ("allgather", 1),
    "_allgather_base": ("_allgather_base", 1),
    "all_gather_single": ("_allgather_base", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("_reduce_scatter_base", 1),
    "reduce_scatter_single": ("_reduce_scatter_base", 1),
    "allreduce": ("allreduce", 0),
    "broadcast": ("broadcast", 0),
    "send": ("send", 0),
    "barrier": ("barrier", 0),
}


class _SlowGroup(ProcessGroup):
    """Process group that delays operations of another group, as listed in `_DELAYED`."""

    def __init__(
        self, inner: ProcessGroup, latency: float, bandwidth: float, clock: CountedClock | None
    ) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # no store
        self.clock = clock
        self.inner, self.latency, self.bandwidth = inner, latency, bandwidth
        self.link = ThreadPoolExecutor(1, thread_name_prefix="slow-link")
        self.is_free = 0.0  # simulated time at which the link has finished all operations
        self._name = ""

    def recv(self, *args: Any) -> dist.Work:
        """Receive without a delay: a send has one, and must not queue up behind a receive."""
        return self.inner.recv(*args)

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return the name that torch shows for this group."""
        return "slow"

    @property
    def group_name(self) -> Any:
        """Return the name by which functional collectives find this group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name


for _name, (_inner, _sent) in _DELAYED.items():
    setattr(_SlowGroup, _name, _delayed(_inner, sent=_sent))


def _num_bytes(sent: object) -> int:
    return sum(x.nbytes for x in _internals.tree_leaves(sent) if isinstance(x, Tensor))
