"""What a person may name in place of a file that a program reads, for tests of readers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def nothing(path: Path) -> None:
    """Make a link that leads nowhere."""
    path.symlink_to("nowhere")


def folder(path: Path) -> None:
    """Make a folder in place of a file."""
    path.mkdir()


def pipe(path: Path) -> None:
    """Make a pipe: whoever opens it waits for somebody who writes."""
    os.mkfifo(path)


def endless(path: Path) -> None:
    """Link to a device without an end."""
    path.symlink_to("/dev/zero")


def empty(path: Path) -> None:
    """Make a file of no bytes."""
    path.touch()


def nested(path: Path) -> None:
    """Nest lists deeper than any parser goes."""
    start = "x = " if path.suffix == ".toml" else ""
    path.write_text(start + "[" * 200_000 + "\n")


def objects(path: Path) -> None:
    """Put objects in objects, below a key that nobody knows."""
    start = "x = " if path.suffix == ".toml" else ""
    path.write_text(start + '{"x":' * 200_000 + "\n")


def bits(path: Path) -> None:
    """Write bytes that are no text."""
    path.write_bytes(bytes(range(256)) * 40)


def wide(path: Path) -> None:
    """Write a field longer than readers of tables take, and a number longer than Python reads."""
    path.write_text("9" * 200_000 + ",step,loss\n" + "9" * 200_000 + ",1,2\n")


TRAPS = (nothing, folder, pipe, endless, empty, nested, objects, bits, wide)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """End what waits for a pipe, or reads what has no end.

    Raises:
        TimeoutError: In what takes longer.
    """

    def end(*_: object) -> None:
        raise TimeoutError("it waits, or has no end")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
