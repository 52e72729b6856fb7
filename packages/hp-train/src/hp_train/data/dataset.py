"""Token files on disk and the order in which sequences are drawn from them.

Sequence ``g`` of a run (its global index, counted over the whole run and all ranks) is a pure
function of the seed and of ``g``: no layout, batch size or restart changes it.

Shape symbols: B sequences, S positions.
"""

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hp_train.data.corpus import Document, read_documents, standard_library
from hp_train.data.tokenizer import Tokenizer
from hp_train.drafts import remove_drafts, replace_file
from hp_train.errors import DataError
from hp_train.randomness import generator

_SPLITS = ("train", "eval")


def prepare(
    directory: Path,
    *,
    paths: Sequence[str],
    tokenizer: Tokenizer,
    eval_fraction: float,
    on_document: Callable[[], None] = lambda: None,
) -> None:
    """Tokenise the corpus into ``train.bin`` and ``eval.bin``, once per run directory.

    Whole documents are held out, chosen by a hash of their names. What is there already is kept:
    a resumed run reads the very tokens it began with, even if the sources have changed. On shared
    storage one process of every node may do this at the same time.

    Args:
        directory: Where the files go.
        paths: ``data.paths``; empty for the standard library.
        tokenizer: Its ids are stored in the narrowest dtype that holds them.
        eval_fraction: Share of documents held out.
        on_document: Called before each document, for heartbeats.

    Raises:
        DataError: When the sources cannot be read or hold no text.
    """
    remove_drafts(directory)
    index = directory / "index.json"
    if index.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    documents = read_documents(paths) if paths else standard_library()
    streams = _tokenize(documents, tokenizer, eval_fraction, on_document)
    about: dict[str, Any] = {
        "vocab_size": tokenizer.vocab_size,
        "separator": tokenizer.separator,
    }
    for split, stream in zip(_SPLITS, streams, strict=True):
        if not stream.size:
            held = " (raise data.eval_fraction)" if split == "eval" else ""
            raise DataError(f"data.paths hold no documents for the {split} split{held}")
        replace_file(directory / f"{split}.bin", stream.tobytes())
        digest = hashlib.blake2b(stream.tobytes(), digest_size=16).hexdigest()
        about[split] = {"tokens": stream.size, "dtype": str(stream.dtype), "digest": digest}
    replace_file(index, json.dumps(about).encode())


def _tokenize(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    eval_fraction: float,
    on_document: Callable[[], None],
) -> tuple[NDArray[Any], NDArray[Any]]:
    parts: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
    for document in documents:
        on_document()
        ids = tokenizer.encode(document.text)
        parts[_is_held_out(document.name, eval_fraction)].extend(
            (ids, np.full(1, tokenizer.separator, dtype=ids.dtype))
        )
    empty = np.zeros(0, dtype=np.uint8)
    train, held_out = (np.concatenate(p) if p else empty for p in parts)
    return train, held_out


def _is_held_out(name: str, fraction: float) -> bool:
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2.0**64 < fraction


class Batch(NamedTuple):
    """Some sequences, on the CPU.

    Attributes:
        tokens: int64 [B, S].
        targets: The token after each, int64 [B, S]; -1 where that is one of another document.
        documents: Of each sequence, the lengths of the documents in it, in order.
    """

    tokens: Tensor
    targets: Tensor
    documents: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Dataset:
    """Sequences of one split, addressed by global index.

    Attributes:
        tokens: The split's ids, memory-mapped, one-dimensional.
        seq_len: S.
        seed: Of the order; None keeps the order of the file.
        digest: Of all tokens: two runs read the same data exactly if these agree.
        separator: Ends a document; None: sequences are taken for one document each.
    """

    tokens: NDArray[Any]
    seq_len: int
    seed: int | None
    digest: str
    separator: int | None

    @classmethod
    def open(
        cls,
        directory: Path,
        split: str,
        *,
        seq_len: int,
        seed: int | None,
        separate: bool = True,
    ) -> "Dataset":
        """Map a split written by :func:`prepare`.

        Args:
            directory: Of the files.
            split: ``"train"`` or ``"eval"``.
            seq_len: S.
            seed: Of the order; None keeps that of the file.
            separate: Whether documents are to be kept apart.

        Raises:
            DataError: When the file does not fit its index or holds not even one sequence.
        """
        index = json.loads((directory / "index.json").read_text())
        about = index[split]
        path = directory / f"{split}.bin"
        tokens = np.memmap(path, dtype=np.dtype(about["dtype"]), mode="r")
        if tokens.size != about["tokens"]:
            raise DataError(
                f"{path}: {tokens.size} tokens must equal {about['tokens']} of its index"
            )
        if tokens.size <= seq_len:
            raise DataError(f"{path}: {tokens.size} tokens must exceed data.seq_len ({seq_len})")
        separator = index["separator"] if separate else None
        return cls(tokens, seq_len, seed, about["digest"], separator)

    @property
    def num_sequences(self) -> int:
        """Different sequences in one pass over the split."""
        return int((self.tokens.size - 1) // self.seq_len)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - two permutations of one long-lived object
    def _order(self, epoch: int) -> NDArray[np.int64]:
        if self.seed is None:
            return np.arange(self.num_sequences)
        order = torch.randperm(self.num_sequences, generator=generator(self.seed, "epoch", epoch))
        return order.numpy()

    def __hash__(self) -> int:
        return id(self)

    def batch(self, sequence_index: range) -> Batch:
        """Read some sequences.

        Args:
            sequence_index: Global indices; past the end a new pass begins, in another order.
        """
        rows = np.empty((len(sequence_index), self.seq_len + 1), dtype=np.int64)
        for row, index in zip(rows, sequence_index, strict=True):
            row[:] = self._tokens(index)
        block = torch.from_numpy(rows)
        tokens, targets = block[:, :-1].contiguous(), block[:, 1:].contiguous()
        whole = ((self.seq_len,),) * len(rows)
        if self.separator is None:
            return Batch(tokens, targets, whole)
        # What follows a separator is the beginning of another document, and nothing tells which.
        # Not in place: of a single sequence, both are views of the same memory.
        targets = targets.masked_fill(tokens == self.separator, -1)
        return Batch(tokens, targets, tuple(map(self._lengths, rows[:, :-1])))

    def num_targets(self, sequence_index: range, *, ahead: int = 0) -> int:
        """How many targets of some sequences are to be learned.

        Args:
            sequence_index: Global indices.
            ahead: How much further ahead than the next token they are.
        """
        if self.separator is None:
            return len(sequence_index) * max(0, self.seq_len - ahead)
        total = 0
        for index in sequence_index:
            ends = np.flatnonzero(self._tokens(index)[:-1] == self.separator)
            # From the tokens of a document, its separator apart, to those as far ahead in it.
            lengths = np.diff(ends, prepend=-1, append=self.seq_len) - 1
            total += int(np.maximum(lengths - ahead, 0).sum())
        return total

    def _tokens(self, index: int) -> NDArray[Any]:
        """The tokens of a sequence and the one after it, as they are stored."""
        epoch, offset = divmod(index, self.num_sequences)
        start = int(self._order(epoch)[offset]) * self.seq_len
        tokens: NDArray[Any] = self.tokens[start : start + self.seq_len + 1]
        return tokens

    def _lengths(self, row: NDArray[np.int64]) -> tuple[int, ...]:
        """Lengths of the documents of one sequence, separators included."""
        ends = np.flatnonzero(row == self.separator) + 1
        bounds = np.unique(np.concatenate(([0], ends, [self.seq_len])))
        return tuple(np.diff(bounds).tolist())
