"""Transfers under way, and one failure for all: the end of a transport when one goes wrong."""

import re
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hp_platform import (
    Event,
    FailureReport,
    PeerError,
    default_note,
    first_failure,
    is_echo,
)
from hp_vtp.topology.stages import Edge

T = TypeVar("T")

_LOOK_SECONDS = 0.25  # how often a rank that waits asks whether another one has failed
_GRACE_SECONDS = 2.0  # for a transfer to tell its own error after another rank has failed

_serial = count()  # transports of this process, which every rank makes in one order


class TransferError(RuntimeError):
    """A transfer failed, and the transport with it: later calls raise at once.

    Attributes:
        edge: Edge of the transfer.
        peers: Global ranks of the peers that had not answered, or that described the transfer
            differently.
        report: Report of the rank that failed first, if that is another one.
    """

    def __init__(
        self,
        message: str,
        *,
        edge: Edge,
        peers: Sequence[int] = (),
        report: FailureReport | None = None,
    ) -> None:
        """Store the message, which names the edge and the peers already."""
        super().__init__(message)
        self.edge = edge
        self.peers = tuple(peers)
        self.report = report


class TransferTimeoutError(TransferError, TimeoutError):
    """The time given to one `wait` is over. The transfer goes on: waiting again may succeed."""


class Failure:
    """The failure of a transport, on this rank: none yet, or the first one and its reason.

    The first rank to fail leaves its reason in the store of the default process group and then
    closes its connections. Ranks that wait for it fail on the closed connection and do the same; a
    rank that waits for something else looks into the store while it waits. So all of them raise
    within seconds, with the reason of the first one, and every later call raises again.

    Attributes:
        is_known: Whether a call has raised because of it.
        acts: Functions that are called once, when this rank learns of a failure.
    """

    def __init__(self, name: str) -> None:
        """Watch over one transport of this name; ranks tell each other in the default store."""
        self._note = default_note(f"hp_vtp/failure/{name}/{next(_serial)}")
        self.is_known = False
        self._lock = threading.Lock()
        self._first: FailureReport | None = None
        self.acts: list[Callable[[], None]] = []

    @property
    def reason(self) -> str | None:
        """Return the reason of the first rank to fail; None if this rank knows of no failure."""
        return None if self._first is None else str(self._first)

    @property
    def of_another(self) -> FailureReport | None:
        """Return the first failure, if it is known and another rank's."""
        first = self._first
        return first if first is not None and first.rank != dist.get_rank() else None

    def report(self, error: BaseException, mine: FailureReport | None = None) -> FailureReport:
        """Tell the other ranks why this one fails; return the report of the first one to fail.

        Args:
            error: Error that was raised. If it only says that another rank is gone or late, that
                rank is found and named.
            mine: Reason that this rank reports otherwise; by default the error and its place.
        """
        with self._lock:
            if self._first is not None:
                return self._first
            if mine is None or is_echo(error):
                self._first = first_failure(error, [self._note])
            else:
                self._first = self._note.leave(mine)
        for act in self.acts:
            act()
        return self._first

    def look(self) -> str | None:
        """Ask whether another rank has failed; if so, this one's transfers fail too."""
        if self._first is None and (found := self._note.read()) is not None:
            self.report(PeerError(str(found), rank=found.rank, report=found))
        return self.reason


def parse_reason(reason: str) -> FailureReport:
    """Take apart ``rank N, place: error``, of which each part may be absent."""
    begin = re.match(r"rank (\d+)(?:, )?", reason)
    mine = dist.get_rank() if dist.is_initialized() else 0
    rank = mine if begin is None else int(begin[1])
    place, _, error = reason[begin.end() if begin else 0 :].partition(": ")
    return FailureReport(rank, place, error)


class Handle(Generic[T]):
    """A transfer under way. The engine owns its buffers, so a handle may be dropped.

    Attributes:
        edge: Edge of the transfer.
        microbatch: Name that the caller gave it.
    """

    def __init__(
        self,
        *,
        edge: Edge,
        where: str,
        microbatch: int | None,
        failure: Failure,
        deliver: Callable[[], T],
        waits_for: Callable[[], Sequence[int]],
    ) -> None:
        """Describe a transfer that the engine is about to run.

        Args:
            edge: Edge of the transfer.
            where: Beginning of the messages of its errors.
            microbatch: Microbatch that messages and errors name.
            failure: Failure state of the transport.
            deliver: Function that makes the result, once, in the thread of the first `wait`.
            waits_for: Global ranks whose messages it still needs.
        """
        self.edge = edge
        self.microbatch = microbatch
        self._where = where
        self._failure = failure
        self._deliver = deliver
        self._waits_for = waits_for
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._event: Event | None = None
        self._error: TransferError | None = None
        self._result: tuple[T] | None = None

    def done(self) -> bool:
        """Tell whether `wait` would return at once; on CUDA, without making the stream wait."""
        return self._ended.is_set() and (self._event is None or self._event.query())

    @property
    def failed(self) -> bool:
        """Tell whether the transfer is known to have failed; `wait` raises the reason."""
        return self._error is not None

    def wait(self, timeout: float | None = None) -> T:
        """Wait for the transfer and return the received tensors; any thread may, several times.

        Nothing is sent in here, so ranks may wait in any order. On CUDA the current stream waits
        for the data, the host only until both ends have agreed on the transfer.

        Args:
            timeout: Seconds; None waits as long as the transport's own time-out lets it.

        Raises:
            TransferTimeoutError: If the time is over; the transfer goes on.
            TransferError: If the transfer or the transport failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._ended.wait(_pause(deadline)):
            if self._failure.look() is not None:
                self._ended.wait(_GRACE_SECONDS)
                break
            if deadline is not None and time.monotonic() >= deadline:
                raise TransferTimeoutError(
                    f"{self._where}: not done after {timeout} s, waiting for ranks "
                    f"{list(self._waits_for())}",
                    edge=self.edge,
                    peers=self._waits_for(),
                )
        if not self._ended.is_set():
            self._failure.is_known = True
            raise TransferError(
                f"{self._where}: {self._failure.reason}",
                edge=self.edge,
                report=self._failure.of_another,
            )
        if self._error is not None:
            self._failure.is_known = True
            # A new one for every caller: raising one object again would add to its traceback.
            error = self._error
            raise TransferError(
                str(error), edge=self.edge, peers=error.peers, report=error.report
            ) from error
        return self._take()

    def end(self, event: Event) -> None:
        """Tell that everything was issued; `event` tells when it has been done."""
        self._event = event
        self._ended.set()

    def fail(self, error: TransferError) -> None:
        """Tell that the transfer failed."""
        self._error = error
        self._ended.set()

    def _take(self) -> T:
        with self._lock:
            if self._event is not None:
                self._event.wait()
            if self._result is None:
                self._result = (self._deliver(),)
            result = self._result[0]
        _note_stream(result)
        return result


def _pause(deadline: float | None) -> float:
    left = _LOOK_SECONDS if deadline is None else deadline - time.monotonic()
    return max(0.0, min(_LOOK_SECONDS, left))


def _note_stream(result: object) -> None:
    """Keep the memory of tensors that were received on one stream and are used on another."""
    for x in result if isinstance(result, tuple) else ():
        if isinstance(x, Tensor) and x.is_cuda:
            x.detach().record_stream(torch.cuda.current_stream(x.device))
