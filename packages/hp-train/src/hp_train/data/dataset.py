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
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hp_train.data.corpus import Document, read_documents, standard_library
from hp_train.data.tokenizer import Tokenizer
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
    a resumed run reads the very tokens it began with, even if the sources have changed.

    Args:
        directory: Where the files go.
        paths: ``data.paths``; empty for the standard library.
        tokenizer: Its ids are stored in the narrowest dtype that holds them.
        eval_fraction: Share of documents held out.
        on_document: Called before each document, for heartbeats.

    Raises:
        DataError: When the sources cannot be read or hold no text.
    """
    index = directory / "index.json"
    if index.exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    documents = read_documents(paths) if paths else standard_library()
    streams = _tokenize(documents, tokenizer, eval_fraction, on_document)
    about: dict[str, Any] = {"vocab_size": tokenizer.vocab_size}
    for split, stream in zip(_SPLITS, streams, strict=True):
        if not stream.size:
            held = " (raise data.eval_fraction)" if split == "eval" else ""
            raise DataError(f"data.paths hold no documents for the {split} split{held}")
        _replace(directory / f"{split}.bin", stream.tobytes())
        digest = hashlib.blake2b(stream.tobytes(), digest_size=16).hexdigest()
        about[split] = {"tokens": stream.size, "dtype": str(stream.dtype), "digest": digest}
    _replace(index, json.dumps(about).encode())


def _replace(path: Path, content: bytes) -> None:
    """Write a file at once, whoever else does: on shared storage one process of every node."""
    draft = path.with_suffix(f".{uuid4().hex}.tmp")
    draft.write_bytes(content)
    draft.replace(path)


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


@dataclass(frozen=True)
class Dataset:
    """Sequences of one split, addressed by global index.

    Attributes:
        tokens: The split's ids, memory-mapped, one-dimensional.
        seq_len: S.
        seed: Of the order; None keeps the order of the file.
        digest: Of all tokens: two runs read the same data exactly if these agree.
    """

    tokens: NDArray[Any]
    seq_len: int
    seed: int | None
    digest: str

    @classmethod
    def open(cls, directory: Path, split: str, *, seq_len: int, seed: int | None) -> "Dataset":
        """Map a split written by :func:`prepare`.

        Raises:
            DataError: When the file does not fit its index or holds not even one sequence.
        """
        about = json.loads((directory / "index.json").read_text())[split]
        path = directory / f"{split}.bin"
        tokens = np.memmap(path, dtype=np.dtype(about["dtype"]), mode="r")
        if tokens.size != about["tokens"]:
            raise DataError(
                f"{path}: {tokens.size} tokens must equal {about['tokens']} of its index"
            )
        if tokens.size <= seq_len:
            raise DataError(f"{path}: {tokens.size} tokens must exceed data.seq_len ({seq_len})")
        return cls(tokens, seq_len, seed, about["digest"])

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

    def batch(self, sequence_index: range) -> tuple[Tensor, Tensor]:
        """Inputs and next-token targets of some sequences, int64 [B, S] each, on the CPU.

        Args:
            sequence_index: Global indices; past the end a new pass begins, in another order.
        """
        rows = np.empty((len(sequence_index), self.seq_len + 1), dtype=np.int64)
        for row, index in zip(rows, sequence_index, strict=True):
            epoch, offset = divmod(index, self.num_sequences)
            start = int(self._order(epoch)[offset]) * self.seq_len
            row[:] = self.tokens[start : start + self.seq_len + 1]
        block = torch.from_numpy(rows)
        return block[:, :-1].contiguous(), block[:, 1:].contiguous()
