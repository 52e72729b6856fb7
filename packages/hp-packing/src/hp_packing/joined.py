"""The documents of a planned microbatch, one behind the other, before ranks share them.

Shape symbols: S positions of the microbatch, padding included.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hp_data.dataset import Dataset, Piece
from hp_trainer.model.ahead import Ahead, look_ahead


class Joined(NamedTuple):
    """Some documents and padding; all tensors are on the CPU.

    Attributes:
        tokens: int64 [1, S].
        targets: The token after each, int64 [1, S]; -1 where none is to be learned.
        ahead: What is predicted further ahead; None: nothing.
        lengths: Tokens of each document, and at last positions of padding if there are some.
        num_documents: How many of these are of documents.
        places: int64 [4, S]: the document of each position, -1 of padding; its place in it; the
            global index of its sequence in the data, and its place there.
    """

    tokens: Tensor
    targets: Tensor
    ahead: Ahead | None
    lengths: tuple[int, ...]
    num_documents: int
    places: Tensor


def join(
    data: Dataset, pieces: Sequence[Piece], *, padding: int, num_ahead: tuple[int, ...]
) -> Joined:
    """Read documents and put them one behind the other.

    Args:
        data: Has them.
        pieces: Which ones.
        padding: Positions behind them.
        num_ahead: Targets of the whole step, for each module of multi-token prediction.
    """
    assert data.separator is not None
    rows = [(*data.read(piece), _places(i, piece)) for i, piece in enumerate(pieces)]
    if padding:
        nothing = np.full(padding, -1, np.int64)
        places = np.stack((nothing, np.arange(padding), nothing, np.zeros_like(nothing)))
        rows.append((np.full(padding, data.separator, np.int64), nothing, places))
    documents = [(torch.from_numpy(a)[None], torch.from_numpy(b)[None]) for a, b, _ in rows]
    ahead = None
    if num_ahead:
        # Each by itself: behind one whose last token has a target comes another document.
        each = [look_ahead(tokens, targets, num_ahead) for tokens, targets in documents]
        read, aims = (
            tuple(torch.cat(depth, dim=1) for depth in zip(*parts, strict=True))
            for parts in ([a.tokens for a in each], [a.targets for a in each])
        )
        ahead = Ahead(read, aims, num_ahead)
    tokens, targets = (torch.cat(part, dim=1) for part in zip(*documents, strict=True))
    lengths = tuple(len(row[0]) for row in rows)
    whole = torch.from_numpy(np.concatenate([row[2] for row in rows], axis=1))
    return Joined(tokens, targets, ahead, lengths, len(pieces), whole)


def _places(index: int, piece: Piece) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """`Joined.places` of a document."""
    within = np.arange(piece.length, dtype=np.int64)
    of_document, of_sequence = (np.full_like(within, i) for i in (index, piece.sequence))
    return np.stack((of_document, within, of_sequence, within + piece.start))
