"""One failure for all: what happens to a transport when one of its transfers goes wrong.

Note [One failure for all]. The first rank to fail leaves its reason in the store of the default
process group and then closes its connections. Ranks that wait for it fail on the closed connection
and do the same; a rank that waits for something else looks into the store while it waits. So all
of them raise within seconds, with the reason of the first one, and every later call raises again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hp_schedule.runtime import FailureNote
from hp_schedule.runtime.failures import default_note
from hp_vtp.stages import Edge

_serial = count()  # transports of this process, which every rank makes in one order
_WAKE_TAG = 2  # of a message that nobody sends


class TransferError(RuntimeError):
    """A transfer failed, and the transport with it: later calls raise at once.

    Attributes:
        edge: Where.
        peers: Global ranks that this rank was waiting for.
    """

    def __init__(self, message: str, *, edge: Edge, peers: Sequence[int] = ()) -> None:
        """Take the message, which names the edge and the peers already."""
        super().__init__(message)
        self.edge = edge
        self.peers = tuple(peers)


class TransferTimeoutError(TransferError, TimeoutError):
    """The time given to one `wait` is over. The transfer goes on: waiting again may succeed."""


class Failure:
    """Whether this rank's transport has failed, and why (Note [One failure for all]).

    Attributes:
        is_known: Whether a call has raised because of it.
    """

    def __init__(self, name: str, *, note: FailureNote | None = None) -> None:
        """Watch over one transport.

        Args:
            name: Of the transport.
            note: Where the ranks tell each other; by default in the default group's store.
        """
        key = f"hp_vtp/failure/{name}/{next(_serial)}"
        self._note = default_note(key) if note is None else note
        self.is_known = False
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._on_failure: list[Callable[[], None]] = []

    @property
    def reason(self) -> str | None:
        """That of the first rank to fail, as far as this rank knows; None if all is well."""
        return self._reason

    def on_failure(self, act: Callable[[], None]) -> None:
        """Have something done once, when this rank learns of a failure."""
        self._on_failure.append(act)

    def disarm(self) -> None:
        """Do nothing more on a failure: what was to be broken is gone."""
        self._on_failure = []

    def report(self, reason: str) -> str:
        """Tell the other ranks why this one fails; return the reason of the first one to fail."""
        with self._lock:
            if self._reason is not None:
                return self._reason
            self._reason = self._note.leave(reason)
        self._break()
        return self._reason

    def look(self) -> str | None:
        """Ask whether another rank has failed; if so, this one's transfers fail too."""
        if self._reason is None and (found := self._note.read()) is not None:
            self.report(found)
        return self._reason

    def _break(self) -> None:
        for act in self._on_failure:
            act()


def break_group(group: ProcessGroup) -> None:
    """Fail all operations of a group, this rank's and those of peers that wait for this rank.

    Gloo has no call for that which wakes a thread of this process, but it gives up all connections
    of a group as soon as one wait in it has taken too long.
    """
    if "nccl" in dist.get_backend(group):
        # It waits for kernels of other groups too, which must not hold up the error.
        threading.Thread(target=group.abort, daemon=True).start()
        return
    peer = (group.rank() + 1) % group.size()
    with suppress(RuntimeError):
        group.recv([torch.empty(1)], peer, _WAKE_TAG).wait(timedelta(milliseconds=1))
