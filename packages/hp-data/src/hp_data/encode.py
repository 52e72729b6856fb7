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

import codecs
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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import IO, NamedTuple, Self

import numpy as np

from hp_base.environment import usable_cores
from hp_base.errors import ConfigError, DataError
from hp_data import corpus
from hp_data.corpus import (
    cut,
    plain_lines,
    plain_text,
    read_piece,
    require_kind,
    text_of_stream,
    texts_of,
)
from hp_data.sources.compressed import Window, read_stream
from hp_data.sources.formats import COLUMNS, IDS, documents_of
from hp_data.sources.source import Opened, Piece, Source, opened_source, printable
from hp_data.sources.token_files import read_ids
from hp_data.tokenizer import TokenArray, Tokenizer, load_tokenizer
from hp_data.tokens import new_hasher

_HEAD = struct.Struct("<B16sQQQ")
_GOOD, _BAD_TEXT, _BAD_CONFIG, _MORE = range(4)
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
    """The tokens of a piece, or the next of several parts of them.

    Attributes:
        piece: Piece that was encoded.
        digest: Digest of the bytes of the piece, or of its documents; of all parts in the last.
        tokens: Token ids, a separator after every document that ends in the piece; one-dimensional.
        num_empty: Number of documents without tokens in a file of records, which are left out.
        nbytes: Number of bytes of the file that were read for them.
        is_last: Whether it is the last part of its piece.
    """

    piece: Piece
    digest: bytes
    tokens: TokenArray
    num_empty: int
    nbytes: int
    is_last: bool = True


def count_processes(sources: Sequence[Source], tokenizer: Tokenizer) -> int:
    """Return the number of processes worth starting for files; 0: this process encodes them.

    Formats that libraries read have a process in any case, whose memory is bounded.
    """
    least = int(any(not source.is_plain for source in sources))
    if tokenizer.is_cheap:
        return least
    total = sum(source.size for source in sources)
    return max(1, min(usable_cores(), total // _BYTES_PER_PROCESS))


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
            yield from encode_parts(piece, tokenizer)
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
                yield from given.popleft().take(tokenizer)
            helper.give(piece)
            given.append(helper)
        for helper in given:
            yield from helper.take(tokenizer)


def encode_parts(
    piece: Piece, tokenizer: Tokenizer, *, on_text: Callable[[int], None] = lambda _: None
) -> Iterator[Encoded]:
    """Read a piece and encode it, a bounded part after the other; see `encode_piece`."""
    source = piece.source
    if source.is_plain:
        yield encode_piece(piece, tokenizer, on_text=on_text)
        return
    with opened_source(source.path, source.size) as opened:
        parts = _Parts(piece, tokenizer)
        if source.format in IDS:
            yield from _ids(parts, opened)
        elif source.format == "text":
            yield from _long_text(parts, opened, on_text)
        else:
            yield from _documents(parts, opened, on_text)


class _Parts:
    """The tokens of a piece that were not yet given on, and the digest so far.

    Args:
        piece: Piece that is read.
        tokenizer: Tokenizer of the ids.
    """

    def __init__(self, piece: Piece, tokenizer: Tokenizer) -> None:
        self.piece, self.tokenizer = piece, tokenizer
        self.end = np.full(1, tokenizer.separator, dtype=tokenizer.dtype)
        self.digest, self.num_empty, self._nbytes = new_hasher(), 0, 0
        self._tokens: list[TokenArray] = []
        self._kept, self._told = 0, 0

    def add(self, *tokens: TokenArray) -> None:
        """Keep more tokens."""
        self._tokens += tokens
        self._kept += sum(each.nbytes for each in tokens) + 64  # an array of its own

    @property
    def is_full(self) -> bool:
        """Tell whether what is kept is to be given on."""
        return self._kept >= corpus.PIECE_BYTES

    def read(self, nbytes: int) -> None:
        """Count bytes of the file."""
        self._nbytes += nbytes

    def take(self, *, is_last: bool = False) -> Encoded:
        """Return what is kept, and keep nothing of it."""
        tokens = np.concatenate(self._tokens) if self._tokens else self.end[:0]
        nbytes = self.piece.end - self.piece.begin - self._told if is_last else self._nbytes
        made = Encoded(
            self.piece, self.digest.digest(), tokens, self.num_empty, max(0, nbytes), is_last
        )
        self._told += nbytes
        self._tokens, self._kept, self.num_empty, self._nbytes = [], 0, 0, 0
        return made


def _documents(parts: _Parts, opened: Opened, on_text: Callable[[int], None]) -> Iterator[Encoded]:
    """Encode the documents of a file of records."""
    source, tokenizer = parts.piece.source, parts.tokenizer
    for _, text in documents_of(parts.piece, opened, on_read=parts.read):
        raw = text.encode(errors="replace")
        parts.digest.update(len(raw).to_bytes(8, "little"))
        parts.digest.update(raw)
        on_text(len(text))
        tokens = tokenizer.encode(text) if text else parts.end[:0]
        _require_text(source, tokens, tokenizer)
        parts.num_empty += not tokens.size
        parts.add(tokens, parts.end[: tokens.size])
        if parts.is_full:
            yield parts.take()
    yield parts.take(is_last=True)


def _long_text(parts: _Parts, opened: Opened, on_text: Callable[[int], None]) -> Iterator[Encoded]:
    """Encode a compressed document, cut where a plain file would be."""
    source, tokenizer = parts.piece.source, parts.tokenizer

    def place(window: Opened, at: int) -> int:
        if tokenizer.is_cheap:
            return cut(window, at, source)
        return _seam(window, at, source, tokenizer, step=corpus.PIECE_BYTES)

    window = Window(read_stream(source, opened, on_read=parts.read))
    for begin, raw, is_last in text_of_stream(window, place):
        parts.digest.update(raw)
        plain = raw if begin else raw.removeprefix(codecs.BOM_UTF8)
        if not begin:
            require_kind(source, plain)
        text = plain_text(source, begin, plain)
        on_text(len(text))
        tokens = tokenizer.encode(text, goes_on=begin > 0) if text else parts.end[:0]
        _require_text(source, tokens, tokenizer)
        parts.add(tokens)
        if not is_last:
            yield parts.take()
    parts.add(parts.end)
    yield parts.take(is_last=True)


def _ids(parts: _Parts, opened: Opened) -> Iterator[Encoded]:
    """Take over ids that were made elsewhere, a separator after every document.

    Raises:
        DataError: If an id is not one of the tokenizer.
    """
    source, tokenizer = parts.piece.source, parts.tokenizer
    number, begun = 0, False
    for ids, is_end in read_ids(source, opened):
        parts.digest.update(ids.tobytes() + bytes([is_end]))
        parts.read(ids.nbytes)
        wrong = np.flatnonzero((ids < 0) | (ids >= tokenizer.vocab_size))
        if wrong.size:
            raise DataError(
                f"{printable(source.path)}: token {number + int(wrong[0])} ({ids[wrong[0]]}) must "
                f"be below the vocabulary ({tokenizer.vocab_size}) of data.tokenizer"
            )
        number += ids.size
        begun = begun or ids.size > 0
        parts.add(ids.astype(tokenizer.dtype))
        if is_end and begun:
            parts.add(parts.end[: int(ids[-1] != tokenizer.separator)])
            begun = False
        if parts.is_full:
            yield parts.take()
    yield parts.take(is_last=True)


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
    return Encoded(piece, digest, tokens, num_empty, piece.end - piece.begin)


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
    with opened_source(source.path, source.size) as opened:
        begin, end = (
            _seam(opened, at, source, tokenizer, step=step) for at in (piece.begin, piece.end)
        )
        return begin, opened.span(begin, end)


def _seam(opened: Opened, at: int, source: Source, tokenizer: Tokenizer, *, step: int) -> int:
    """Return the first place from a byte on where the document is cut, or its end."""
    if at <= 0 or not opened.reaches(at):
        return max(0, min(at, opened.size))
    for begin in range(at, at + LONGEST_BYTES, step):
        if not opened.reaches(begin):
            return opened.size
        found = next(_seams_from(opened, begin, tokenizer, step=step), None)
        if found is not None:
            return found
    if opened.reaches(at + LONGEST_BYTES):
        raise DataError(
            f"{printable(source.path)}: data.tokenizer must end a word in the {LONGEST_BYTES} "
            f"bytes from byte {at} on; give the text as a line of JSON per document (.jsonl)"
        )
    return opened.size


def _seams_from(opened: Opened, at: int, tokenizer: Tokenizer, *, step: int) -> Iterator[int]:
    """Yield the places in the next bytes where the text may be cut."""
    first = max(0, at - 4 * _AROUND)
    last = at + min(_SCAN_BYTES, step)
    raw = opened.span(first, last + 4 * _AROUND)
    for places in _PLACES:
        for place in islice(re.compile(places).finditer(raw, at - first, last - first), _TRIED):
            left, right = (
                plain_lines(part.decode(errors="replace"))
                for part in (raw[: place.end()], raw[place.end() :])
            )
            if all(tokenizer.joins(left[-count:], right[:_AROUND]) for count in _BEGINNINGS):
                yield first + place.end()


class _Answer(NamedTuple):
    """An answer of a process: a part of a piece, or its identity as content."""

    kind: int
    digest: bytes
    num_empty: int
    nbytes: int
    content: bytes


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
        return self._answer().content.decode()

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

    def take(self, tokenizer: Tokenizer) -> Iterator[Encoded]:
        """Wait for the tokens of the next given piece, part after part."""
        is_last = False
        while not is_last:
            kind, digest, num_empty, nbytes, content = self._answer()
            is_last = kind == _GOOD
            tokens = np.frombuffer(content, dtype=tokenizer.dtype)
            yield Encoded(self._given[0], digest, tokens, num_empty, nbytes, is_last)
        self._given.popleft()

    def _answer(self) -> "_Answer":
        """Return the next answer."""
        for _ in range(_WATCHED_SECONDS):
            if select.select([self._from], [], [], _LOOK_SECONDS)[0]:
                break
            self._on_wait()
        head = self._read(_HEAD.size)
        if len(head) == _HEAD.size:
            kind, digest, num_empty, nbytes, size = _HEAD.unpack(head)
            content = self._read(size)
            if len(content) == size and kind in (_GOOD, _MORE):
                return _Answer(kind, digest, num_empty, nbytes, content)
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
        source = self._given[0].source if self._given else None
        if source is not None and not source.is_plain and source.format in COLUMNS:
            what = takes.get(status, "").replace("tokenizer", "file") or f"ends with {status}"
            return DataError(
                f"{printable(source.path)} must be a file of {source.format}: reading it "
                f"{'takes ' * (status in takes)}{what}"
            )
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


_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
    # Memory that Arrow reserves and does not use would count.
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "2",
}


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
        try:
            for made in _bounded(encode_parts(piece, tokenizer, on_text=bound), piece, bound):
                _tell(_GOOD if made.is_last else _MORE, made.tokens.tobytes(), made)
        except BaseException as error:  # noqa: BLE001 - raised by the parent, panics as well
            name = "" if isinstance(error, DataError) else f"{printable(piece.source.path)}: "
            _tell(_BAD_TEXT, f"{name}{error if str(error) else type(error).__name__}")


def _bounded(
    parts: Iterator[Encoded], piece: Piece, bound: Callable[[int], None]
) -> Iterator[Encoded]:
    """Yield parts, each made within bounds of its own."""
    length = piece.end - piece.begin if piece.source.is_plain else corpus.PIECE_BYTES
    bound(length)
    for part in parts:
        yield part
        bound(length)


def _tell(kind: int, content: bytes | str, part: Encoded | None = None) -> None:
    """Write an answer to standard output."""
    raw = content.encode(errors="replace") if isinstance(content, str) else content
    out = sys.stdout.buffer
    about = (bytes(16), 0, 0) if part is None else (part.digest, part.num_empty, part.nbytes)
    out.write(_HEAD.pack(kind, *about, len(raw)))
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
