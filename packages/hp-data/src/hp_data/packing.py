"""Whole documents packed into sequences of one length: best fit, with a bounded look-ahead.

A document that is shorter than a sequence is never cut. A longer one gives whole sequences, and its
rest is packed as a document of that length. Of a window of documents, the longest goes first, each
into the fullest sequence that has room for it ("Fewer Truncations Improve Language Modeling",
arXiv:2404.10830); the rest of a sequence is padding. The result is a function of the tokens, the
length and the look-ahead alone, so sequence ``i`` is the same in every layout, and a position in
the data is a count of sequences.

Shape symbols: P pieces, Q sequences.
"""

import hashlib
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LOOK_AHEAD = 1024
"""Length of a window of documents in sequences: the farthest that a document may move."""


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
