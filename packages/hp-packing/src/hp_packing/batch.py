"""This rank's share of a planned step: documents joined, dealt out to ranks, put on the device.

Shape symbols: S positions of a microbatch, padding included; s of them on this rank.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hp_data.dataset import Dataset, Piece
from hp_packing.plan import PlannedMicrobatch
from hp_trainer.layout.sequence import SequenceShare
from hp_trainer.model import DropoutKey, Microbatch
from hp_trainer.model.block import Ahead, Balanced, look_ahead
from hp_trainer.training.batches import Batches, Share


class Joined(NamedTuple):
    """The documents and padding of a microbatch, joined; all tensors are on the CPU.

    Attributes:
        tokens: Token ids, int64 [1, S].
        targets: Next token of each, int64 [1, S]; -1 where none is learned.
        ahead: Tokens and targets of multi-token prediction; None: there is none.
        lengths: Tokens of each document, and last the positions of padding if there are any.
        num_documents: Number of these lengths that are of documents.
        places: Places of positions, int64 [4, S]: document, or -1 for padding; position in the
            document; global index of the sequence in the data; position in that sequence.
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
    """Read documents and join them, with padding at the end.

    Args:
        data: Dataset to read.
        pieces: Documents.
        padding: Number of positions of padding.
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
        # Each document by itself: the next one in the microbatch is another document.
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
    """Return `Joined.places` of a document."""
    within = np.arange(piece.length, dtype=np.int64)
    of_document, of_sequence = (np.full_like(within, i) for i in (index, piece.sequence))
    return np.stack((of_document, within, of_sequence, within + piece.start))


def share_of(
    batches: Batches,
    data: Dataset,
    pieces: tuple[Piece, ...],
    microbatches: tuple[PlannedMicrobatch, ...],
    *,
    step: int,
) -> Share:
    """Return this rank's share of the global batch of a planned step.

    Args:
        batches: Batches of the run, with the mesh and this rank's positions.
        data: Dataset to read.
        pieces: Documents of the global batch.
        microbatches: Microbatches of this rank's team.
        step: Number of the training step, from 0.
    """
    depths = range(1, batches.config.model.num_mtp_modules + 1)
    num_ahead = tuple(sum(piece.num_targets(ahead=d) for piece in pieces) for d in depths)
    num_targets = sum(piece.num_targets() for piece in pieces)
    num_tokens = sum(piece.length for piece in pieces)
    places: list[Tensor] = []
    share = Share([], [], [], num_targets, places)
    for each in microbatches:
        documents = [pieces[document] for document in each.documents]
        joined = join(data, documents, padding=each.padding, num_ahead=num_ahead)
        sequence = batches.sequence.of_deal(each.deal)
        here = sequence.shard(joined.places)
        microbatch = _microbatch(batches, joined, sequence, here, num_tokens=num_tokens, step=step)
        assert microbatch.targets is not None
        share.args.append((batches.to_device(sequence.shard(joined.tokens)),))
        share.kwargs.append({"microbatch": microbatch})
        share.targets.append(microbatch.targets)
        places.append(here[2:])
    return share


def _microbatch(
    batches: Batches,
    joined: Joined,
    sequence: SequenceShare,
    here: Tensor,
    *,
    num_tokens: int,
    step: int,
) -> Microbatch:
    """Return this rank's part of a planned microbatch, with its places int64 [4, s]."""
    config = batches.config

    def take(x: Tensor) -> Tensor:
        return batches.to_device(sequence.shard(x))

    places = batches.to_device(here)
    document, _, of_sequence, place = batches.between(places)
    lengths = joined.lengths[: joined.num_documents]
    is_one = len(joined.lengths) == 1 and batches.mesh.size("cp") == 1
    return Microbatch(
        config.train.global_batch_size,
        DropoutKey(config.run.seed, step, of_sequence[None], place),
        positions=places[1],
        documents=None if is_one else (sequence.limits(joined.lengths),),
        padding=(document < 0)[None] if len(lengths) < len(joined.lengths) else None,
        balanced=Balanced(document, batches.to_device(torch.tensor(lengths)), num_tokens),
        targets=take(joined.targets),
        ahead=joined.ahead and joined.ahead.map(take),
    )
