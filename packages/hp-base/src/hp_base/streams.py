"""Standard streams that are there, take every letter, and are no reason for a run to end."""

import codecs
import errno
import io
import os
import select
import sys

from hp_base.errors import MachineError

_BYTES = "hp-bytes"
_NAMES = {1: "stdout", 2: "stderr"}
_ENDURED = {2}
"""Descriptors whose loss is no reason to end: there is no other place to tell of that of 2."""
_TELLS: set[int] = set()


def own_streams() -> None:
    """Make the streams of this process: before it opens anything that it keeps open.

    A descriptor that is closed would be that of the next file which is opened, and whatever is
    printed would stand in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Opened the wrong way round: whoever uses it learns that it cannot be used.
            opened = os.open(os.devnull, os.O_RDONLY if number else os.O_WRONLY)
            os.set_inheritable(opened, True)
    codecs.register_error(_BYTES, _as_bytes)
    for number, name in _NAMES.items():
        before = getattr(sys, name)
        raw = _Output(number, "w", closefd=False)
        encoding, is_terminal = getattr(before, "encoding", None) or "utf-8", raw.isatty()
        text = io.TextIOWrapper(
            io.BufferedWriter(raw),
            encoding=encoding,
            errors=_BYTES,
            line_buffering=is_terminal or number == 2,
        )
        setattr(sys, name, text)


def endure(*, tells: bool = True) -> None:
    """Let this process go on where standard output is lost.

    A reader may go (``| head``), a disk be full, a descriptor be closed from the start. A command
    whose answer is what it prints then ends: quietly where the reader went, as every program of a
    pipe, else in one line on standard error. A run goes on: what it computes is in its directory.
    Its exit status stays that of the run.

    Args:
        tells: Whether to say so on standard error, as one process of a run does.
    """
    _ENDURED.add(1)
    if tells:
        _TELLS.add(1)


class _Output(io.FileIO):
    """Writes to a descriptor, and drops what follows once that has failed."""

    def write(self, data: object, /) -> int:
        try:
            done = super().write(data)  # type: ignore[arg-type]
            while done is None:  # another process has told the pipe not to wait
                _wait_for(self.fileno())
                done = super().write(data)  # type: ignore[arg-type]
        except OSError as error:
            _lose(self.fileno(), error)
            return memoryview(data).nbytes  # type: ignore[arg-type]
        return done


def _wait_for(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll()


def _lose(number: int, error: OSError) -> None:
    # Whatever comes later, at the end of the interpreter too, must not fail again.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, number)
    os.close(nowhere)
    if number not in _ENDURED:
        if error.errno == errno.EPIPE:
            raise error
        raise MachineError(f"standard output cannot be written: {error.strerror}")
    if number in _TELLS:
        sys.stderr.write(
            f"warning: standard output cannot be written: {error.strerror}; the run goes on, "
            "its numbers are in metrics.jsonl\n"
        )


def _as_bytes(error: UnicodeError) -> tuple[str | bytes, int]:
    """Let bytes of a path that are no text go out as they came; make escapes of other letters."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    told = b"".join(map(_byte_or_escape, error.object[error.start : error.end]))
    return told, error.end


def _byte_or_escape(letter: str) -> bytes:
    code = ord(letter)
    is_byte = 0xDC80 <= code <= 0xDCFF  # as os.fsdecode gives them
    return bytes([code - 0xDC00]) if is_byte else letter.encode("ascii", "backslashreplace")
