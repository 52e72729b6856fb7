"""One failure for all: the end of a transport when one of its transfers goes wrong."""

import re
import threading
from collections.abc import Callable, Sequence
from itertools import count

import torch.distributed as dist

from hp_platform import (
    FailureReport,
    PeerError,
    default_note,
    first_failure,
    is_echo,
)
from hp_vtp.topology.stages import Edge

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
