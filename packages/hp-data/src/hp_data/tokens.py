"""Tokens on disk, in files whose chunks are compared with their digests before use.

A folder has for each split ``NAME.bin``, ids one after the other, and ``NAME.sums``, a digest of 16
bytes for every 64 KiB of them; its index, ``index.json``, has the digests of the sums.
"""

import hashlib
import os
import weakref
from collections.abc import Iterable, Iterator
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from hp_base.atomic_write import replace_file
from hp_base.errors import DataError
from hp_base.folder import DamageError, open_file, opened_directory, read_span, read_whole
from hp_data.sources.source import printable
from hp_data.tokenizer import AnyArray, DType, TokenArray

CHUNK_BYTES = 1 << 16
"""Bytes of a chunk, which has one digest, and is read as a whole at its first use."""
SPLITS = ("train", "eval")

_DIGEST_BYTES = 16
_stamp = attrgetter("st_size", "st_mtime_ns", "st_ctime_ns")
"""Fields of a file's state that change when it is written."""
new_hasher = partial(hashlib.blake2b, digest_size=_DIGEST_BYTES)
"""Hash function of chunks, and of the digests of all chunks."""
INDEX = "index.json"

_INDEX_BYTES = 1 << 16
_Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
_Size = Annotated[int, Meta(ge=1, le=2**48)]
_Id = Annotated[int, Meta(ge=0, lt=2**32)]
_DType = Literal["uint8", "uint16", "uint32"]


class Split(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of tokens.

    Attributes:
        tokens: Number of tokens.
        digest: Digest of the number of tokens, their dtype and the digests of all chunks.
    """

    tokens: _Size
    digest: _Digest


class Index(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The description of the tokens of a folder.

    Attributes:
        format: Version of the folder's format.
        dtype: Dtype of the ids.
        vocab_size: One more than the largest possible id.
        separator: Id that ends a document.
        tokenizer: Identity of the tokenizer.
        eval_fraction: Share to hold out, as configured.
        source: Digest of the whole text.
        train: Training tokens.
        eval: Held-out tokens.
        seal: Digest of all other fields; see `sealed`.
    """

    format: Literal[2] = 2
    dtype: _DType
    vocab_size: _Size
    separator: _Id
    tokenizer: str
    eval_fraction: float
    source: _Digest
    train: Split
    eval: Split
    seal: str = ""


def read_index(folder: Path) -> Index:
    """Return the index of a folder, with every field of the right type and in its bounds.

    Raises:
        DataError: If there is no such index.
    """
    try:
        with opened_directory(folder) as directory:
            text = read_whole(directory, INDEX, limit=_INDEX_BYTES)
        return _decoded(text)
    except DamageError as error:
        raise DataError(f"{printable(folder)}: {printable(str(error))}") from None
    except OSError as error:
        raise DataError(f"{printable(folder)}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        path = printable(folder / INDEX)
        raise DataError(f"{path} is not an index: {printable(str(error))[:200]}") from None


def _decoded(text: bytes) -> Index:
    index = msgspec.json.decode(text, type=Index)
    if index != sealed(index) or index.separator >= index.vocab_size:
        raise DamageError(f"{INDEX} is not what was written")
    return index


def sealed(index: Index) -> Index:
    """Return the index with a digest of its fields, so that a change of a field is noticed."""
    plain = msgspec.structs.replace(index, seal="")
    digest = hashlib.blake2b(msgspec.json.encode(plain), digest_size=16).hexdigest()
    return msgspec.structs.replace(plain, seal=digest)


def write_index(folder: Path, index: Index) -> None:
    """Write the index of a folder whose tokens have been written."""
    replace_file(folder / INDEX, msgspec.json.encode(sealed(index)))


class TokenWriter:
    """A writer of a split, a piece at a time, which must be closed.

    Args:
        folder: Existing folder of the files.
        split: Name of the split, one of `SPLITS`.
        dtype: Dtype of the ids.
    """

    def __init__(self, folder: Path, split: str, *, dtype: DType) -> None:
        self._dtype = dtype
        self._file: BinaryIO = (folder / f"{split}.bin").open("xb")
        self._sums_path = folder / f"{split}.sums"
        self._sums = bytearray()
        self._pending = b""  # less than a chunk
        self.tokens = 0

    def write(self, tokens: TokenArray) -> None:
        """Append ids."""
        data = np.ascontiguousarray(tokens, dtype=self._dtype).tobytes()
        self._file.write(data)
        self.tokens += tokens.size
        pending = memoryview(self._pending + data)
        whole = len(pending) // CHUNK_BYTES * CHUNK_BYTES
        for begin in range(0, whole, CHUNK_BYTES):
            self._sums += new_hasher(pending[begin : begin + CHUNK_BYTES]).digest()
        self._pending = bytes(pending[whole:])

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def finish(self) -> Split:
        """Write the digests, and return the split, which must have at least one token."""
        if self._pending:
            self._sums += new_hasher(self._pending).digest()
        self._file.flush()
        self._sums_path.write_bytes(self._sums)
        digest = digest_of_split(self._sums, self.tokens, self._dtype)
        return Split(tokens=self.tokens, digest=digest)


def require_sequence(num_tokens: int, split: str, *, seq_len: int, where: str | Path) -> None:
    """Check that a split has at least one sequence.

    Args:
        num_tokens: Number of tokens of the split.
        split: Name of the split, one of `SPLITS`.
        seq_len: Length of a sequence.
        where: Path of the tokens, for the message.

    Raises:
        DataError: If it has none.
    """
    if num_tokens <= seq_len:
        hint = " (raise data.eval_fraction)" if split == "eval" else ""
        raise DataError(
            f"{printable(where)}: {num_tokens} tokens must exceed data.seq_len ({seq_len}){hint}"
        )


class TokenFile:
    """The ids of a split, each chunk compared with its digest when it is first read.

    The file is kept open: another file that gets its name later is not read. If the file is
    changed in place, chunks are compared again.

    Args:
        folder: Folder of the data.
        split: Name of the split, one of `SPLITS`.
        index: Index of the folder.

    Attributes:
        path: Path of the file of ids.
        size: Number of ids.
        sums: Digests of all chunks.

    Raises:
        DataError: If the files do not fit the index.
    """

    def __init__(self, folder: Path, split: str, index: Index) -> None:
        about = index.train if split == "train" else index.eval
        self.path, self.size = folder / f"{split}.bin", about.tokens
        self._dtype, self._vocab_size = np.dtype(index.dtype), index.vocab_size
        nbytes = self.size * self._dtype.itemsize
        num_chunks = -(-nbytes // CHUNK_BYTES)
        try:
            with opened_directory(folder) as directory:
                limit = num_chunks * _DIGEST_BYTES
                self.sums = read_whole(directory, f"{split}.sums", limit=limit)
                self._descriptor = open_file(directory, f"{split}.bin")
        except DamageError as error:
            raise DataError(f"{printable(folder)}: {error}") from None
        except OSError as error:
            raise DataError(f"{printable(folder)}: {error.strerror}") from None
        weakref.finalize(self, os.close, self._descriptor)
        if digest_of_split(self.sums, self.size, self._dtype) != about.digest:
            where = printable(folder / f"{split}.sums")
            raise DataError(f"{where} does not have the digest that {INDEX} says")
        self._stamp = _stamp(os.fstat(self._descriptor))
        if (found := self._stamp[0]) != nbytes:
            raise DataError(f"{printable(self.path)}: {found} bytes must equal {nbytes} of {INDEX}")
        self._seen = np.zeros(num_chunks, dtype=bool)

    def __getitem__(self, part: slice) -> AnyArray:
        """Return the ids of a range, one-dimensional, read-only.

        Raises:
            DataError: If a chunk is damaged; names file and chunk.
        """
        first, last, _ = part.indices(self.size)
        return next(self.rows([first], last - first))

    def rows(self, starts: Iterable[int], length: int) -> Iterator[AnyArray]:
        """Yield ranges of one length, each as `__getitem__` reads it.

        Args:
            starts: First token of each range.
            length: Number of tokens of a range, which must not go beyond the file.

        Yields:
            Ids, one-dimensional, read-only.

        Raises:
            DataError: If a chunk is damaged; names file and chunk.
        """
        nbytes = length * self._dtype.itemsize
        for start in starts:
            begin = start * self._dtype.itemsize
            if (stamp := _stamp(os.fstat(self._descriptor))) != self._stamp:
                self._stamp, self._seen[:] = stamp, False
            for chunk in range(begin // CHUNK_BYTES, -(-(begin + nbytes) // CHUNK_BYTES)):
                if not self._seen[chunk]:
                    self.verified(chunk)
            yield np.frombuffer(self._read(begin, begin + nbytes), dtype=self._dtype)

    def places_of(self, token: int) -> NDArray[np.int64]:
        """Return the places of a token in the whole file, ascending; all chunks are compared.

        Raises:
            DataError: If a chunk is damaged; names file and chunk.
        """
        per_chunk = CHUNK_BYTES // self._dtype.itemsize
        found = [
            np.flatnonzero(np.frombuffer(self.verified(chunk), dtype=self._dtype) == token)
            + chunk * per_chunk
            for chunk in range(self.num_chunks)
        ]
        return np.concatenate(found).astype(np.int64)

    @property
    def num_chunks(self) -> int:
        """Return the number of chunks."""
        return int(self._seen.size)

    def verified(self, chunk: int) -> bytes:
        """Return the bytes of a chunk, after comparing them with its digest.

        Raises:
            DataError: If the chunk is damaged.
        """
        end = min((chunk + 1) * CHUNK_BYTES, self.size * self._dtype.itemsize)
        data = self._read(chunk * CHUNK_BYTES, end)
        begin = chunk * _DIGEST_BYTES
        if new_hasher(data).digest() != self.sums[begin : begin + _DIGEST_BYTES]:
            raise DataError(f"{self._place(chunk)} is not what was written")
        largest = int(np.frombuffer(data, dtype=self._dtype).max())
        if largest >= self._vocab_size:
            raise DataError(
                f"{self._place(chunk)}: token ({largest}) must be below vocab_size "
                f"({self._vocab_size})"
            )
        self._seen[chunk] = True
        return data

    def _read(self, begin: int, end: int) -> bytes:
        try:
            data = read_span(self._descriptor, begin, end)
        except OSError as error:
            raise DataError(f"{printable(self.path)}: {error.strerror}") from None
        if len(data) < end - begin:
            chunk = (begin + len(data)) // CHUNK_BYTES
            raise DataError(f"{self._place(chunk)} is cut off")
        return data

    def _place(self, chunk: int) -> str:
        """Return the name of a chunk, for a message."""
        return f"{printable(self.path)}: chunk {chunk} of {self._seen.size}"


def digest_of_split(sums: bytes | bytearray, tokens: int, dtype: DType) -> str:
    """Return the digest of all tokens of a split: their number, their dtype and all chunks."""
    return new_hasher(f"{tokens} {dtype}\n".encode() + sums).hexdigest()
