"""Hub of the processes of a dry run: a key-value store in the parent.

It is a Unix socket in a folder that only this user can enter; nothing is pickled. Requests and
answers are a line of JSON and pieces of bytes. A request for keys that are not set yet is answered
later.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_BACKLOG = 128


class HubError(RuntimeError):
    """Error of a request whose keys were not set in time, or cannot be set any more."""


@dataclass(slots=True)
class _Waiting:
    """Request for keys that are not all set."""

    connection: Connection
    keys: list[str]
    deadline: float
    reads: bool
    rank: int
    what: str


class Hub:
    """Keys of one dry run, and requests that wait for keys.

    Args:
        path: Path of its socket, in a folder that only this user can enter.
    """

    def __init__(self, path: Path) -> None:
        self._values: dict[str, bytes] = {}
        self._broken: list[tuple[str, str]] = []
        self._waiting: list[_Waiting] = []
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _short(path) as address:
            self._socket.bind(address)
        self._socket.listen(_BACKLOG)
        self.sources: list[socket.socket | Connection] = [self._socket]

    def serve(self, source: object) -> None:
        """Answer a source of `sources` that has data."""
        if not isinstance(source, Connection):
            self.sources.append(Connection(self._socket.accept()[0].detach()))
            return
        try:
            asked = json.loads(source.recv_bytes())
            pieces = [source.recv_bytes() for _ in range(asked["pieces"])]
            self._answer(source, asked, pieces)
        except (EOFError, OSError):
            self._forget(source)

    def look(self) -> None:
        """Refuse requests whose time is over."""
        for each in [each for each in self._waiting if time.monotonic() > each.deadline]:
            self._refuse(each, "wait timeout: it did not come within the time-out")

    def waiting_in_words(self) -> list[str]:
        """Describe the requests that wait, in words."""
        return [f"rank {each.rank} waits for {each.what}" for each in self._waiting]

    def end_of(self, rank: int) -> None:
        """Refuse requests for inputs of a rank that has ended."""
        self._broken.append((f"of/{rank}/", f"rank {rank} has ended"))
        self._answer_waiting()

    def close(self) -> None:
        """Close all connections."""
        for source in self.sources:
            source.close()

    def _answer(self, source: Connection, asked: dict[str, Any], pieces: list[bytes]) -> None:
        do, keys = asked["do"], asked["keys"]
        if do in ("get", "wait"):
            deadline = time.monotonic() + asked["timeout"]
            self._waiting.append(
                _Waiting(source, keys, deadline, do == "get", asked["rank"], asked["what"])
            )
            self._answer_waiting()
            return
        value, found = 0, list[bytes]()
        if do == "set":
            self._values[keys[0]] = pieces[0]
        elif do == "add":
            value = int(self._values.get(keys[0], b"0")) + asked["amount"]
            self._values[keys[0]] = str(value).encode()
        elif do == "compare_set":
            expected, desired = pieces
            there = self._values.get(keys[0])
            if there == expected or (there is None and not expected):
                there = self._values[keys[0]] = desired
            found = [expected if there is None else there]
        elif do == "check":
            value = int(all(key in self._values for key in keys))
        elif do == "delete":
            value = int(self._values.pop(keys[0], None) is not None)
        elif do == "break":
            self._broken.append((keys[0], asked["what"]))
        else:  # count
            value = len(self._values)
        _send(source, {"value": value}, found)
        self._answer_waiting()

    def _answer_waiting(self) -> None:
        """Answer requests whose keys are set now, or cannot be set any more."""
        for each in [*self._waiting]:
            if all(key in self._values for key in each.keys):
                self._waiting.remove(each)
                values = [self._values[key] for key in each.keys] if each.reads else []
                _try_to_send(each.connection, {"value": 0}, values)
                continue
            for prefix, what in self._broken:
                if any(key.startswith(prefix) for key in each.keys):
                    self._refuse(each, f"Connection closed by peer: {what}")
                    break

    def _refuse(self, waiting: _Waiting, error: str) -> None:
        self._waiting.remove(waiting)
        _try_to_send(waiting.connection, {"error": error})

    def _forget(self, source: Connection) -> None:
        self.sources.remove(source)
        self._waiting = [each for each in self._waiting if each.connection is not source]
        source.close()


def _send(connection: Connection, head: dict[str, object], pieces: Sequence[bytes] = ()) -> None:
    connection.send_bytes(json.dumps({**head, "pieces": len(pieces)}).encode())
    for piece in pieces:
        connection.send_bytes(piece)


def _try_to_send(
    connection: Connection, head: dict[str, object], pieces: Sequence[bytes] = ()
) -> None:
    with suppress(OSError):  # the process has ended, which `serve` will notice
        _send(connection, head, pieces)


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """Yield a short path of a socket, since the path of a Unix socket has at most 107 bytes."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class HubClient:
    """Client of the hub in a process; each of its threads has a connection of its own.

    Args:
        path: Path of the hub's socket.
        rank: Global rank of this process, for messages.
    """

    def __init__(self, path: Path, rank: int) -> None:
        self._path, self._rank = path, rank
        self._threads = threading.local()

    def ask(
        self,
        do: str,
        keys: Sequence[str] = (),
        pieces: Sequence[bytes] = (),
        *,
        timeout: float = 600.0,
        what: str = "",
        amount: int = 0,
    ) -> tuple[int, list[bytes]]:
        """Send a request to the hub and wait for its answer.

        Args:
            do: Command: `set`, `get`, `wait`, `add`, `check`, `compare_set`, `delete`, `break` or
                `count`.
            keys: Keys of the command; for `break`, the prefix of keys that will not be set.
            pieces: Values to set or to compare.
            timeout: Seconds that `get` and `wait` may take.
            what: Words for messages about the awaited keys; for `break`, the reason.
            amount: Number that `add` adds.

        Returns:
            Number, and values of the keys.

        Raises:
            HubError: If keys were not set in time, or the rank that should set them gave up.
        """
        connection = self._connection()
        head = {"do": do, "keys": list(keys), "timeout": timeout, "rank": self._rank}
        try:
            _send(connection, {**head, "what": what, "amount": amount}, pieces)
            answer = json.loads(connection.recv_bytes())
            found = [connection.recv_bytes() for _ in range(answer["pieces"])]
        except (EOFError, OSError):
            raise HubError("the dry run has ended: Connection closed by peer") from None
        if "error" in answer:
            raise HubError(f"{what or keys}: {answer['error']}")
        return answer["value"], found

    def _connection(self) -> Connection:
        found: Connection | None = getattr(self._threads, "connection", None)
        if found is None:
            plain = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with _short(self._path) as address:
                plain.connect(address)
            found = self._threads.connection = Connection(plain.detach())
        return found
