"""Tokens for a run that nobody trains: as many documents in every sequence, the same in each.

Every rank then reads sequences of the same documents, so that ranks of other data run the same
program. The files are those of any run (`hp_data`), and are read as such.
"""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hp_data import Tokenizer
from hp_data.tokens import SPLITS, Index, TokenWriter, write_index

_SEQUENCES = 64
_TOKENS_PER_DOCUMENT = 1024


def count_documents(seq_len: int) -> int:
    """Return how many documents a sequence has, unless something else is asked for."""
    return max(1, seq_len // _TOKENS_PER_DOCUMENT)


def document_lengths(seq_len: int, num_documents: int) -> list[int]:
    """Return lengths of a sequence's documents: in the ratio of 1, 1/2, 1/3, ...; longest first.

    Args:
        seq_len: Tokens of the sequence, the sum of the lengths.
        num_documents: Number of documents, at most `seq_len`.

    >>> document_lengths(4096, 4)
    [1966, 983, 655, 492]
    """
    whole = sum(1 / rank for rank in range(1, num_documents + 1))
    spare = seq_len - num_documents
    lengths = [1 + int(spare / whole / rank) for rank in range(1, num_documents + 1)]
    lengths[0] += seq_len - sum(lengths)
    return lengths


def write_tokens(folder: Path, tokenizer: Tokenizer, lengths: Sequence[int]) -> None:
    """Write both splits into an empty folder.

    Args:
        folder: Existing folder for the tokens.
        tokenizer: Tokenizer of the run: it decides the dtype of ids, and which one ends a document.
        lengths: Tokens of the documents of each sequence.
    """
    tokens = _sequence(tokenizer, lengths)
    splits = {}
    for name in SPLITS:
        with closing(TokenWriter(folder, name, dtype=tokenizer.dtype)) as writer:
            for _ in range(_SEQUENCES):
                writer.write(tokens)
            writer.write(tokens[:1])  # the last target
            splits[name] = writer.finish()
    index = Index(
        dtype=tokenizer.dtype.name,  # type: ignore[arg-type] # one of three
        vocab_size=tokenizer.vocab_size,
        separator=tokenizer.separator,
        tokenizer=tokenizer.identity,
        eval_fraction=0.0,
        source="0" * 32,
        train=splits["train"],
        eval=splits["eval"],
    )
    write_index(folder, index)


def _sequence(tokenizer: Tokenizer, lengths: Sequence[int]) -> NDArray[np.unsignedinteger]:
    """Return one sequence: the last of each document but the last is the separator."""
    plain = next(i for i in range(tokenizer.vocab_size) if i != tokenizer.separator)
    tokens = np.full(sum(lengths), plain, dtype=tokenizer.dtype)
    tokens[np.cumsum(lengths)[:-1] - 1] = tokenizer.separator
    return tokens
