"""The order in which sequences are drawn from token files.

Sequence ``g`` of a run (its global index, counted over the whole run and all ranks) is a pure
function of the seed and of ``g``: no layout, batch size or restart changes it.

Whole documents are packed into sequences of one length by best fit, with a bounded look-ahead. A
document that is shorter than a sequence is never cut. A longer one gives whole sequences, and its
rest is packed as a document of that length. Of a window of documents, the longest goes first, each
into the fullest sequence that has room for it ("Fewer Truncations Improve Language Modeling",
arXiv:2404.10830); the rest of a sequence is padding. The result is a function of the tokens, the
length and the look-ahead alone, so sequence ``i`` is the same in every layout, and a position in
the data is a count of sequences.

Shape symbols: B sequences, S positions, P pieces, Q sequences of a split.
"""

import functools
import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hp_base.seeds import derive_seed
from hp_data.tokenizer import AnyArray
from hp_data.tokens import TokenFile, read_index, require_sequence

LOOK_AHEAD = 1024
"""Length of a window of documents in sequences: the farthest that a document may move."""


class Batch(NamedTuple):
    """Some sequences, on the CPU.

    Attributes:
        tokens: Token ids, int64 [B, S].
        targets: Next token of each, int64 [B, S]; -1 where it belongs to another document.
        documents: Lengths of the documents in each sequence, in order; padding counts as one.
        padding: Mask of positions that are padding, bool [B, S]; None: there are none.
    """

    tokens: Tensor
    targets: Tensor
    documents: tuple[tuple[int, ...], ...]
    padding: Tensor | None = None


class Piece(NamedTuple):
    """A document of a sequence of whole documents, or the part of one that fills a sequence.

    Attributes:
        sequence: Global index of the sequence.
        start: First position in the sequence.
        begin: First token in the split.
        length: Number of tokens, the separator included.
        has_next: Whether a token of its document follows it.
    """

    sequence: int
    start: int
    begin: int
    length: int
    has_next: bool

    def num_targets(self, *, ahead: int = 0) -> int:
        """Return the number of targets to learn, `ahead` tokens further than the next one."""
        return max(0, self.length - (not self.has_next) - ahead)


@dataclass(frozen=True, eq=False)
class Packs:
    """The pieces of the split in each sequence.

    Attributes:
        begins: First token of each piece in the split, int64 [P], sequence after sequence.
        lengths: Number of tokens of each piece, separators included, int64 [P].
        has_next: Whether the document goes on after a piece, bool [P].
        first: First piece of each sequence, and P, int64 [Q + 1].
        seq_len: Length of whole sequences.
    """

    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]
    has_next: NDArray[np.bool_]
    first: NDArray[np.int64]
    seq_len: int

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences, Q."""
        return self.first.size - 1

    @property
    def density(self) -> float:
        """Return the share of positions that are not padding."""
        return int(self.lengths.sum()) / max(1, self.num_sequences * self.seq_len)

    def digest(self, of_tokens: str) -> str:
        """Return the digest of all sequences, given the digest of the tokens of the split."""
        hasher = hashlib.blake2b(f"{of_tokens} {self.seq_len}\n".encode(), digest_size=16)
        for array in (self.begins, self.lengths, self.first):
            hasher.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return hasher.hexdigest()

    def pieces(self, sequence: int) -> slice:
        """Return the pieces of a sequence."""
        return slice(int(self.first[sequence]), int(self.first[sequence + 1]))

    def num_targets(self, sequence: int, *, ahead: int) -> int:
        """Return the number of targets to learn in a sequence.

        Args:
            sequence: Index of the sequence.
            ahead: Distance of the targets beyond the next token.
        """
        pieces = self.pieces(sequence)
        targets = self.lengths[pieces] - ~self.has_next[pieces] - ahead
        return int(np.maximum(targets, 0).sum())


@dataclass(frozen=True)
class Dataset:
    """Sequences of one split, addressed by global index.

    Attributes:
        tokens: Ids of the split, one-dimensional, compared with their digests when they are read.
        seq_len: Length of whole sequences, S.
        seed: Seed of the order; None keeps the order of the file.
        digest: Digest of all tokens, which they must have when they are read: two runs read the
            same data exactly if their digests agree.
        separator: Token that ends a document; None: each sequence counts as one document.
        packs: Documents of each sequence; None: text is cut wherever a sequence is full.
    """

    tokens: NDArray[Any] | TokenFile
    seq_len: int
    seed: int | None
    digest: str
    separator: int | None
    packs: Packs | None = None

    @classmethod
    def open(
        cls,
        directory: Path,
        split: str,
        *,
        seq_len: int,
        seed: int | None,
        separate: bool = True,
        packing: Literal["stream", "best_fit", "planned"] = "stream",
    ) -> "Dataset":
        """Open a split written by :func:`hp_data.preparation.prepare`.

        Args:
            directory: Directory of the files.
            split: ``"train"`` or ``"eval"``.
            seq_len: Length of whole sequences, S.
            seed: Seed of the order; None keeps that of the file.
            separate: Whether documents are kept apart.
            packing: Value of ``data.packing``. All but "stream" read all tokens, to find the ends
                of documents, and have sequences of whole documents.

        Raises:
            DataError: If the file does not fit its index, or has fewer tokens than one sequence.
        """
        index = read_index(directory)
        tokens = TokenFile(directory, split, index)
        require_sequence(tokens.size, split, seq_len=seq_len, where=tokens.path)
        digest = (index.train if split == "train" else index.eval).digest
        if packing == "stream":
            return cls(tokens, seq_len, seed, digest, index.separator if separate else None)
        ends = tokens.places_of(index.separator)
        packs = best_fit(ends, num_tokens=tokens.size, seq_len=seq_len)
        return cls(tokens, seq_len, seed, packs.digest(digest), index.separator, packs)

    @property
    def num_sequences(self) -> int:
        """Return the number of sequences in one pass over the split."""
        if self.packs is not None:
            return self.packs.num_sequences
        return int((self.tokens.size - 1) // self.seq_len)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - two permutations of one long-lived object
    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self.seed is None:
            return np.arange(self.num_sequences)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, "epoch", epoch))
        order = torch.randperm(self.num_sequences, generator=generator)
        return order.numpy()

    def __hash__(self) -> int:
        return id(self)

    def batch(self, sequence_index: range) -> Batch:
        """Read some sequences.

        Args:
            sequence_index: Global indices; after the last sequence a new pass begins, in another
                order.
        """
        if self.packs is not None:
            return self._packed(self.packs, sequence_index)
        rows = np.empty((len(sequence_index), self.seq_len + 1), dtype=np.int64)
        for row, tokens_of_row in zip(rows, self._tokens(sequence_index), strict=True):
            row[:] = tokens_of_row
        block = torch.from_numpy(rows)
        tokens, targets = block[:, :-1].contiguous(), block[:, 1:].contiguous()
        whole = ((self.seq_len,),) * len(rows)
        if self.separator is None:
            return Batch(tokens, targets, whole)
        # The token after a separator begins another document, and cannot be predicted.
        # Not in place: for a single sequence, both are views of the same memory.
        targets = targets.masked_fill(tokens == self.separator, -1)
        return Batch(tokens, targets, self._lengths(rows[:, :-1]))

    def num_targets(self, sequence_index: range, *, ahead: int = 0) -> int:
        """Return the number of targets to learn in some sequences.

        Args:
            sequence_index: Global indices.
            ahead: Distance of the targets beyond the next token.
        """
        if self.packs is not None:
            places = self._places(sequence_index)
            return sum(self.packs.num_targets(place, ahead=ahead) for place in places)
        if self.separator is None:
            return len(sequence_index) * max(0, self.seq_len - ahead)
        total = 0
        for tokens in self._tokens(sequence_index):
            ends = np.flatnonzero(tokens[:-1] == self.separator)
            # Without the separator, and without the last tokens, which have no target so far ahead.
            lengths = np.diff(ends, prepend=-1, append=self.seq_len) - 1
            total += int(np.maximum(lengths - ahead, 0).sum())
        return total

    def pieces(self, sequence_index: range) -> list[Piece]:
        """Return the documents of some sequences of whole documents, without reading tokens.

        Args:
            sequence_index: Global indices.
        """
        assert self.packs is not None
        found: list[Piece] = []
        for sequence, place in zip(sequence_index, self._places(sequence_index), strict=True):
            found += self._pieces_at(self.packs, sequence, place)
        return found

    def read(self, piece: Piece) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens of a piece, and the target of each; -1: none."""
        ids = self.tokens[piece.begin : piece.begin + piece.length + piece.has_next]
        targets = np.full(piece.length, -1, np.int64)
        targets[: ids.size - 1] = ids[1:]
        return ids[: piece.length].astype(np.int64), targets

    def _pieces_at(self, packs: Packs, sequence: int, place: int) -> Iterator[Piece]:
        """Yield the pieces of the sequence at a place of the split, with its global index."""
        pieces, start = packs.pieces(place), 0
        of_each = (packs.begins[pieces], packs.lengths[pieces], packs.has_next[pieces])
        for begin, length, more in zip(*(array.tolist() for array in of_each), strict=True):
            yield Piece(sequence, start, begin, length, more)
            start += length

    def _tokens(self, sequence_index: range) -> Iterator[AnyArray]:
        """Return the tokens of each sequence and the next token, as they are stored."""
        places, length = self._places(sequence_index), self.seq_len + 1
        starts = [place * self.seq_len for place in places]
        if isinstance(self.tokens, TokenFile):
            return self.tokens.rows(starts, length)
        return (self.tokens[start : start + length] for start in starts)

    def _places(self, sequence_index: range) -> list[int]:
        """Return the places in the split of sequences with these global indices."""
        epochs, offsets = np.divmod(np.asarray(sequence_index), self.num_sequences)
        places = np.empty_like(offsets)
        # numpy's unique would import its masked arrays, in every rank.
        for epoch in sorted(set(epochs.tolist())):
            places[epochs == epoch] = self._order(epoch)[offsets[epochs == epoch]]
        found: list[int] = places.tolist()
        return found

    def _packed(self, packs: Packs, sequence_index: range) -> Batch:
        """Read sequences of whole documents, filled up with separators that are no targets."""
        assert self.separator is not None
        shape = len(sequence_index), self.seq_len
        tokens, targets = np.full(shape, self.separator, np.int64), np.full(shape, -1, np.int64)
        padding, documents = np.ones(shape, dtype=bool), []
        for row, place in enumerate(self._places(sequence_index)):
            lengths, at = [], 0
            for piece in self._pieces_at(packs, row, place):
                at = piece.start + piece.length
                tokens[row, piece.start : at], targets[row, piece.start : at] = self.read(piece)
                lengths.append(piece.length)
            padding[row, :at] = False
            documents.append((*lengths, self.seq_len - at) if at < self.seq_len else tuple(lengths))
        is_padding = torch.from_numpy(padding) if padding.any() else None
        return Batch(
            torch.from_numpy(tokens), torch.from_numpy(targets), tuple(documents), is_padding
        )

    def _lengths(self, rows: NDArray[np.int64]) -> tuple[tuple[int, ...], ...]:
        """Return the lengths of the documents of sequences [B, S], separators included."""
        is_last = rows == self.separator
        is_last[:, -1] = True
        # Sequences follow each other, and each ends with a document.
        documents = iter(np.diff(np.flatnonzero(is_last), prepend=-1).tolist())
        return tuple([tuple(islice(documents, count)) for count in is_last.sum(axis=1).tolist()])


def best_fit(
    ends: NDArray[np.int64], *, num_tokens: int, seq_len: int, look_ahead: int = LOOK_AHEAD
) -> Packs:
    """Pack the documents of a split.

    Args:
        ends: Places of the separators, ascending, int64.
        num_tokens: Number of tokens of the split; those after the last separator are a document as
            well.
        seq_len: Length of whole sequences.
        look_ahead: Length of a window of documents that are packed together, in sequences.
    """
    begins = np.concatenate(([0], ends + 1)).astype(np.int64)
    sizes = np.diff(begins, append=num_tokens)
    begins, sizes = begins[sizes > 0], sizes[sizes > 0]
    whole = sizes // seq_len
    # The whole sequences of a document come first, and its rest last.
    count = whole + (sizes % seq_len > 0)
    of_document = np.repeat(np.arange(sizes.size), count)
    place = np.arange(of_document.size) - np.repeat(np.cumsum(count) - count, count)
    piece_begins = begins[of_document] + place * seq_len
    lengths = np.minimum(sizes[of_document] - place * seq_len, seq_len)
    has_next = place + 1 < count[of_document]
    window = piece_begins // (look_ahead * seq_len)
    cuts = np.flatnonzero(np.diff(window)) + 1
    order: list[int] = []
    filled: list[int] = []
    for low, high in zip([0, *cuts.tolist()], [*cuts.tolist(), lengths.size], strict=True):
        for pieces in _packed(lengths[low:high], seq_len):
            order += (low + piece for piece in pieces)
            filled.append(len(pieces))
    chosen = np.asarray(order, dtype=np.int64)
    first = np.cumsum([0, *filled], dtype=np.int64)
    return Packs(piece_begins[chosen], lengths[chosen], has_next[chosen], first, seq_len)


def _packed(lengths: NDArray[np.int64], seq_len: int) -> list[list[int]]:
    """Return the pieces of each sequence of a window, in a sequence in the order of the text."""
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []  # free tokens and index of each sequence, ascending
    longest_first = np.argsort(-lengths, kind="stable").tolist()
    sizes = lengths.tolist()
    for piece in longest_first:
        size = sizes[piece]
        at = bisect_left(room, (size, -1))
        if at == len(room):
            left, sequence = seq_len, len(sequences)
            sequences.append([])
        else:
            left, sequence = room.pop(at)
        sequences[sequence].append(piece)
        if left > size:
            insort(room, (left - size, sequence))
    # In the order of their first documents: without a seed, sequences follow the text.
    return sorted(sorted(pieces) for pieces in sequences)
