"""Pieces of text encoded as ids, in this process or in others, in order and with the same result.

The processes are new interpreters without torch: a process forked from a rank would inherit locks
of threads that it does not have. They end with the pipe that they read from.

A document that is too long to be encoded at once is cut where that does not change its ids. A
tokenizer may begin a text with a space, join two newlines to one token, or take the whole text as
one word. So a document is cut only at a place that is tested: `Tokenizer.joins` compares the ids of
the text around it with those of both sides, from several beginnings, since a rule that counts
characters could agree by chance with one. The places are those where usual tokenizers end a word:
between a letter and a space before a letter, and at the beginning of a line; in text without such
places, numbers for example, before any single space and at any line. They depend on the file and
the tokenizer alone. If none of them passes, the piece is extended, and memory grows with it, up to
a bound.
"""

import contextlib
import json
import math
import os
import re
import resource
import select
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import IO, NamedTuple, Self

import numpy as np

from hp_base.environment import usable_cores
from hp_base.errors import ConfigError, DataError
from hp_base.folder import read_span
from hp_data.corpus import (
    Piece,
    Source,
    opened_source,
    plain_lines,
    printable,
    read_piece,
    texts_of,
)
from hp_data.tokenizer import TokenArray, Tokenizer, load_tokenizer
from hp_data.tokens import new_hasher

_HEAD = struct.Struct("<B16sQQ")
_GOOD, _BAD_TEXT, _BAD_CONFIG = range(3)
_AHEAD = 2  # pieces that each process has been given
_BYTES_PER_PROCESS = 1 << 22  # a second's work for a tokenizer of Hugging Face
_READ_BYTES = 1 << 16  # what a pipe holds
_LOOK_SECONDS = 1.0
_WATCHED_SECONDS = 1200  # seconds for one piece in which `on_wait` is called
# Processor time and memory that any text may take, and more for the length of the text.
_LEAST_SECONDS, _LEAST_BYTES = 30, 2 << 30
_CHARACTERS_PER_SECOND, _BYTES_PER_CHARACTER = 1 << 14, 128
_TRIAL = "It's 1 caf\u00e9 (e\u0301). " + "".join(
    200 * c for c in "aA1 .-=!'(\n\t\u00e9\u4e2d\u3002"
)
LONGEST_BYTES = 1 << 28
"""Most bytes that are encoded at once."""

_AROUND = 2048
_BEGINNINGS = (_AROUND, 1021, 301)  # characters; no number above 1 divides all of them
_SCAN_BYTES = 1 << 16
_TRIED = 16
_PLACES = (
    rb"[A-Za-z](?= [A-Za-z])",
    rb"(?<=\S)\n(?=[A-Za-z\xc3-\xf4])",
    rb"\S(?= [!-~])",
    rb"(?<=\S)\n(?=[!-~])",
)


class Encoded(NamedTuple):
    """The tokens of a piece.

    Attributes:
        piece: Piece that was encoded.
        digest: Digest of the bytes of the piece.
        tokens: Token ids, a separator after every document that ends in the piece; one-dimensional.
        num_empty: Number of lines of jsonl without tokens, which are left out.
    """

    piece: Piece
    digest: bytes
    tokens: TokenArray
    num_empty: int


def count_processes(total_bytes: int, tokenizer: Tokenizer) -> int:
    """Return the number of processes worth starting for a text; 0: this process encodes it."""
    if tokenizer.is_cheap:
        return 0
    return max(1, min(usable_cores(), total_bytes // _BYTES_PER_PROCESS))


def try_out(path: str, separator: str) -> None:
    """Check values of ``data.tokenizer`` and ``data.separator`` by encoding a few kilobytes.

    The rules of a tokenizer file are programs: a regular expression may take years for a line, a
    normalizer may double a text forty times. So a tokenizer is made, tried and used in a process
    with bounded memory and processor time: a file that needs more is refused, and nothing hangs.

    Raises:
        ConfigError: If the file is not a tokenizer, its separator is unknown, or it takes too much
            time or memory.
    """
    with _Helper(path, separator) as helper:
        helper.identity()


def encode_all(
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    *,
    num_processes: int,
    on_wait: Callable[[], None] = lambda: None,
) -> Generator[Encoded, None, None]:
    """Encode pieces, with a few pieces for each process in memory at a time.

    Args:
        pieces: Pieces to encode, in order.
        tokenizer: Tokenizer of the ids.
        num_processes: Number of processes to start; 0: this process encodes.
        on_wait: Function that is called every second of a wait for a piece.

    Yields:
        The tokens of the pieces, in order.

    Raises:
        DataError: When a piece cannot be read or a process has died.
        ConfigError: When the tokenizer takes too much, or its file has changed.
    """
    if not num_processes:
        for piece in pieces:
            yield encode_piece(piece, tokenizer)
        return
    with contextlib.ExitStack() as stack:
        helpers = [
            stack.enter_context(_Helper(tokenizer.path, tokenizer.separator_name, on_wait=on_wait))
            for _ in range(num_processes)
        ]
        for helper in helpers:
            helper.require(tokenizer)
        given: deque[_Helper] = deque()
        for helper, piece in zip(cycle(helpers), pieces):
            if len(given) == num_processes * _AHEAD:
                yield given.popleft().take(tokenizer)
            helper.give(piece)
            given.append(helper)
        for helper in given:
            yield helper.take(tokenizer)


def encode_piece(
    piece: Piece, tokenizer: Tokenizer, *, on_text: Callable[[int], None] = lambda _: None
) -> Encoded:
    """Read a piece and encode it.

    Args:
        piece: Piece to encode.
        tokenizer: Tokenizer of the ids.
        on_text: Function that is called with the length of each text before it is encoded.

    Raises:
        DataError: If the piece cannot be read or is not text.
    """
    begin, raw = read_piece(piece)
    source = piece.source
    end = np.full(1, tokenizer.separator, dtype=tokenizer.dtype)
    parts: list[TokenArray] = []
    digest, num_empty = new_hasher(raw).digest(), 0
    if source.kind != "jsonl" and not (tokenizer.is_cheap or piece.is_whole):
        begin, raw = cut_text(piece, tokenizer)
    for text in texts_of(source, begin, raw):
        goes_on = source.kind != "jsonl" and begin > 0
        on_text(len(text))
        tokens = tokenizer.encode(text, goes_on=goes_on) if text else end[:0]
        _require_text(source, tokens, tokenizer)
        parts.append(tokens)
        if source.kind == "jsonl":
            num_empty += not tokens.size
            parts.append(end[: tokens.size])
    if source.kind != "jsonl" and piece.is_last:
        parts.append(end)
    tokens = np.concatenate(parts) if parts else end[:0]
    return Encoded(piece, digest, tokens, num_empty)


def _require_text(source: Source, tokens: TokenArray, tokenizer: Tokenizer) -> None:
    """Raise DataError for a separator within a document, except for bytes, which have none."""
    if not tokenizer.is_cheap and (tokens == tokenizer.separator).any():
        name = ascii(tokenizer.separator_name)[1:-1]
        raise DataError(
            f"{printable(source.path)}: text must not give the separator ({name}), which stands "
            "for all that the tokenizer does not know; set data.separator to another token"
        )


def cut_text(piece: Piece, tokenizer: Tokenizer) -> tuple[int, bytes]:
    """Return the first byte of the part of a document to encode for a piece, and its bytes.

    Raises:
        DataError: If the file cannot be read, or has no place for a cut.
    """
    source, step = piece.source, piece.end - piece.begin
    with opened_source(source.path) as descriptor:
        begin, end = (
            _seam(descriptor, at, source, tokenizer, step=step) for at in (piece.begin, piece.end)
        )
        return begin, read_span(descriptor, begin, end)


def _seam(descriptor: int, at: int, source: Source, tokenizer: Tokenizer, *, step: int) -> int:
    """Return the first place from a byte on where the document is cut, or its end."""
    if at <= 0 or at >= source.size:
        return max(0, min(at, source.size))
    for begin in range(at, min(at + LONGEST_BYTES, source.size), step):
        found = next(_seams_from(descriptor, begin, tokenizer, step=step), None)
        if found is not None:
            return found
    if at + LONGEST_BYTES < source.size:
        raise DataError(
            f"{printable(source.path)}: data.tokenizer must end a word in the {LONGEST_BYTES} "
            f"bytes from byte {at} on; give the text as a line of JSON per document (.jsonl)"
        )
    return source.size


def _seams_from(descriptor: int, at: int, tokenizer: Tokenizer, *, step: int) -> Iterator[int]:
    """Yield the places in the next bytes where the text may be cut."""
    first = max(0, at - 4 * _AROUND)
    last = at + min(_SCAN_BYTES, step)
    raw = read_span(descriptor, first, last + 4 * _AROUND)
    for places in _PLACES:
        for place in islice(re.compile(places).finditer(raw, at - first, last - first), _TRIED):
            left, right = (
                plain_lines(part.decode(errors="replace"))
                for part in (raw[: place.end()], raw[place.end() :])
            )
            if all(tokenizer.joins(left[-count:], right[:_AROUND]) for count in _BEGINNINGS):
                yield first + place.end()


class _Helper:
    """A process that encodes pieces; it ends with the context.

    Args:
        path: See `load_tokenizer`.
        separator: See `load_tokenizer`.
        on_wait: Function that is called every second of a wait.
    """

    def __init__(
        self, path: str, separator: str, *, on_wait: Callable[[], None] = lambda: None
    ) -> None:
        self._path, self._on_wait = path, on_wait
        self._given: deque[Piece] = deque()
        folders = os.pathsep.join(entry for entry in sys.path if entry)
        # -P: a file of the folder that this was started in must not be taken for a module.
        command = [sys.executable, "-P", "-m", __name__, path, separator]
        self._process = subprocess.Popen(  # noqa: S603 - this very module
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # its end is reported in one line
            process_group=0,  # signals to the group of its parent end it with its parent
            env=os.environ | _ENVIRONMENT | {"PYTHONPATH": folders},
        )
        assert self._process.stdin, "it is a pipe"
        assert self._process.stdout, "it is a pipe"
        self._to: IO[bytes] = self._process.stdin
        self._from: IO[bytes] = self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        self._from.close()
        self._process.wait()

    def identity(self) -> str:
        """Wait until the tokenizer is made and tried; return its identity."""
        return self._answer()[2].decode()

    def require(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError if the file has changed since a tokenizer was made of it."""
        if self.identity() != tokenizer.identity:
            raise ConfigError(f"data.tokenizer ({self._path}) changed while it was used")

    def give(self, piece: Piece) -> None:
        """Give the process a piece to encode, without waiting."""
        self._given.append(piece)
        with contextlib.suppress(BrokenPipeError):  # `take` will raise
            self._to.write(json.dumps([piece.source, piece.begin, piece.end]).encode() + b"\n")
            self._to.flush()

    def take(self, tokenizer: Tokenizer) -> Encoded:
        """Wait for the tokens of the next given piece."""
        digest, num_empty, content = self._answer()
        tokens = np.frombuffer(content, dtype=tokenizer.dtype)
        return Encoded(self._given.popleft(), digest, tokens, num_empty)

    def _answer(self) -> tuple[bytes, int, bytes]:
        """Return the next answer: a digest, a count and a content."""
        for _ in range(_WATCHED_SECONDS):
            if select.select([self._from], [], [], _LOOK_SECONDS)[0]:
                break
            self._on_wait()
        head = self._read(_HEAD.size)
        if len(head) == _HEAD.size:
            kind, digest, num_empty, size = _HEAD.unpack(head)
            content = self._read(size)
            if len(content) == size and kind == _GOOD:
                return digest, num_empty, content
            if len(content) == size:
                refused = ConfigError if kind == _BAD_CONFIG else DataError
                raise refused(content.decode(errors="replace"))
        self._on_wait()  # raises if the run was asked to stop
        raise self._ended(self._process.wait())

    def _read(self, size: int) -> bytes:
        """Return the next bytes, fewer at the end; unbuffered, as `select` sees no buffers."""
        content = bytearray()
        while part := os.read(self._from.fileno(), min(size - len(content), _READ_BYTES)):
            content += part
        return bytes(content)

    def _ended(self, status: int) -> Exception:
        takes = {
            -signal.SIGXCPU: "more processor time than a tokenizer should",
            -signal.SIGABRT: "more memory than a tokenizer should",
        }
        if status not in takes:
            return DataError(f"a process that tokenises ended with status {status}")
        of, why = "a few words", "a regular expression or a normalizer in it explodes"
        if self._given:
            piece = self._given[0]
            of = f"{printable(piece.source.path)} from byte {piece.begin} on"
            if piece.source.kind != "jsonl":
                why += ", or the text has no words: then give a line of JSON per document (.jsonl)"
        return ConfigError(
            f"data.tokenizer ({self._path}) must be another: for {of} it takes {takes[status]}; "
            f"{why}"
        )


_ENVIRONMENT = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}


def main(path: str, separator: str, parent: int) -> None:
    """Encode the pieces on standard input, one per line, until it is closed."""
    from hp_base.session import kill_when_parent_dies  # noqa: PLC0415 - of a process

    kill_when_parent_dies()
    if os.getppid() != parent:
        return
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # signals to all processes of a job are for its ranks
    bound = _bounds()
    bound(len(_TRIAL))
    try:
        tokenizer = load_tokenizer(path, separator)
        tokenizer.encode(_TRIAL)
    except BaseException as error:  # noqa: BLE001 - raised by the parent, panics of Rust as well
        why = f"data.tokenizer ({path}) must be another: on a few words it fails with {error}"
        _tell(_BAD_CONFIG, str(error) if isinstance(error, ConfigError) else why)
        return
    _tell(_GOOD, tokenizer.identity)
    for line in sys.stdin.buffer:
        source, begin, end = json.loads(line)
        piece = Piece(Source(*source), begin, end)
        bound(end - begin)
        try:
            made = encode_piece(piece, tokenizer, on_text=bound)
        except BaseException as error:  # noqa: BLE001 - raised by the parent, panics as well
            name = "" if isinstance(error, DataError) else f"{printable(piece.source.path)}: "
            _tell(_BAD_TEXT, f"{name}{error}")
        else:
            _tell(_GOOD, made.tokens.tobytes(), digest=made.digest, num_empty=made.num_empty)


def _tell(
    kind: int, content: bytes | str, *, digest: bytes = bytes(16), num_empty: int = 0
) -> None:
    """Write an answer to standard output."""
    raw = content.encode(errors="replace") if isinstance(content, str) else content
    out = sys.stdout.buffer
    out.write(_HEAD.pack(kind, digest, num_empty, len(raw)))
    out.write(raw)
    out.flush()


def _bounds() -> Callable[[int], None]:
    """Return a function that bounds time and memory of this process for a text of some length.

    Beyond the bounds the process is killed or aborted.
    """
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + _LEAST_BYTES

    def bound(length: int) -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = used.ru_utime + used.ru_stime + _LEAST_SECONDS + length / _CHARACTERS_PER_SECOND
        _limit(resource.RLIMIT_CPU, math.ceil(seconds))
        _limit(resource.RLIMIT_AS, memory + _BYTES_PER_CHARACTER * length)

    return bound


def _limit(what: int, most: int) -> None:
    hard = resource.getrlimit(what)[1]
    with contextlib.suppress(ValueError, OSError):  # a lower limit stays
        resource.setrlimit(what, (most, hard))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
