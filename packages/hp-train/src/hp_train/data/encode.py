"""Pieces of text to ids, here or in other processes, always in order and always the same.

The processes are new interpreters without torch: what is forked from a rank would inherit locks of
threads that it does not have. They end with the pipe that they read from.
"""

import contextlib
import json
import os
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import cycle
from typing import IO, NamedTuple, Self

import numpy as np

from hp_train.data.corpus import Piece, Source, printable, read_piece, texts_of
from hp_train.data.tokenizer import TokenArray, Tokenizer, load_tokenizer
from hp_train.data.tokens import new_hasher
from hp_train.errors import DataError

_HEAD = struct.Struct("<?16sQ")
_AHEAD = 2  # pieces that each process has been given
_BYTES_PER_PROCESS = 1 << 22  # a second's work for a tokenizer of Hugging Face


class Encoded(NamedTuple):
    """What became of a piece.

    Attributes:
        piece: The piece.
        digest: Digest of the piece's bytes.
        tokens: Token ids, a separator after every document that ends in the piece; one-dimensional.
    """

    piece: Piece
    digest: bytes
    tokens: TokenArray


def count_processes(total_bytes: int, tokenizer: Tokenizer) -> int:
    """Processes worth starting for so much text; 0: none beside this one."""
    if tokenizer.is_cheap:
        return 0
    wanted = min(len(os.sched_getaffinity(0)), total_bytes // _BYTES_PER_PROCESS)
    return wanted if wanted > 1 else 0


def encode_all(
    pieces: Iterable[Piece], tokenizer: Tokenizer, *, num_processes: int
) -> Iterator[Encoded]:
    """Encode pieces, of which a few for each process are in memory at a time.

    Args:
        pieces: Pieces to encode, in order.
        tokenizer: Tokenizer that gives the ids.
        num_processes: Number of processes to start; 0: this one does it.

    Yields:
        The pieces in order.

    Raises:
        DataError: When a piece cannot be read or a process has died.
    """
    if not num_processes:
        for piece in pieces:
            yield encode_piece(piece, tokenizer)
        return
    with contextlib.ExitStack() as stack:
        helpers = [stack.enter_context(_Helper(tokenizer)) for _ in range(num_processes)]
        given: deque[_Helper] = deque()
        for helper, piece in zip(cycle(helpers), pieces):
            if len(given) == num_processes * _AHEAD:
                yield given.popleft().take()
            helper.give(piece)
            given.append(helper)
        for helper in given:
            yield helper.take()


def encode_piece(piece: Piece, tokenizer: Tokenizer) -> Encoded:
    """Read a piece and encode it.

    Raises:
        DataError: When it cannot be read or is no text.
    """
    begin, raw = read_piece(piece)
    source = piece.source
    end = np.full(1, tokenizer.separator, dtype=tokenizer.dtype)
    parts: list[TokenArray] = []
    for text in texts_of(source, begin, raw):
        if text:
            parts.append(tokenizer.encode(text))
            if source.kind == "jsonl":
                parts.append(end)
    if source.kind != "jsonl" and piece.is_last:
        parts.append(end)
    tokens = np.concatenate(parts) if parts else end[:0]
    return Encoded(piece, new_hasher(raw).digest(), tokens)


class _Helper:
    """A process that encodes what it is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._dtype = tokenizer.dtype
        self._given: deque[Piece] = deque()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        # -P: a file of the folder that this was started in must not be taken for a module.
        command = [sys.executable, "-P", "-m", __name__, tokenizer.path, tokenizer.identity]
        self._process = subprocess.Popen(  # noqa: S603 - this very module
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
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

    def give(self, piece: Piece) -> None:
        """Have a piece encoded; it does not wait."""
        self._given.append(piece)
        with contextlib.suppress(BrokenPipeError):  # what is taken will tell
            self._to.write(json.dumps([piece.source, piece.begin, piece.end]).encode() + b"\n")
            self._to.flush()

    def take(self) -> Encoded:
        """Wait for the next of what was given."""
        piece = self._given.popleft()
        head = self._from.read(_HEAD.size)
        if len(head) == _HEAD.size:
            is_good, digest, size = _HEAD.unpack(head)
            content = self._from.read(size)
            if len(content) == size and is_good:
                return Encoded(piece, digest, np.frombuffer(content, dtype=self._dtype))
            if len(content) == size:
                raise DataError(content.decode(errors="replace"))
        raise DataError(f"a process that tokenises ended with status {self._process.wait()}")


def main(path: str, identity: str, parent: int) -> None:
    """Encode what stands on standard input, a piece per line, until that is closed."""
    from hp_train.base.lifetime import kill_when_parent_dies  # noqa: PLC0415 - of a process

    kill_when_parent_dies()
    if os.getppid() != parent:
        return
    tokenizer = load_tokenizer(path)
    if tokenizer.identity != identity:
        raise SystemExit(3)  # it has changed meanwhile
    out = sys.stdout.buffer
    for line in sys.stdin.buffer:
        source, begin, end = json.loads(line)
        piece = Piece(Source(*source), begin, end)
        try:
            _, digest, tokens = encode_piece(piece, tokenizer)
            content = tokens.tobytes()
            out.write(_HEAD.pack(True, digest, len(content)))
        except Exception as error:  # noqa: BLE001 - told by the process that asked
            name = "" if isinstance(error, DataError) else f"{printable(piece.source.path)}: "
            content = f"{name}{error}".encode(errors="replace")
            out.write(_HEAD.pack(False, bytes(16), len(content)))
        out.write(content)
        out.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
