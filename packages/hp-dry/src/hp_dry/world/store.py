"""Store of the default group of a dry run, in which a representative answers for its class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta

from hp_dry.cluster import Classes
from hp_dry.world.hub import HubClient
from hp_platform._internals import Store
from hp_platform.failures.liveness import RANK_KEYS

_OF_A_RANK = re.compile(f"(.*(?:{'|'.join(RANK_KEYS)}))/([0-9]+)")


class DryStore(Store):
    """Store of all representatives, which behaves as if every rank had a process.

    - `add` adds the amount once for every rank of the class, and returns the number that the
      representative would see as the last of them. Keys with this rank's device belong to it alone.
    - Keys of a rank about itself (`RANK_KEYS` of a liveness check) are those of its representative.

    Args:
        client: Connection to the hub.
        classes: Classes of the ranks, each with its representative.
        own: Part of keys that belong to this rank alone: the UUID of its device.
    """

    def __init__(self, client: HubClient, classes: Classes, *, rank: int, own: str) -> None:
        super().__init__()
        self._client, self._classes = client, classes
        self._rank, self._own = rank, own
        self._seconds = 600.0

    @property
    def timeout(self) -> timedelta:
        """Return the time-out of `get` and `wait`."""
        return timedelta(seconds=self._seconds)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of `get` and `wait`."""
        self._seconds = timeout.total_seconds()

    def clone(self) -> DryStore:
        """Return this store, in which every thread has a connection of its own."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._client.ask("set", [_named(key)], [_bytes(value)])

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        return self._ask("get", [key], self._seconds)[1][0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for keys and return their values."""
        return self._ask("get", keys, self._seconds)[1]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        self._ask("wait", keys, self._seconds if timeout is None else timeout.total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether keys are set."""
        return bool(self._ask("check", keys, 0.0)[0])

    def add(self, key: str, amount: int) -> int:
        """Add to a number, for every rank of the class."""
        times = 1 if self._own in key else self._classes.size(self._rank)
        return self._client.ask("add", [_named(key)], amount=amount * times)[0]

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value, or if it is unset and that value is empty."""
        pieces = [_bytes(expected), _bytes(desired)]
        return self._client.ask("compare_set", [_named(key)], pieces)[1][0]

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return bool(self._client.ask("delete", [_named(key)])[0])

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._client.ask("count")[0]

    def _ask(self, do: str, keys: Sequence[str], seconds: float) -> tuple[int, list[bytes]]:
        keys = [_named(self._spoken_for(key)) for key in keys]
        return self._client.ask(do, keys, timeout=seconds, what=f"key {keys[0][6:]} of the store")

    def _spoken_for(self, key: str) -> str:
        found = _OF_A_RANK.fullmatch(key)
        if found is None or int(found[2]) >= len(self._classes.representative):
            return key
        return f"{found[1]}/{self._classes.representative[int(found[2])]}"


def _named(key: str) -> str:
    return f"store/{key}"


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
