"""Standard streams that exist, accept every character, and do not end a run when they fail."""

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
"""Descriptors whose loss does not end the process; standard error (2) could not be reported."""
_TELLS: set[int] = set()


def own_streams() -> None:
    """Make the streams of this process, before it opens a file.

    A closed descriptor would be used for the next file that is opened, and output would go to that
    file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # Opened in the opposite direction, so that using the stream fails.
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
    """Let this process go on if standard output is lost.

    The reader may end (``| head``), a disk may be full, a descriptor may be closed from the start.
    A command whose result is its output then ends: quietly if the reader has ended, as every
    program in a pipe, else with one line on standard error. A run goes on, as its results are in
    its directory, and keeps its exit status.

    Args:
        tells: Whether to warn on standard error, as one process of a run does.
    """
    _ENDURED.add(1)
    if tells:
        _TELLS.add(1)


class _Output(io.FileIO):
    """An output to a descriptor that drops all data after a write has failed."""

    def write(self, data: object, /) -> int:
        try:
            done = super().write(data)  # type: ignore[arg-type]
            while done is None:  # another process has made the pipe non-blocking
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
    # Later writes, also at the end of the interpreter, must not fail again.
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
    """Encode undecodable bytes of a path as they were, and other characters as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    told = b"".join(map(_byte_or_escape, error.object[error.start : error.end]))
    return told, error.end


def _byte_or_escape(letter: str) -> bytes:
    code = ord(letter)
    is_byte = 0xDC80 <= code <= 0xDCFF  # as os.fsdecode gives them
    return bytes([code - 0xDC00]) if is_byte else letter.encode("ascii", "backslashreplace")
