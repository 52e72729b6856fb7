"""Why a pipeline failed, where every rank of it can read it.

A rank that fails closes its connections, so that its peers fail as well, each with the error of a
closed connection. The first rank to give up leaves its reason in the store of the default process
group; the others add it to their own error.
"""

from typing import Protocol

import torch.distributed as dist

_MAX_CHARACTERS = 4000


class Store(Protocol):
    """What is used of a `torch.distributed.Store`."""

    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes:
        """Set a key that is not set if expected_value is empty; return its value."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys are set."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key, waiting until it is set."""
        ...


class FailureNote:
    """The reason of the rank that gave up first.

    Args:
        store: Shared by the ranks; None keeps the reason of each rank to itself.
        key: In the store; of one pipeline's ranks, used for one failure.
    """

    def __init__(self, store: Store | None, key: str) -> None:
        self._store = store
        self._key = key

    def leave(self, reason: str) -> str:
        """Leave this rank's reason if it is the first one; return the first one."""
        if self._store is None:
            return reason
        try:
            found = self._store.compare_set(self._key, "", reason[:_MAX_CHARACTERS])
        except RuntimeError:
            # The rank that holds the store is gone; what this rank knows must do.
            return reason
        return found.decode(errors="replace")

    def read(self) -> str | None:
        """Return the reason of the rank that gave up first, None if none has."""
        if self._store is None:
            return None
        try:
            found = self._store.get(self._key) if self._store.check([self._key]) else None
        except RuntimeError:
            return None  # the rank that holds the store is gone
        return None if found is None else found.decode(errors="replace")


def default_note(key: str) -> FailureNote:
    """Return a note in the store of the default process group, if there is one."""
    world = dist.group.WORLD
    return FailureNote(None if world is None else world.get_group_store(), key)
